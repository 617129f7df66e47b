"""KL penalties: their terms, and how their coefficient adapts."""

import logging
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch
from gymnasium import spaces

from lightning_rl import PPO, OnPolicyAlgorithm, PPOKLPenalty, TFAgentsPPO
from lightning_rl.nested import leaves
from lightning_rl.validation import ConfigurationError
from tests.helpers import (
    CONTINUOUS,
    DISCRETE,
    VECTOR,
    FixedRollouts,
    Recorder,
    assert_equal_parameters,
    make_data,
    make_trainer,
    merged,
    parameters_of,
    random_rollout,
)
from tests.recorded import remember

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
SMALL: dict[str, Any] = {"policy": {"hidden_sizes": (8,)}, "num_epochs": 3, "num_minibatches": 2}
EXACT = {"rtol": 1e-12, "atol": 1e-12}


def make(cls: type[PPO] = PPOKLPenalty, space: Any = CONTINUOUS, **options: Any) -> Any:
    torch.manual_seed(0)
    return cls(VECTOR, space, **merged(SMALL, options)).double()


def fit(model: PPO, *rollouts: Any) -> Recorder:
    recorder = Recorder()
    make_trainer(precision="64-true", callbacks=[recorder]).fit(model, FixedRollouts(rollouts, model))
    return recorder


def test_loss_is_ppo_loss_plus_both_penalties():
    options = {"initial_kl_coef": 0.7, "adaptive_kl_target": 0.01, "kl_cutoff_factor": 1.5, "kl_cutoff_coef": 30.0}
    model, without = make(**options), make(PPO, clip_range=None)
    rollout = random_rollout(model.policy)
    batch, acted = model.batch(rollout), make().policy
    with torch.no_grad():  # move away from the policy that acted
        for one in (model, without):
            for parameter in one.policy.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
        kl = acted(batch.observations)[0].kl(model.policy(batch.observations)[0]).mean()
    assert kl > 0.015
    penalty = 30 * (kl - 0.015) ** 2 + 0.7 * kl
    loss, expected = model.loss(batch), without.loss(batch).total.detach() + penalty
    torch.testing.assert_close(loss.total.detach(), expected, rtol=1e-7, atol=0)
    assert loss.observed["kl"].item() == pytest.approx(kl.item())
    assert loss.metrics["kl_penalty"].item() == pytest.approx(penalty.item(), rel=1e-6)
    torch.testing.assert_close(model.mean_kl(batch), kl, **EXACT)


def test_a_larger_penalty_moves_the_policy_less():
    moved = []
    for options in (
        {"initial_kl_coef": 0.0},
        {"initial_kl_coef": 30.0},
        {"initial_kl_coef": 0.0, "kl_cutoff_coef": 1e5},
    ):
        model = make(adaptive_kl_target=1e-3, learning_rate=1e-2, **options)
        rollout = random_rollout(model.policy, off_policy=0.0)
        batch = model.batch(rollout)
        fit(model, rollout)
        moved.append(model.mean_kl(batch).item())
    assert moved[0] > 5 * moved[1] > 0
    assert moved[0] > 5 * moved[2] > 0


@pytest.mark.parametrize(("target", "factor"), [(1e-9, 1.5), (10.0, 1 / 1.5)])
def test_coefficient_adapts_after_each_rollout(target, factor):
    model = make(adaptive_kl_target=target, initial_kl_coef=2.0)
    rollouts = [random_rollout(model.policy, seed=seed) for seed in (1, 2, 3)]
    recorder = fit(model, *rollouts)
    # What was in force during the updates from each rollout.
    assert recorder.column("kl_coef") == pytest.approx([2, 2 * factor, 2 * factor**2])
    torch.testing.assert_close(model.kl_coef.item(), 2 * factor**3)
    assert "kl_coef" in model.state_dict()


def test_kl_coef_does_not_change_during_critic_warmup():
    """The policy does not move, which is no reason to hold it back less."""
    model = make(adaptive_kl_target=1e3, initial_kl_coef=2.0)
    rollouts = [random_rollout(model.policy, seed=seed) for seed in (1, 2, 3)]
    model.steps.critic_warmup_steps = rollouts[0].num_steps + 1
    recorder = fit(model, *rollouts)
    assert recorder.column("kl_coef") == [2, 2, 2] and model.kl_coef < 2


def test_target_follows_a_schedule_in_both_penalties():
    points = [[0, 1e-9], [48, 10.0]]
    model = make(adaptive_kl_target={"kind": "piecewise", "points": points}, kl_cutoff_coef=5.0, initial_kl_coef=2.0)
    rollouts = [random_rollout(model.policy, seed=seed) for seed in (1, 2)]
    recorder = fit(model, *rollouts)
    assert recorder.column("kl_coef") == pytest.approx([2, 3])
    assert model.kl_coef.item() == pytest.approx(2)
    assert model.adaptive_kl_target == 10
    batch = model.batch(rollouts[0])
    distribution, _ = model.actor_critic(batch)
    moved = distribution.with_parameters(shifted(distribution.parameters()))
    for target, is_beyond in ((1e-9, True), (10.0, False)):
        model.adaptive_kl_target = target
        loss = model.new_loss(batch)
        model.add_policy_terms(loss, moved)
        beyond = loss.metrics["kl_penalty"] - model.kl_coef * loss.observed["kl"]
        assert (beyond > 1e-9) == is_beyond


def shifted(parameters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: x + 0.1 for name, x in parameters.items()}


@pytest.mark.parametrize("cls", [PPOKLPenalty, TFAgentsPPO])
def test_options_of_ppo_accept_the_same_types(cls):
    """Which is what the command line goes by: a schedule here is one there."""
    usual = get_type_hints(OnPolicyAlgorithm.__init__) | get_type_hints(PPO.__init__)
    own = get_type_hints(cls.__init__)
    narrower = {"normalize_observations", "normalize_rewards", "advantage_estimator", "value_target", "on_truncation"}
    shared = own.keys() & usual.keys() - narrower
    assert shared > {"observation_space", "action_space"}
    assert {name: own[name] for name in shared} == {name: usual[name] for name in shared}


def test_resuming_can_turn_on_the_adaptive_penalty(tmp_path, caplog):
    rollout = random_rollout(make().policy)
    off, on = make(initial_kl_coef=0.0), make(initial_kl_coef=2.0, adaptive_kl_tolerance=1e9)
    trainer = make_trainer(precision="64-true")
    trainer.fit(off, FixedRollouts([rollout], off))
    trainer.save_checkpoint(tmp_path / "off.ckpt")
    with caplog.at_level(logging.INFO, "lightning.pytorch.utilities.rank_zero"):
        trainer = make_trainer(precision="64-true", max_epochs=2)
        trainer.fit(on, FixedRollouts([rollout], on), ckpt_path=tmp_path / "off.ckpt")
    assert on.policy_version == 2
    assert on.kl_coef == 2
    assert "Resuming with initial_kl_coef=2.0 (before: 0.0)" in caplog.messages


def test_resuming_can_turn_off_the_adaptive_penalty(tmp_path):
    rollout = random_rollout(make().policy)
    on, off = make(initial_kl_coef=2.0), make(initial_kl_coef=0.0)
    trainer = make_trainer(precision="64-true")
    trainer.fit(on, FixedRollouts([rollout], on))
    trainer.save_checkpoint(tmp_path / "on.ckpt")
    trainer = make_trainer(precision="64-true", max_epochs=2)
    trainer.fit(off, FixedRollouts([rollout], off), ckpt_path=tmp_path / "on.ckpt")
    assert (off.policy_version, off.losses["kl_coef"]) == (2, 0)


def test_the_adaptive_penalty_starts_in_a_module_whose_parameters_are_loaded_already(tmp_path):
    """With sharded parameters, the strategy removes them from the checkpoint."""
    off, on = make(initial_kl_coef=0.0), make(initial_kl_coef=2.0)
    trainer = make_trainer(precision="64-true")
    trainer.fit(off, FixedRollouts([random_rollout(off.policy)], off))
    trainer.save_checkpoint(tmp_path / "off.ckpt")
    checkpoint = torch.load(tmp_path / "off.ckpt", weights_only=True)
    on.load_state_dict(checkpoint.pop("state_dict"))
    on.on_load_checkpoint(checkpoint)
    assert on.kl_coef == 2


def test_kl_coef_does_not_change_within_the_tolerance():
    model = make(adaptive_kl_target=1.0, adaptive_kl_tolerance=1e9, initial_kl_coef=2.0)
    fit(model, random_rollout(model.policy))
    assert model.kl_coef == 2


def test_kl_coef_does_not_change_after_skipped_updates():
    model = make(adaptive_kl_target=1e-9, debug={"max_skipped_updates": 1})
    rollout = random_rollout(model.policy)
    rollout.log_probs[2, 1] = torch.nan
    with pytest.warns(UserWarning, match="policy_loss is nan"):
        fit(model, rollout)
    assert model.kl_coef == 1


@pytest.mark.usefixtures("through_autograd")
def test_ppo_kl_without_penalties_equals_ppo():
    model, usual = make(initial_kl_coef=0.0, clip_range=0.2), make(PPO)
    rollout = random_rollout(model.policy)
    fit(model, rollout)
    make_trainer(precision="64-true").fit(usual, FixedRollouts([rollout], usual))
    assert_equal_parameters(model, parameters_of(usual))
    assert model.kl_coef == 0


def test_divergence_uses_the_policy_and_normalizer_that_acted():
    model = make(normalization={"observations": True, "update": "before"})
    rollout = random_rollout(model.policy, off_policy=0.0)
    acted = model.policy(rollout.observations[:-1])[0].parameters()
    batch = model.batch(rollout)
    assert model.policy.observation_normalizer.moments.count == 48
    for ours, theirs in zip(leaves(batch.acting_distribution), leaves(acted), strict=True):
        torch.testing.assert_close(ours, theirs.flatten(0, 1), **EXACT)
    assert model.mean_kl(batch) > 1e-8


NESTED = spaces.Dict(
    {
        "arm": spaces.Tuple([spaces.Box(-2, 2, (2,), np.float32), spaces.MultiDiscrete([3, 2]), spaces.MultiBinary(2)]),
        "grip": spaces.Box(0, 1, (1,), np.float32),
        "move": spaces.Discrete(3),
    }
)


@pytest.mark.parametrize("memory", [None, {"kind": "gru", "hidden_size": 4, "sequence_length": 6}])
def test_divergence_uses_the_normalizer_that_acted_with_update_before(memory):
    model = make(normalization={"observations": True, "update": "before"}, policy={"memory": memory})
    rollout = random_rollout(make().policy)
    if memory is not None:
        remember(model.policy, rollout)
    with torch.no_grad():
        acted = model.actor_critic(rollout.flatten())[0]
    batch = model.batch(rollout)
    assert model.policy.observation_normalizer.moments.count == 48
    expected = acted.parameters()
    for name, x in batch.acting_distribution.items():
        torch.testing.assert_close(x, expected[name], **EXACT)
    assert model.mean_kl(batch) > 1e-9


def test_every_distribution_is_restored_from_its_parameters():
    options = {"policy": {"action_distribution": {"arm.0": "squashed_gaussian", "grip": "beta"}}}
    old, new = make(space=NESTED, **options).policy, make(space=NESTED, **options).policy
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    observations = torch.randn(5, 4, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    acted, current = old(observations)[0], new(observations)[0]
    assert all(x.shape[:2] == (5, 4) for x in leaves(acted.parameters()))
    again = current.with_parameters(acted.parameters())
    action = acted.sample()
    assert torch.equal(again.log_prob(action), acted.log_prob(action))
    assert torch.equal(again.kl(current), acted.kl(current))
    assert (again.kl(current) > 0).all()


@pytest.mark.parametrize("memory", [None, "lstm"])
def test_stored_acting_distributions_do_not_change(memory):
    """Also the standard deviation, which here is a parameter that is updated in place."""
    model = make(policy={"memory": memory})
    rollout = random_rollout(make().policy)
    if memory is not None:
        remember(model.policy, rollout)
    acting = model.batch(rollout).acting_distribution
    before = {name: x.clone() for name, x in acting.items()}
    with torch.no_grad():
        for parameter in model.policy.parameters():
            parameter.add_(1.0)
    assert all(torch.equal(x, before[name]) and not x.requires_grad for name, x in acting.items())
    assert model.policy.action_head.log_std.min() > before["log_std"].max() + 0.9


def test_it_learns_with_nested_actions_from_environments():
    data = make_data("tests.probes:Probe/Aim-v0", env={"kwargs": {"action_space": NESTED}})
    model = PPOKLPenalty(data.observation_space, data.action_space, adaptive_kl_target=1e-6, **SMALL)
    recorder = Recorder()
    make_trainer(callbacks=[recorder]).fit(model, data)
    assert max(recorder.column("first_ratio_error")) <= 1e-5
    assert model.kl_coef == pytest.approx(1.5**2)
    assert min(recorder.column("kl")) > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"initial_kl_coef": -1}, r"initial_kl_coef=-1 .* at least 0"),
        ({"adaptive_kl_target": 0}, r"adaptive_kl_target=0 .* above 0"),
        ({"adaptive_kl_tolerance": -0.1}, r"adaptive_kl_tolerance=-0\.1 .* at least 0"),
        ({"kl_cutoff_factor": None}, r"kl_cutoff_factor=None .* at least 0"),
        ({"kl_cutoff_coef": -1}, r"kl_cutoff_coef=-1 .* at least 0"),
    ],
)
def test_invalid_values_raise(options, message):
    with pytest.raises(ConfigurationError, match=message):
        PPOKLPenalty(VECTOR, DISCRETE, **options)

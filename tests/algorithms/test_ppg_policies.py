"""Both PPGs with every kind of policy, in every precision; and nonsense."""

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from lightning_rl import PPG, PPO, OffPolicyPPG, Rollout
from lightning_rl.validation import ConfigurationError
from tests.algorithms.ppg_models import PHASE, REUSED, change, fit, make
from tests.helpers import (
    CONTINUOUS,
    DISCRETE,
    VECTOR,
    FixedRollouts,
    Recorder,
    make_data,
    make_trainer,
    merged,
    parameters_of,
    random_rollout,
)
from tests.mask_probes import CASES, kwargs_of, source_of

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")


@pytest.mark.parametrize("algorithm", [PPG, OffPolicyPPG])
@pytest.mark.parametrize("architecture", ["dual", "shared", "detached"])
@pytest.mark.parametrize("space", [DISCRETE, CONTINUOUS, spaces.Dict({"a": CONTINUOUS, "b": spaces.MultiBinary(2)})])
def test_every_action_space_learns_in_every_architecture(algorithm: Any, architecture: Any, space: Any) -> None:
    model = make(algorithm, space, architecture=architecture, policy={"action_distribution": None})
    before = parameters_of(model)
    rollouts = [nested_rollout(model, seed) for seed in range(4)]
    recorder = Recorder()
    make_trainer(callbacks=[recorder]).fit(model, FixedRollouts(rollouts, model))
    assert any(row.get("aux_kl", 0) > 0 for row in recorder.rows)
    for name in before:
        assert change(model, before, name) > 0, name


def nested_rollout(model: PPG, seed: int) -> Rollout:
    rollout = random_rollout(PPO(VECTOR, DISCRETE, policy={"hidden_sizes": (8,)}).policy, seed=seed)
    observations = rollout.observations[:-1]
    with torch.no_grad():
        distribution, _ = model.policy(observations)
        rollout.actions = distribution.sample(torch.Generator().manual_seed(seed))
        rollout.log_probs = distribution.log_prob(rollout.actions)
    return rollout


BOUNDS = {"32-true": 1e-6, "64-true": 1e-12, "bf16-mixed": 1e-2, "bf16-true": 1e-2}


@pytest.mark.parametrize("precision", BOUNDS)
@pytest.mark.parametrize("algorithm", [PPG, OffPolicyPPG])
def test_both_phases_learn_in_every_precision(algorithm: type[PPG], precision: str) -> None:
    data = make_data(num_envs=4, rollout_length=16, rollouts_per_epoch=4)
    options = REUSED if algorithm is OffPolicyPPG else PHASE
    model = algorithm(data.observation_space, data.action_space, **options)
    recorder = Recorder()
    make_trainer(precision=precision, callbacks=[recorder]).fit(model, data)
    assert max(recorder.column("first_ratio_error")) <= BOUNDS[precision]
    assert sum(row.get("aux_kl", 0) > 0 for row in recorder.rows) >= 2


@pytest.mark.parametrize("algorithm", [PPG, OffPolicyPPG])
@pytest.mark.parametrize(("name", "more"), CASES)
def test_cloning_uses_the_action_masks(algorithm: type[PPG], name: str, more: dict[str, Any]) -> None:
    """Where nothing is to be learned the divergence is 0, and finite where something is."""
    kwargs = kwargs_of(name, where="info", **more)
    probe = {"env": {"kwargs": kwargs, "action_mask": source_of("info")}, "num_envs": 4, "rollouts_per_epoch": 3}
    data = make_data("tests.mask_probes:Probe/Invalid-v0", **probe)
    defaults = REUSED if algorithm is OffPolicyPPG else PHASE
    for scale in (1e-30, 1.0):
        torch.manual_seed(0)
        policy = {"action_distribution": "autoregressive" if more else None}
        options = {"policy": policy, "aux_learning_rate_scale": scale, "num_policy_iterations": 1}
        recorder = Recorder()
        model = algorithm(data.observation_space, data.action_space, **merged(defaults, options))
        make_trainer(precision="64-true", callbacks=[recorder]).fit(model, data)
        divergences = [row["aux_kl"] for row in recorder.rows if "aux_kl" in row]
        assert len(divergences) >= 2
        if scale < 1:
            assert max(map(abs, divergences)) < 1e-12
        else:
            assert 0 < max(divergences) < 1


@pytest.mark.parametrize(
    "memory", ["lstm", {"kind": "gru", "hidden_size": 8, "sequence_length": 4, "burn_in": 3}], ids=str
)
@pytest.mark.parametrize("architecture", ["dual", "shared", "detached"])
def test_cloning_divergence_of_recurrent_policies_starts_at_zero(memory: Any, architecture: Any) -> None:
    """From the same states, over the same sequences: with nothing to learn the divergence is 0."""
    data = make_data(num_envs=4, rollout_length=16, rollouts_per_epoch=2, seed=3)
    shared = {"separate": False} if architecture == "detached" else {}
    memory = {"kind": memory} | shared if isinstance(memory, str) else memory | shared
    for options in ({"cloning_coef": 0.0, "aux_value_coef": 0.0, "aux_learning_rate_scale": 1e-30}, {}):
        torch.manual_seed(0)
        own = {"policy": {"memory": memory}, "architecture": architecture, "num_minibatches": 1}
        model = PPG(data.observation_space, data.action_space, **merged(PHASE, own, options))
        before = parameters_of(model)
        recorder = Recorder()
        make_trainer(precision="64-true", callbacks=[recorder]).fit(model, data)
        assert max(recorder.column("first_ratio_error")) <= 1e-12
        if options:
            assert abs(recorder.rows[1]["aux_cloning_loss"]) < 1e-14
            assert abs(recorder.rows[1]["aux_kl"]) < 1e-14
        else:
            assert recorder.rows[1]["aux_kl"] > 1e-9
            assert all(change(model, before, name) > 0 for name in before)


@pytest.mark.parametrize("value_normalization", ["running_std", "popart"])
def test_both_value_heads_use_the_same_units(value_normalization: Any) -> None:
    """PopArt keeps the predictions of both heads when its moments change."""
    model = make(normalization={"values": value_normalization}, num_policy_iterations=9)
    fit(model, 1)
    before = [x.detach() for x in model.policy.forward_auxiliary(torch.ones(1, 3))[1:]]
    normalizer = model.policy.value_normalizer
    deviation = 1 / normalizer.moments.scale(normalizer.epsilon)
    normalizer.update(torch.tensor([100.0, -300.0]), model.policy.value_heads)
    grown = 1 / normalizer.moments.scale(normalizer.epsilon) / deviation
    assert grown > 5
    for one, other in zip(before, model.policy.forward_auxiliary(torch.ones(1, 3))[1:], strict=True):
        expected = one if value_normalization == "popart" else one * grown.float()
        torch.testing.assert_close(other, expected, rtol=1e-4, atol=1e-4)
    model = make(normalization={"values": value_normalization})
    plain = make()
    for each in (model, plain):
        fit(each, 4)
    assert change(model, parameters_of(plain) | {n: p for n, p in model.named_parameters() if "normal" in n}) > 1e-4


@pytest.mark.parametrize("separate_aux_optimizer", [False, True])
@pytest.mark.parametrize("algorithm", [PPG, OffPolicyPPG])
def test_separate_critic_optimizers_work_in_both_phases(algorithm: type[PPG], separate_aux_optimizer: bool) -> None:
    options = {
        "optimizer": {"critic": {"learning_rate": 1e-2}, "num_value_epochs": 2},
        "separate_aux_optimizer": separate_aux_optimizer,
    }
    model = make(algorithm, aux_learning_rate_scale=0.5, **options)
    recorder = fit(model, 4)
    assert len(model.steps.all_optimizers) == (4 if separate_aux_optimizer else 2)
    row = next(row for row in recorder.rows if "aux_kl" in row)
    assert min(row[f"{phase}{part}grad_norm"] for phase in ("", "aux_") for part in ("", "critic_")) > 0
    assert row["aux_learning_rate"] == pytest.approx(0.5 * 3e-3)


def test_further_optimizer_beside_auxiliary_ones_is_refused() -> None:
    class WithDiscriminator(PPG):
        def configure_optimizers(self) -> Any:
            self.discriminator = torch.nn.Linear(4, 1)
            optimizers, schedulers = super().configure_optimizers()
            return [*optimizers, torch.optim.Adam(self.discriminator.parameters())], schedulers

    with pytest.raises(ConfigurationError, match=r"3 optimizers.* unless separate_aux_optimizer is false"):
        fit(make(WithDiscriminator), 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_policy_iterations": 0}, r"num_policy_iterations=0 .* an integer of at least 1"),
        ({"num_aux_epochs": 0}, r"num_aux_epochs=0 .* an integer of at least 1"),
        ({"num_aux_minibatches": 0.5}, r"num_aux_minibatches=0\.5 .* an integer of at least 1"),
        ({"aux_sequences": 1}, r"aux_sequences=1 .* true or false"),
        ({"cloning_coef": -1}, r"cloning_coef=-1 .* at least 0"),
        ({"aux_value_coef": -1}, r"aux_value_coef=-1 .* at least 0"),
        ({"aux_clip_range_value": 0}, r"aux_clip_range_value=0 .* above 0"),
        ({"kl_penalty_coef": -1}, r"kl_penalty_coef=-1 .* at least 0"),
        ({"aux_learning_rate_scale": 0}, r"aux_learning_rate_scale=0 .* above 0"),
        ({"separate_aux_optimizer": None}, r"separate_aux_optimizer=None .* true or false"),
        ({"aux_memory_gib": 0}, r"aux_memory_gib=0 .* above 0"),
        ({"architecture": "single"}, r"architecture='single' .* one of dual, shared, detached"),
        (
            {"architecture": "detached", "policy": {"memory": {"kind": "gru", "separate": True}}},
            r"memory=.* not separate",
        ),
        ({"policy": {"shared_encoder": True}}, r"policy.shared_encoder=True .* architecture says"),
        ({"architecture": "shared", "optimizer": {"critic": {"learning_rate": 1e-3}}}, r"of PPG, architecture=dual"),
        ({"clip_range": -1}, r"clip_range=-1"),
    ],
)
def test_invalid_options_raise(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make(**options)


def test_critic_only_observations_need_the_dual_architecture() -> None:
    space = spaces.Dict({"seen": VECTOR, "hidden": spaces.Box(-1, 1, (2,), np.float32)})
    PPG(space, DISCRETE, policy={"critic_only": ["hidden"]})
    with pytest.raises(ConfigurationError, match=r"architecture='shared' .* dual, since critic_only"):
        PPG(space, DISCRETE, policy={"critic_only": ["hidden"]}, architecture="shared")

"""V-MPO: its loss, how its duals move, and what each option changes."""

import math
from typing import Any

import pytest
import torch

from lightning_rl import PPO, VMPO, ActorCritic
from lightning_rl.rollouts.rollout import Rollout
from lightning_rl.tools.export import export_policy
from lightning_rl.validation import ConfigurationError
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
from tests.recorded import remember

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
MEMORY = {"kind": "gru", "hidden_size": 4, "sequence_length": 4, "burn_in": 3}


def make(cls: type[VMPO] = VMPO, space: Any = CONTINUOUS, **options: Any) -> VMPO:
    torch.manual_seed(0)
    return cls(VECTOR, space, **merged({"policy": {"hidden_sizes": (8,)}}, options)).double()


def fit(model: VMPO, rollouts: int = 1) -> Recorder:
    """Learn from rollouts that the first parameters collected."""
    recorder = Recorder()
    loader = FixedRollouts([random_rollout(model.policy, seed=seed, off_policy=0.0) for seed in range(rollouts)], model)
    make_trainer(precision="64-true", callbacks=[recorder]).fit(model, loader)
    return recorder


def moved(model: VMPO) -> VMPO:
    """The same, away from the policy that acted."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.policy.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


class Weighing(VMPO):
    """Counts some steps twice and some not at all."""

    def step_weights(self, rollout: Rollout) -> torch.Tensor:
        return torch.arange(rollout.rewards.numel()).reshape(rollout.shape) % 3.0


@pytest.mark.parametrize("cls", [VMPO, Weighing])
def test_vmpo_loss_matches_equations_3_to_6(cls):
    options = {"temperature_epsilon": 0.2, "kl_epsilon": 0.03, "value_coef": 0.7}
    model = make(cls, **options, initial_temperature=0.8, initial_kl_coef=3.0)
    rollout = random_rollout(model.policy, valid=True)
    batch = model.batch(rollout)
    acted = make(cls).policy(batch.observations)[0]
    duals = moved(model).duals.tolist()
    with torch.no_grad():
        distribution, values = model.policy(batch.observations)
        log_probs, kl = distribution.log_prob(batch.actions).tolist(), acted.kl(distribution).tolist()
    weights = batch.weights.tolist() if cls is Weighing else [1.0] * len(batch)
    assert 0 not in weights  # without memory steps that do not count are not there
    rows = sorted(range(len(batch)), key=lambda i: -batch.advantages[i])[: (len(batch) + 1) // 2]
    shares = [weights[i] * math.exp(batch.advantages[i] / duals[0]) for i in rows]
    policy = -sum(share * log_probs[i] for share, i in zip(shares, rows, strict=True)) / sum(shares)
    temperature = duals[0] * (0.2 + math.log(sum(shares) / sum(weights[i] for i in rows)))
    divergence = sum(w * x for w, x in zip(weights, kl, strict=True)) / sum(weights)
    squares = [0.5 * x * x for x in (values - batch.returns).tolist()]
    value = sum(w * x for w, x in zip(weights, squares, strict=True)) / sum(weights)
    expected = policy + temperature + duals[1] * 0.03 + 0.7 * value
    found = model.compute_loss(batch)
    assert found["loss"] == pytest.approx(expected, rel=1e-9)
    terms = {"policy_loss": policy, "temperature_loss": temperature, "kl": divergence, "value_loss": value}
    assert {name: found[name] for name in terms} == pytest.approx(terms, rel=1e-9)
    assert [found["temperature"], found["kl_coef"]] == pytest.approx(duals)
    assert divergence > 0.01


def test_steps_of_weight_0_have_no_effect_with_memory():
    """There they stay in their sequences: here with numbers that would be in the better half."""
    losses = []
    for large in (0.0, 100.0):
        model = make(Weighing, policy={"memory": MEMORY})
        rollout = random_rollout(make().policy)
        remember(model.policy, rollout)
        batch = model.batch(rollout)
        assert (batch.weights == 0).any()
        advantages = torch.where(batch.weights == 0, large, batch.advantages)
        losses.append(moved(model).compute_loss(batch.replace(advantages=advantages))["loss"])
    assert losses[0] == losses[1]


def test_a_rank_without_rows_adds_nothing():
    model = make()
    batch = model.batch(random_rollout(model.policy))
    empty = batch.ordered(torch.zeros(0, dtype=torch.long))
    loss = model.loss(empty)
    assert loss.total.item() == pytest.approx(5 * 0.01)  # the bound of the divergence, which all ranks have in common
    loss.total.backward()
    gradients = {name: p.grad for name, p in model.policy.named_parameters() if p.grad is not None}
    dual = gradients.pop("dual")
    assert dual[0] == 0
    assert not any(gradient.any() for gradient in gradients.values())


def test_duals_start_at_their_options_and_stay_positive():
    model = make(initial_temperature=0.05, initial_kl_coef=20)
    assert model.duals.tolist() == pytest.approx([0.05, 20], rel=1e-5)
    assert model.policy.dual.shape == (2,)
    with torch.no_grad():
        model.policy.dual.fill_(-1e4)
    assert model.duals.tolist() == [1e-8, 1e-8]
    assert math.isfinite(fit(model).column("loss")[0])


@pytest.mark.parametrize(
    ("option", "value", "dual", "grows"),
    [
        ("temperature_epsilon", 1e-6, "temperature", True),
        ("temperature_epsilon", 10.0, "temperature", False),
        ("kl_epsilon", 1e-9, "kl_coef", True),
        ("kl_epsilon", 10.0, "kl_coef", False),
    ],
)
def test_duals_grow_above_their_bound_and_shrink_below(option, value, dual, grows):
    found = fit(make(**{option: value}, learning_rate=1e-2, num_epochs=3), 3).column(dual)
    assert (found[1] > found[0]) == (found[2] > found[1]) == grows
    assert found[0] != found[1]


def test_a_larger_kl_coef_moves_the_policy_less():
    kl = [fit(make(initial_kl_coef=x, learning_rate=1e-2, num_epochs=8)).column("kl")[0] for x in (0.1, 100.0)]
    assert kl[0] > 3 * kl[1] > 0


def test_num_epochs_num_minibatches_and_gae_lambda_are_used():
    model = make(num_epochs=3, num_minibatches=2, gae_lambda=0.5)
    rollout = random_rollout(model.policy, off_policy=0.0)
    assert torch.equal(model.batch(rollout).advantages, model.estimator.gae(rollout, 0.5).flatten())
    trainer = make_trainer(precision="64-true")
    trainer.fit(model, FixedRollouts([rollout], model))
    assert trainer.global_step == 6


def test_value_loss_uses_head_units_and_l2_skips_the_duals():
    plain, in_units = make(), make(normalization={"values": "running_std"}, optimizer={"l2": {"policy": 0.1}})
    rollout = random_rollout(plain.policy)
    in_units.policy.value_normalizer.update(3 * torch.randn(100, dtype=torch.float64), [])
    one, other = (model.compute_loss(model.batch(rollout)) for model in (plain, in_units))
    assert other["value_loss"] != pytest.approx(one["value_loss"])
    squares = sum((w**2).sum().item() for name, w in in_units.policy.named_parameters() if is_weight_of_actor(name, w))
    assert other["l2_penalty"] == pytest.approx(0.1 * squares)


def is_weight_of_actor(name: str, parameter: torch.Tensor) -> bool:
    return parameter.dim() == 2 and name.startswith(("actor_", "action_"))


def test_optimizer_groups_can_name_the_duals():
    groups = {"dual": {"learning_rate_scale": 0.0, "weight_decay": 0.0}}
    model = make(optimizer={"groups": groups, "name": "torch.optim.AdamW"})
    before = parameters_of(model)
    fit(model)
    assert [name for name, p in model.named_parameters() if torch.equal(p, before[name])] == ["policy.dual"]


def test_init_from_and_export_ignore_the_duals(tmp_path):
    data = make_data()
    torch.manual_seed(0)
    spaces = data.observation_space, data.action_space
    model, other = VMPO(*spaces, policy={"hidden_sizes": (8,)}), PPO(*spaces, policy={"hidden_sizes": (8,)})
    trainers = [make_trainer() for _ in range(2)]
    for trainer, one in zip(trainers, (model, other), strict=True):
        trainer.fit(one, data)
        trainer.save_checkpoint(tmp_path / f"{type(one).__name__}.ckpt")
    assert PPO(*spaces, policy={"hidden_sizes": (8,)}).init_from(tmp_path / "VMPO.ckpt").not_here == ["policy.dual"]
    begun = VMPO(*spaces, policy={"hidden_sizes": (8,)}, initial_kl_coef=7.0)
    assert begun.init_from(tmp_path / "PPO.ckpt").not_stored == ["policy.dual"]
    assert begun.duals.tolist() == pytest.approx([1, 7])
    export_policy(model, tmp_path / "exported", format="torch_export", programs=["greedy"])  # compares the two
    assert VMPO.load_from_checkpoint(tmp_path / "VMPO.ckpt").act([0.0] * 4) in (0, 1)


@pytest.mark.parametrize(
    "options",
    [
        {"initial_temperature": 0.0},
        {"initial_kl_coef": -1.0},
        {"temperature_epsilon": 0.0},
        {"kl_epsilon": math.nan},
        {"value_coef": -0.1},
        {"num_epochs": 0},
        {"num_minibatches": 1.5},
        {"gae_lambda": 1.1},
    ],
    ids=lambda options: next(iter(options)),
)
def test_invalid_options_raise(options):
    ((name, value),) = options.items()
    with pytest.raises(ConfigurationError, match=f"{name}.*{value}"):
        make(space=DISCRETE, **options)


def test_rollouts_of_older_policies_raise():
    data = make_data(actors={"count": 1})
    with pytest.raises(ConfigurationError, match=r"actors\.count"):
        make_trainer().fit(VMPO(data.observation_space, data.action_space), data)


def test_policy_without_duals_is_refused_before_training() -> None:
    class Own(VMPO):
        def make_policy(self) -> ActorCritic:
            return ActorCritic(self.observation_space, self.action_space, **self.policy_options())

    with pytest.raises(ConfigurationError, match=r"make_policy='ActorCritic' .* parameter dual"):
        fit(make(Own))

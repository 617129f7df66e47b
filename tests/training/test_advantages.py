"""Advantages, value targets, normalizers, step weights and weight penalties, option by option."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from gymnasium import spaces
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor

from lightning_rl import A2C, CLEAR, IMPALA, PPO, VMPO, FailedUpdate, PPOKLPenalty, Rollout, TFAgentsPPO
from lightning_rl.distributed import moments
from lightning_rl.rollouts.batch import Batch
from lightning_rl.training.advantages import AdvantageEstimator, explained_variance
from lightning_rl.training.loss import Loss
from lightning_rl.training.normalizers import Normalizers
from lightning_rl.training.parameter_groups import weights_by_part
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

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
EXACT = {"rtol": 1e-12, "atol": 1e-12}
SMALL: dict[str, Any] = {
    "policy": {"hidden_sizes": (8,)},
    "num_epochs": 2,
    "num_minibatches": 2,
    "gamma": 0.9,
    "gae_lambda": 0.7,
}


def make(cls: type[PPO] = PPO, **options: Any) -> PPO:
    torch.manual_seed(0)
    return cls(VECTOR, DISCRETE, **merged(SMALL, options)).double()


def fit(model: PPO, *rollouts: Rollout, **trainer: Any) -> Recorder:
    recorder = Recorder()
    trainer["callbacks"] = [recorder, *trainer.get("callbacks", [])]
    make_trainer(precision="64-true", **trainer).fit(model, FixedRollouts(rollouts, model))
    return recorder


def empirical_returns(rollout: Rollout, gamma: float) -> Tensor:
    """Sum rewards step by step up to the end of the episode, or of the rollout plus the value there."""
    returns, length = torch.zeros_like(rollout.rewards), len(rollout.rewards)
    for b in range(rollout.shape[1]):
        for t in reversed(range(length)):
            continues = t + 1 < length and not rollout.dones[t, b]
            following = returns[t + 1, b] if continues else rollout.next_values[t, b]
            returns[t, b] = rollout.rewards[t, b] + (0.0 if rollout.terminated[t, b] else gamma) * following
    return returns


def test_monte_carlo_advantages_are_discounted_rewards_minus_value():
    model = make(advantages={"estimator": "monte_carlo"})
    rollout = random_rollout(model.policy)
    assert rollout.truncated.any()
    assert rollout.terminated.any()
    batch, returns = model.batch(rollout), empirical_returns(rollout, 0.9).flatten()
    torch.testing.assert_close(batch.returns, returns, **EXACT)
    torch.testing.assert_close(batch.advantages, returns - batch.values, **EXACT)


def test_empirical_value_targets_do_not_change_advantages():
    model, usual = make(advantages={"value_target": "empirical"}), make()
    rollout = random_rollout(model.policy)
    batch = model.batch(rollout)
    torch.testing.assert_close(batch.returns, empirical_returns(rollout, 0.9).flatten(), **EXACT)
    assert torch.equal(batch.advantages, usual.batch(rollout).advantages)
    assert not torch.allclose(batch.returns, usual.batch(rollout).returns)


class EveryOther(PPOKLPenalty):
    """All steps of every second rollout have weight 0."""

    def step_weights(self, rollout: Rollout) -> Tensor | None:
        return torch.zeros(rollout.shape) if self.policy_version % 2 else None


def test_no_step_is_taken_if_all_steps_have_weight_0():
    model = make(EveryOther)
    rollouts = [random_rollout(model.policy, seed=seed) for seed in range(3)]
    states: list[dict[str, Tensor]] = []

    def keep(*_: Any) -> None:
        states.append({name: x.clone() for name, x in model.state_dict().items()})

    recorder = fit(model, *rollouts, callbacks=[LambdaCallback(on_train_batch_end=keep)])
    assert [int(row.get("loss") is not None) for row in recorder.rows] == [1, 0, 1]
    changed = [
        {n for n in after if not torch.equal(after[n], before[n])} for before, after in itertools.pairwise(states)
    ]
    assert changed[0] == set()  # not even the KL coefficient
    assert "kl_coef" in changed[1]
    assert len(changed[1]) > 5


@pytest.mark.parametrize("cls", [PPO, A2C, VMPO, IMPALA])
@pytest.mark.parametrize("memory", [None, {"kind": "gru", "hidden_size": 4, "sequence_length": 4}])
def test_no_algorithm_takes_a_step_without_counted_rows(cls, memory):
    """With memory, rows of weight 0 stay in their sequences."""
    data = make_data("Pendulum-v1", rollouts_per_epoch=3)
    changed: list[bool] = []

    class Every(cls):
        def step_weights(self, rollout: Rollout) -> Tensor | None:
            return torch.zeros(rollout.shape) if rollout.policy_version == 1 else None

        def on_train_batch_end(self, *args: Any) -> None:
            changed.append(any(not torch.equal(p, before[n]) for n, p in self.named_parameters()))
            before.update(parameters_of(self))

    torch.manual_seed(0)
    options = {"normalization": {"values": "popart"}, "optimizer": {"name": "torch.optim.Adam"}}
    policy = {"memory": memory, "hidden_sizes": (8,)}
    model = Every(data.observation_space, data.action_space, policy=policy, **options)
    before = parameters_of(model)
    make_trainer().fit(model, data)
    assert changed == [True, False, True]


@pytest.mark.parametrize("replayed", [False, True])
def test_clear_can_learn_from_replayed_rows_only(replayed):
    """All steps of the new rollout have weight 0; replayed ones have the weights of their rollout."""
    data = make_data("Pendulum-v1", rollouts_per_epoch=2)

    class Late(CLEAR):
        def step_weights(self, rollout: Rollout) -> Tensor | None:
            return torch.zeros(rollout.shape) if rollout.policy_version == 1 or not replayed else None

    recorder = Recorder()
    make_trainer(callbacks=[recorder]).fit(Late(data.observation_space, data.action_space), data)
    assert [row.get("loss") is not None for row in recorder.rows] == [replayed, replayed]


class Doubled(AdvantageEstimator):
    """Doubles the standardized advantages."""

    def standardize(self, parts: Any) -> Any:
        return [2 * part for part in super().standardize(parts)]


class WithDoubled(PPO):
    """PPO with the estimator above."""

    def make_estimator(self, **options: Any) -> AdvantageEstimator:
        return Doubled(self.policy, self.normalizers, **options)


def test_overridden_standardize_is_used_for_minibatches():
    model, usual = make(WithDoubled), make()
    rollout = random_rollout(model.policy)
    for own, other in zip(*(one.minibatches(one.batch(rollout), 1, 2) for one in (model, usual)), strict=True):
        torch.testing.assert_close(own.advantages, 2 * other.advantages)
        assert other.advantages.std().item() == pytest.approx(1)


def test_reward_std_divides_rewards_by_their_standard_deviation():
    model, usual = make(normalization={"rewards": "reward_std", "reward_clip": 1.5}), make()
    first, second = (random_rollout(model.policy, seed=seed) for seed in (1, 2))
    first.rewards *= 5
    fit(model, first)
    deviation = (first.rewards.var(correction=0) + 1e-3).sqrt()
    second.policy_version = 1
    second.rewards *= 9
    expected = second.rewards / deviation
    assert (expected.abs() > 1.5).any()
    torch.testing.assert_close(model.normalizers.rewards(second), expected.clamp(-1.5, 1.5), **EXACT)
    second.rewards = expected.clamp(-1.5, 1.5)
    torch.testing.assert_close(usual.batch(second).advantages.mean(), usual.estimator.gae(second, 0.7).mean(), **EXACT)


def test_reward_clip_bounds_normalized_rewards():
    for clip, expected in ((2.0, 2.0), (None, 50.0)):
        model = make(normalization={"rewards": True, "reward_clip": clip})
        rollout = random_rollout(model.policy)
        rollout.rewards[:] = 50
        torch.testing.assert_close(model.normalizers.rewards(rollout).max().item(), expected, rtol=1e-6, atol=0)


def test_options_of_observation_normalization_take_effect():
    model = make(normalization={"observations": {"clip": 0.5, "epsilon": 3.0, "initial_variance": 1.0}})
    x = torch.tensor([[0.2, -7.0, 0.6]], dtype=torch.float64)
    expected = torch.tensor([[0.1, -0.5, 0.3]], dtype=torch.float64)
    torch.testing.assert_close(model.policy.observation_normalizer(x), expected)


class Watching(PPO):
    """Keeps the inputs of the first loss of each rollout."""

    def loss(self, batch: Batch) -> Loss:
        if not hasattr(self, "seen"):
            moments = self.policy.observation_normalizer.moments
            self.seen = (moments.count.item(), batch, self.policy.value(batch.observations).detach())
        return super().loss(batch)


NORMALIZED = {"observations": True, "rewards": "reward_std"}


@pytest.mark.parametrize("when", ["after", "before"])
def test_normalizers_are_updated_before_or_after_the_updates(when):
    model = make(Watching, normalization=NORMALIZED | {"update": when})
    rollout = random_rollout(model.policy, off_policy=0.0)
    recorder = fit(model, rollout)
    assert model.seen[0] == (48 if when == "before" else 0)
    assert model.policy.observation_normalizer.moments.count == 48  # once
    error = recorder.rows[0]["first_ratio_error"]
    assert error > 1e-4 if when == "before" else error <= 1e-12


def test_a_second_batch_of_a_rollout_does_not_update_the_normalizers_again():
    class Twice(PPO):
        def update(self, rollout):
            super().update(rollout)
            self.batch(rollout)

    model = make(Twice, normalization=NORMALIZED | {"update": "before"})
    fit(model, random_rollout(model.policy))
    assert model.policy.observation_normalizer.moments.count == 48


@pytest.mark.parametrize("recompute", [False, True])
def test_recompute_values_uses_values_of_the_current_normalizer(recompute):
    model = make(
        Watching,
        normalization=NORMALIZED | {"update": "before"},
        advantages={"recompute_values": recompute},
        num_minibatches=1,
    )
    rollout = random_rollout(model.policy)
    before = rollout.values.clone()
    fit(model, rollout)
    _, batch, current = model.seen
    assert torch.equal(rollout.values, before)  # the rollout is not modified
    assert torch.allclose(batch.values, current, rtol=0, atol=1e-12) == recompute
    assert {*batch.values.tolist()} == {*before.flatten().tolist()} or recompute


def test_recomputed_values_treat_episode_ends_like_collected_values():
    model = make(advantages={"recompute_values": True})
    rollout = random_rollout(model.policy)
    expected = make().batch(rollout)
    rollout.values, rollout.next_values = rollout.values + 1, rollout.next_values + 1
    batch = model.batch(rollout)
    for name in ("advantages", "returns"):
        torch.testing.assert_close(getattr(batch, name), getattr(expected, name), **EXACT)


def test_recomputed_advantages_belong_to_the_steps_that_count():
    model = make()
    rollout = random_rollout(model.policy)
    weights = (rollout.rewards > 0).double()
    batch = model.estimator.batch(rollout, weights)
    torch.nn.init.constant_(model.policy.value_head.bias, 1.0)
    renewed = model.estimator.renewed(batch)
    torch.testing.assert_close(renewed.values, model.policy.value(batch.observations).detach(), **EXACT)
    expected = make(advantages={"recompute_values": True})
    expected.load_state_dict(model.state_dict())
    for name in ("advantages", "returns"):
        found = getattr(expected.estimator.batch(rollout, weights), name)
        torch.testing.assert_close(getattr(renewed, name), found, **EXACT)


def test_recomputed_advantages_are_normalized_again():
    model = make(advantages={"normalize": "rollout", "recompute_advantages": True})
    batch = model.estimator.normalized_over_rollout(model.batch(random_rollout(model.policy)))
    renewed = model.estimator.normalized_over_rollout(model.estimator.renewed(batch))
    torch.testing.assert_close(renewed.advantages, batch.advantages, **EXACT)


@pytest.mark.parametrize(
    "change", [lambda batch: batch.ordered(torch.arange(8)), lambda batch: batch.replace(advantages=-batch.advantages)]
)
def test_advantages_of_own_rows_or_of_an_algorithm_itself_are_not_recomputed(change):
    """Recomputed advantages would silently replace the advantages of the algorithm from the second pass on."""
    for recompute in (False, True):
        model = make(advantages={"recompute_advantages": recompute})
        batch = change(model.batch(random_rollout(model.policy)))
        minibatches = model.minibatches(batch, 2, 1)
        first = next(minibatches)
        if not recompute:
            torch.testing.assert_close(next(minibatches).advantages.sum(), first.advantages.sum(), **EXACT)
            continue
        with pytest.raises(ConfigurationError, match=r"^advantages.recompute_advantages=True .* selects rows, or"):
            next(minibatches)


@pytest.mark.parametrize("normalize", ["none", "minibatch", "rollout"])
def test_own_rows_without_advantages_have_minibatches(normalize):
    model = make(advantages={"normalize": normalize, "recompute_advantages": True})
    parts = list(model.minibatches(Batch({"expert": torch.arange(8.0)}), 2, 4))
    assert len(parts) == 8 and sum(float(part.expert.sum()) for part in parts) == 2 * 28
    given = parts[0].replace(advantages=torch.tensor([1.0, 3.0]))
    assert model.estimator.standardized(given).sum() == 0


def test_skipped_update_does_not_change_the_normalizers(tmp_path):
    model = make(normalization=NORMALIZED | {"update": "before"}, debug={"max_skipped_updates": 1})
    good, bad = random_rollout(model.policy, seed=1), random_rollout(model.policy, seed=2)
    bad.log_probs[3, 1] = torch.nan
    fit(model, good)
    before = {name: x.clone() for name, x in model.named_buffers()}
    bad_again = FixedRollouts([bad, bad], model)
    trainer = make_trainer(precision="64-true", default_root_dir=tmp_path)
    with pytest.raises(FloatingPointError, match="policy_loss is nan"):
        trainer.fit(model, bad_again)
    assert all(torch.equal(x, before[name]) for name, x in model.named_buffers())
    (path,) = tmp_path.glob("failed-update-*.pt")
    assert "policy_loss" in FailedUpdate.load(path).replay()


def test_rollouts_after_a_skipped_update_enter_the_statistics(tmp_path):
    models = [make(normalization=NORMALIZED | {"update": "before"}, debug={"max_skipped_updates": 1}) for _ in range(2)]
    good, bad = random_rollout(models[0].policy, seed=1), random_rollout(models[0].policy, seed=2)
    bad.log_probs[3, 1] = torch.nan
    fit(models[0], bad, good, default_root_dir=tmp_path)
    fit(models[1], good)
    expected = dict(models[1].named_buffers())
    assert all(torch.equal(x, expected[name]) for name, x in models[0].named_buffers())


class Weighing(PPO):
    """Uses given step weights."""

    given: Tensor

    def step_weights(self, rollout: Rollout) -> Tensor:
        return self.given


def test_step_weights_make_the_loss_a_weighted_mean():
    model, usual = make(Weighing, advantages={"normalize": "none"}), make(advantages={"normalize": "none"})
    rollout = random_rollout(model.policy)
    model.given = torch.rand(rollout.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    whole = usual.batch(rollout)
    rows = [Batch({name: x[i : i + 1] for name, x in whole.fields.items()}) for i in range(len(whole))]
    losses, weights = torch.stack([usual.loss(row).total for row in rows]), model.given.flatten()
    torch.testing.assert_close(
        model.loss(model.batch(rollout)).total, (losses * weights).sum() / weights.sum(), **EXACT
    )


@pytest.mark.parametrize("cls", [PPO, A2C, TFAgentsPPO])
def test_weights_of_a_rollout_equal_the_weights_of_the_method(cls):
    """Losses, and the parameters after an update, also of copies of the rollout."""
    found = []
    for kind in (cls, type("Weighed", (cls,), {"step_weights": Weighing.step_weights})):
        torch.manual_seed(0)
        model = kind(VECTOR, DISCRETE, policy={"hidden_sizes": (8,)}).double()
        rollout = random_rollout(model.policy)
        weights = torch.rand(rollout.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).round(
            decimals=1
        )
        unweighted = model.compute_loss(rollout) if kind is cls else {}
        if kind is cls:
            rollout.weights = weights
            rollout = Rollout(**rollout.clone().state_dict())
        else:
            model.given = weights
        losses = model.compute_loss(rollout)
        fit(model, rollout)
        found.append((losses, parameters_of(model)))
        assert losses != unweighted
    assert found[0][0] == found[1][0]
    assert all(torch.equal(x, found[1][1][name]) for name, x in found[0][1].items())


def test_weights_of_a_rollout_of_another_shape_are_refused():
    model = make()
    rollout = random_rollout(model.policy)
    rollout.weights = torch.ones(4)
    with pytest.raises(ConfigurationError, match=r"rollout.weights: shape=\(4,\) is not valid: expected \(12, 4\)"):
        model.batch(rollout)


@pytest.mark.parametrize(("weight", "found"), [(-1.0, "-1.0"), (-0.5, "-0.5"), (torch.nan, "nan")])
def test_weights_below_0_are_refused(weight, found):
    model = make()
    rollout = random_rollout(model.policy)
    rollout.weights = torch.ones(rollout.shape)
    rollout.weights[3, 1] = weight
    with pytest.raises(
        ConfigurationError, match=f"rollout.weights={found} is not valid: expected numbers of at least 0"
    ):
        model.batch(rollout)
    rollout.valid = torch.ones(rollout.shape, dtype=torch.bool)
    rollout.valid[3, 1] = False
    model.batch(rollout)


@pytest.mark.parametrize("cls", [PPO, TFAgentsPPO])
def test_step_weights_of_another_shape_are_refused(cls):
    """With as many environments as steps, weights of one dimension would be ambiguous."""
    model = type("Weighed", (Weighing, cls), {})(VECTOR, DISCRETE, policy={"hidden_sizes": (8,)})
    rollout = random_rollout(model.policy, length=4, num_envs=4)
    model.given = torch.tensor([1.0, 0.0, 1.0, 1.0])
    with pytest.raises(ConfigurationError, match=r"step_weights: shape=\(4,\) is not valid: expected \(4, 4\)"):
        model.batch(rollout)


def test_steps_of_weight_0_do_not_affect_the_update():
    weights = torch.ones(12, 4, dtype=torch.float64)
    weights[5, 2] = weights[9, 0] = 0
    results = []
    for spoil in (False, True):
        model = make(Weighing, normalization={"observations": False})
        model.given = weights
        rollout = random_rollout(model.policy)
        if spoil:
            rollout.log_probs[5, 2] = torch.nan
            rollout.observations[9, 0] = torch.inf
        fit(model, rollout)
        results.append(parameters_of(model))
    for name, parameter in results[0].items():
        assert parameter.isfinite().all()
        assert torch.equal(parameter, results[1][name])
    assert len(model.batch(rollout)) == 46


class WeighingA2C(A2C):
    """Uses given step weights."""

    given: Tensor

    def step_weights(self, rollout: Rollout) -> Tensor:
        return self.given


def test_all_rows_with_a_weight_are_standardized_alike():
    fields = {"advantages": torch.tensor([1.0, 2.0, 9.0, 4.0]), "weights": torch.tensor([0.1, 3.0, 0.0, 0.2])}
    expected = torch.tensor([-0.8729, -0.2182, 0.0, 1.0911])
    torch.testing.assert_close(estimator().standardized(Batch(fields)), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", [Weighing, WeighingA2C])
def test_steps_of_weight_0_do_not_affect_advantage_normalization_with_memory(kind):
    """The steps stay in their sequences."""
    data = make_data(rollout_length=8, rollouts_per_epoch=1)
    torch.manual_seed(0)
    model = kind(
        data.observation_space, data.action_space, policy={"memory": "gru"}, normalization={"values": "popart"}
    )
    model.num_minibatches = 1
    model.given = torch.tensor([0.0, 1.0, 2.0, 1.0, 0.0, 0.0, 1.0, 3.0]).unsqueeze(1).expand(8, 2)
    rollouts: list[Rollout] = []
    keep = LambdaCallback(on_train_batch_end=lambda trainer, module, outputs, batch, index: rollouts.append(batch))
    make_trainer(callbacks=[keep]).fit(model, data)
    batch = model.batch(rollouts[0])
    counted = batch.weights != 0
    assert counted.sum() == 10
    assert len(batch) == 16
    advantages = model.estimator.standardized(batch)
    assert torch.equal(advantages[counted], model.estimator.standardize([batch.advantages[counted]])[0])
    assert not advantages[~counted].any()
    mean = batch.returns[counted].double().mean()
    assert model.policy.value_normalizer.moments.mean.item() == pytest.approx(mean.item(), rel=1e-6)


@pytest.mark.parametrize("part", ["policy", "value", "shared"])
def test_weight_penalty_changes_only_its_part(part):
    policy = {"hidden_sizes": (8,), "shared_encoder": part == "shared", "action_distribution": "gaussian"}
    torch.manual_seed(0)
    model = PPO(VECTOR, CONTINUOUS, policy=policy, optimizer={"l2": {part: 0.3}})
    loss = model.new_loss(Batch({"log_probs": torch.zeros(1)})).total
    loss.backward()
    names = {
        "policy": ["actor_encoder.layers.0.weight", "action_head.mean.weight"],
        "value": ["critic_encoder.layers.0.weight", "value_head.weight"],
        "shared": ["actor_encoder.layers.0.weight"],
    }[part]
    weights = dict(model.policy.named_parameters())
    assert loss.item() == pytest.approx(0.3 * sum(weights[name].square().sum().item() for name in names))
    for name, weight in weights.items():
        if name in names:
            torch.testing.assert_close(weight.grad, 0.6 * weight.data)
        else:
            assert weight.grad is None


def test_biases_and_tables_are_not_penalized():
    memory, space = {"kind": "gtrxl", "hidden_size": 8}, spaces.MultiDiscrete([2, 3])
    policy = {"hidden_sizes": (8,), "memory": memory, "action_distribution": "autoregressive"}
    model = PPO(VECTOR, space, policy=policy)
    names = {id(parameter): name for name, parameter in model.policy.named_parameters()}
    penalized = {names[id(weight)] for weights in weights_by_part(model.policy).values() for weight in weights}
    others = [name for name in names.values() if name not in penalized]
    assert not [name for name in penalized if name.endswith("bias")]
    assert {"action_head.tables.0", "actor_core.cell.layers.0.distance_bias"} <= {*others}
    assert {"action_head.hidden.0.weight", "actor_core.cell.layers.0.query.weight"} <= penalized


@pytest.mark.parametrize("separate", [False, True])
def test_weights_of_a_memory_belong_to_the_parts_that_use_it(separate):
    memory = {"kind": "gru", "hidden_size": 5, "separate": separate}
    model = PPO(VECTOR, DISCRETE, policy={"hidden_sizes": (8,), "shared_encoder": True, "memory": memory})
    parts = weights_by_part(model.policy)
    sizes = {part: sorted(weight.numel() for weight in weights) for part, weights in parts.items()}
    encoder, core, heads = [3 * 8], [3 * 5 * 5, 3 * 5 * 8], {"policy": [3 * 5], "value": [5]}
    if separate:
        assert sizes == {"shared": encoder, "policy": heads["policy"] + core, "value": heads["value"] + core}
    else:
        assert sizes == {"shared": encoder + core, **heads}


def test_a_penalty_on_frozen_weights_alone_is_an_error_before_training():
    data = make_data()
    options = {"policy": {"shared_encoder": True}, "optimizer": {"l2": {"policy": 0.1, "shared": 0.1}}}
    model = PPO(data.observation_space, data.action_space, **options)
    model.policy.actor_encoder.requires_grad_(False)
    with pytest.raises(ConfigurationError, match=r"optimizer.l2.shared=0\.1 .* all such weights are frozen"):
        make_trainer().fit(model, data)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": {"l2": {"shared": 0.1}}}, r"optimizer.l2.shared=0\.1 .* share nothing"),
        ({"optimizer": {"l2": {"policy": -1}}}, r"optimizer.l2.policy=-1 .* at least 0"),
        ({"advantages": {"estimator": "td"}}, r"advantages.estimator='td' .* one of gae, monte_carlo"),
        ({"advantages": {"value_target": "td"}}, r"advantages.value_target='td' .* one of td_lambda, empirical"),
        ({"normalization": {"update": True}}, r"normalization.update=True .* one of after, before"),
        ({"advantages": {"recompute_values": "no"}}, r"advantages.recompute_values='no' .* true or false"),
        ({"normalization": {"reward_clip": 0}}, r"normalization.reward_clip=0 .* above 0"),
        ({"normalization": {"observations": {"clip": 0}}}, r"normalization\.observations\.clip=0 .* above 0"),
        (
            {"normalization": {"observations": {"mean": 0}}},
            r"normalization.observations=\{'mean': 0\} .* clip, epsilon",
        ),
        ({"normalization": {"observations": {"images": 1}}}, r"observations\.images=1 .* true or false"),
        ({"clipping": {"log_prob": 0}}, r"clipping.log_prob=0 .* above 0"),
        ({"debug": {"histograms": 1}}, r"debug.histograms=1 .* true or false"),
    ],
)
def test_invalid_options_raise_a_configuration_error(options, message):
    with pytest.raises(ConfigurationError, match=message):
        make(**options)


class Ranks:
    """Simulates three ranks in two rounds: in the second round `all_reduce` knows the tensors of all ranks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rank = 0
        self.tensors: dict[int, torch.Tensor] = {}
        monkeypatch.setattr("lightning_rl.distributed.global_rank", lambda: self.rank)
        monkeypatch.setattr("lightning_rl.distributed.world_size", lambda: 3)
        monkeypatch.setattr("lightning_rl.training.advantages.world_size", lambda: 3)
        monkeypatch.setattr("lightning_rl.distributed.all_reduce", self.add_up)

    def add_up(self, x: torch.Tensor, operation: str = "sum") -> torch.Tensor:
        self.tensors[self.rank] = x
        return torch.stack(list(self.tensors.values())).sum(0)

    def __iter__(self) -> Iterator[int]:
        self.tensors.clear()
        for self.rank in (0, 1, 2, 0, 1, 2):
            yield self.rank


def estimator() -> AdvantageEstimator:
    policy = PPO(VECTOR, DISCRETE).policy
    return AdvantageEstimator(policy, Normalizers(policy, None, "after"))


def test_moments_cover_all_ranks(monkeypatch):
    parts = [torch.randn(2, n, dtype=torch.float64) * scale + 1e3 for n, scale in ((5, 1.0), (0, 1.0), (8, 30.0))]
    ranks = Ranks(monkeypatch)
    for rank in ranks:
        count, mean, squares = moments(parts[rank].unbind())
    whole = torch.cat(parts, 1)
    assert count.tolist() == [13, 13]
    torch.testing.assert_close(mean, whole.mean(1), rtol=1e-14, atol=0)
    torch.testing.assert_close(squares, (whole - whole.mean(1, keepdim=True)).square().sum(1), rtol=1e-12, atol=0)
    for rank in ranks:
        standardized = estimator().standardize(parts[rank][:1])[0]
    torch.testing.assert_close(
        standardized, (parts[2][0] - whole[0].mean()) / (whole[0].std() + 1e-8), rtol=1e-11, atol=0
    )


@pytest.mark.parametrize("constant", [0.1, 1e6 + 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_advantages_on_several_ranks_become_0(monkeypatch, dtype, constant):
    for rank in Ranks(monkeypatch):
        standardized = estimator().standardize([torch.full((rank + 3,), constant, dtype=dtype)])[0]
    assert not standardized.any()


@pytest.mark.parametrize("constant", [0.1, 1e6 + 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_explained_variance_of_equal_targets_on_several_ranks_is_nan(monkeypatch, dtype, constant):
    for rank in Ranks(monkeypatch):
        targets = torch.full((7 * rank,), constant, dtype=dtype)
        found = explained_variance(torch.randn(7 * rank, dtype=dtype), targets)
    assert found.isnan()

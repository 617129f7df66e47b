"""IMPALA: its targets from rollouts of older policies, its options, and where it is the same as A2C."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from gymnasium import spaces
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from lightning_rl import A2C, CLEAR, IMPALA, PPO, FailedUpdate, Rollout
from lightning_rl import functional as rl
from lightning_rl.policies.values import with_recomputed_values
from lightning_rl.training.minibatches import Unroll
from lightning_rl.validation import ConfigurationError
from tests.helpers import (
    DISCRETE,
    VECTOR,
    Recorder,
    make_data,
    make_trainer,
    merged,
    parameters_of,
    random_rollout,
)

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
SGD = {"name": "torch.optim.SGD"}


class Lagging:
    """A train loader of rollouts that were collected some versions ago."""

    def __init__(self, rollouts: list[Rollout], model: Any, lag: int = 1) -> None:
        self.rollouts, self.model, self.lag = rollouts, model, lag

    def __len__(self) -> int:
        return len(self.rollouts)

    def __iter__(self) -> Iterator[Rollout]:
        for rollout in self.rollouts:
            rollout.policy_version = self.model.policy_version - self.lag
            yield rollout


def make(algorithm: Any = IMPALA, **options: Any) -> Any:
    torch.manual_seed(0)
    small = {"policy": {"hidden_sizes": (8,)}, "learning_rate": 1e-2}
    return algorithm(VECTOR, DISCRETE, **merged(small, options)).double()


def learn(model: Any, rollouts: list[Rollout], lag: int = 0, **trainer: Any) -> Recorder:
    recorder = Recorder()
    loader = Lagging(rollouts, model, lag)
    make_trainer(precision="64-true", callbacks=[recorder], **trainer).fit(model, loader)
    return recorder


def moved(model: Any, by: float = 0.3) -> Any:
    """The model after its policy went on learning."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += by * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return model


def estimated(model: Any, rollout: Rollout, **then: Any) -> Unroll:
    """The rows of a rollout, with what the loss has made of them as `estimates`."""
    steps = model.batch(rollout, **then)
    model.loss(steps)
    return steps


@pytest.mark.parametrize("valid", [False, True])
def test_on_policy_impala_takes_the_steps_of_a2c(valid):
    options = {"optimizer": SGD, "value_coef": 0.25, "entropy_coef": 0.1, "gamma": 0.9}
    one, other = make(**options, vtrace_lambda=0.8), make(A2C, **options, gae_lambda=0.8)
    explained = []
    for model in (one, other):
        rollouts = [random_rollout(model.policy, off_policy=0.0, valid=valid)]
        explained.append(learn(model, rollouts).rows[0]["explained_variance"])
    assert explained[0] == pytest.approx(explained[1], rel=1e-10)
    for (name, own), theirs in zip(parameters_of(one).items(), parameters_of(other).values(), strict=True):
        torch.testing.assert_close(own, theirs, rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.parametrize("valid", [False, True])
@pytest.mark.parametrize(
    "bounds",
    [
        {},
        {"clip_rho": 0.7, "clip_c": 0.6, "clip_pg_rho": 2.0, "vtrace_lambda": 0.5},
        {"clip_rho": None, "clip_c": None, "clip_pg_rho": None},
        {"vtrace_leak": 0.4},
    ],
)
def test_targets_of_older_rollouts_use_vtrace_with_the_learners_values(bounds, valid):
    """Each option gives other targets, and ends of episodes in either way have their place."""
    model = make(**bounds)
    rollout = random_rollout(model.policy, valid=valid)
    rollout.policy_version = -1
    moved(model)
    now = with_recomputed_values(model.policy, rollout)
    log_rhos = model.policy.log_prob(rollout.observations[:-1], rollout.actions).detach() - rollout.log_probs
    if rollout.valid is not None:
        log_rhos = torch.where(rollout.valid, log_rhos, 0)
        now.values = torch.where(rollout.valid, now.values, rollout.values)
    lambda_ = bounds.get("vtrace_lambda", 1.0)
    clips = [bounds.get(name, 1.0) for name in ("clip_rho", "clip_c", "clip_pg_rho")]
    discounts = rollout.discounts(0.99)
    targets, advantages = rl.vtrace(
        *(log_rhos, rollout.rewards, now.values, now.next_values, discounts, rollout.traces(lambda_)),
        *clips,
        leak=bounds.get("vtrace_leak", 0.0),
    )
    estimates = estimated(model, rollout).estimates
    rows = slice(None) if rollout.valid is None else rollout.valid.flatten()
    torch.testing.assert_close(estimates.returns, targets.flatten()[rows], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(estimates.advantages, advantages.flatten()[rows], rtol=1e-10, atol=1e-10)
    if bounds:
        other = moved(make())
        assert not torch.allclose(estimated(other, rollout).estimates.returns, estimates.returns)


def test_next_values_of_the_collection_are_used_for_the_same_policy():
    """With memory, too, at the ends of episodes that were cut off."""
    data = make_data("Pendulum-v1", rollout_length=24, env={"max_episode_steps": 7}, rollouts_per_epoch=2)
    torch.manual_seed(0)
    memory = {"kind": "gru", "hidden_size": 8, "sequence_length": 8}
    model = IMPALA(data.observation_space, data.action_space, policy={"hidden_sizes": (8,), "memory": memory})
    seen: list[tuple[Tensor, Tensor]] = []

    class Spy(Recorder):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Rollout, batch_idx: int) -> None:
            now = with_recomputed_values(pl_module.policy, batch, batch.values)
            seen.append((now.next_values, batch.next_values.clone()))
            assert len(batch.final_indices)

    make_trainer(callbacks=[Spy()]).fit(model, data)
    for own, collected in seen:
        torch.testing.assert_close(own, collected, rtol=1e-5, atol=1e-6)
    assert len(seen) == 2


def test_policy_lag_is_logged_and_rollouts_of_future_versions_raise():
    model = make()
    rollout = random_rollout(model.policy)
    assert learn(model, [rollout] * 2, lag=3).column("policy_lag") == [3, 3]
    with pytest.raises(RuntimeError, match="version 3 of the policy, not with version 2"):
        learn(model, [rollout], lag=-1)
    with pytest.raises(RuntimeError, match="version -1 of the policy"):
        learn(make(PPO), [rollout], lag=1)


def test_first_ratio_error_is_logged_only_without_lag():
    model = make()
    rows = learn(model, [random_rollout(model.policy, off_policy=0.0)]).rows
    assert rows[0]["first_ratio_error"] < 1e-12 and rows[0]["importance_weight"] == pytest.approx(1)
    rows = learn(model, [random_rollout(model.policy)], lag=1).rows
    assert "first_ratio_error" not in rows[0] and abs(rows[0]["importance_weight"] - 1) > 1e-3


def test_normalizers_can_be_updated_before_the_updates():
    model = make(normalization={"observations": True, "update": "before"})
    (row,) = learn(model, [random_rollout(model.policy, off_policy=0.0)]).rows
    assert "first_ratio_error" not in row and abs(row["importance_weight"] - 1) > 1e-6
    assert model.policy.observation_normalizer.moments.count == 48  # once


def test_value_normalizer_is_updated_with_the_targets_of_steps_that_count():
    class Weighted(IMPALA):
        def step_weights(self, rollout):
            return (rollout.rewards > 0).double()

    model = make(Weighted, normalization={"values": "popart"})
    rollout = random_rollout(model.policy)
    targets = estimated(model, rollout).estimates.returns[rollout.rewards.flatten() > 0]
    learn(model, [rollout])
    assert model.policy.value_normalizer.moments.mean == pytest.approx(targets.mean().item())


@pytest.mark.parametrize("lag", [0, 1])
def test_sum_reduction_equals_mean_with_a_scaled_learning_rate(lag):
    sums, means = (make(reduction=r, optimizer={**SGD, "max_grad_norm": None}) for r in ("sum", "mean"))
    rollout = random_rollout(sums.policy, off_policy=0.0, valid=True)
    sums.learning_rate = 1e-2 / rollout.num_steps
    rows = [learn(model, [rollout], lag=lag).rows[0] for model in (sums, means)]
    for own, theirs in zip(parameters_of(sums).values(), parameters_of(means).values(), strict=True):
        torch.testing.assert_close(own, theirs, rtol=1e-10, atol=1e-12)
    assert rows[0]["policy_loss"] == pytest.approx(rows[1]["policy_loss"])
    assert rows[0]["loss"] == pytest.approx(rollout.num_steps * rows[1]["loss"])
    assert rows[0]["grad_norm"] == pytest.approx(rollout.num_steps * rows[1]["grad_norm"])


@pytest.mark.parametrize(("clip", "expected"), [(None, 4.0), ("abs_one", 1.0), (1.5, 1.5), ("soft_asymmetric", 3.3202)])
def test_rewards_are_scaled_then_clipped_only_in_the_loss(clip, expected):
    """5 · tanh(4 / 5) is 3.3202."""
    model = make(reward_scale=2.0, reward_clip=clip)
    rollout = random_rollout(model.policy)
    rollout.rewards[:] = 2.0
    assert model.normalizers.rewards(rollout).mean().item() == pytest.approx(expected, rel=1e-4)
    assert torch.all(rollout.rewards == 2.0)


def test_clip_advantage_ignores_negative_advantages():
    model = make(clip_advantage=True)
    rollout = random_rollout(model.policy)
    advantages = estimated(model, rollout).estimates.advantages
    others = estimated(make(), rollout).estimates.advantages
    assert torch.equal(advantages, others.clamp(min=0)) and bool((others < 0).any())


def test_step_weights_weight_the_loss():
    class Weighing(IMPALA):
        def step_weights(self, rollout: Rollout) -> Tensor:
            return (rollout.observations[:-1, ..., 0] > 0).to(rollout.rewards)

    model, plain = make(Weighing, optimizer=SGD), make(optimizer=SGD)
    rollout = random_rollout(model.policy, off_policy=0.0)
    kept = rollout.observations[:-1, ..., 0] > 0
    expected = estimated(plain, rollout)
    row = learn(model, [rollout]).rows[0]
    mask = kept.flatten()
    log_probs = expected.batch.log_probs + expected.estimates.log_rhos
    losses = rl.policy_gradient_loss(log_probs, expected.estimates.advantages)[mask]
    assert row["policy_loss"] == pytest.approx(losses.mean().item())


@pytest.mark.parametrize("valid", [False, True])
def test_vtrace_passes_through_steps_of_weight_0(valid):
    """The targets of the steps before them go through them."""

    class Weighing(IMPALA):
        def step_weights(self, rollout: Rollout) -> Tensor:
            return (rollout.observations[:-1, ..., 0] > 0).to(rollout.rewards)

    rollout = random_rollout(make().policy, valid=valid)
    rollout.policy_version = -1
    targets = []
    for model in (moved(make(Weighing)), moved(make())):
        steps = estimated(model, rollout)
        found = (steps.estimates.advantages, steps.estimates.returns)
        targets.append([steps.grid(x, torch.zeros_like(rollout.values)) for x in found])
    counted = (rollout.observations[:-1, ..., 0] > 0) & (valid is False or rollout.valid)
    for own, others in zip(*targets, strict=True):
        torch.testing.assert_close(own[counted], others[counted], rtol=1e-12, atol=1e-12)


def test_failed_updates_on_old_rollouts_can_be_replayed(tmp_path):
    model = make()
    rollout = random_rollout(model.policy)
    rollout.rewards[3, 1] = float("nan")
    moved(model)
    with pytest.raises(FloatingPointError, match="policy_loss is nan"):
        learn(model, [rollout], lag=1, default_root_dir=tmp_path)
    failed = FailedUpdate.load(next(tmp_path.glob("failed-update-*.pt")))
    assert failed.module.policy_version == 0 and failed.minibatch.rollout.policy_version == -1
    terms = failed.replay()
    assert "first_ratio_error" not in terms and terms["policy_loss"] != terms["policy_loss"]


def test_each_part_of_the_actions_has_its_own_histogram(tmp_path):
    actions = spaces.Dict({"move": spaces.Discrete(3), "turn": spaces.Discrete(3)})
    model = IMPALA(VECTOR, actions, policy={"hidden_sizes": (8,)}, debug={"histograms": True}).double()
    rollout = random_rollout(make().policy)
    rollout.actions = {"move": rollout.actions, "turn": 2 - rollout.actions}
    logger: Any = TensorBoardLogger(tmp_path)
    recorder = learn(model, [rollout], lag=1, logger=logger, log_every_n_steps=1)
    logger.experiment.flush()
    tags = EventAccumulator(logger.log_dir, {"histograms": 0}).Reload().Tags()["histograms"]
    assert {"update/actions/move", "update/actions/turn", "update/advantages"} <= {*tags}
    row = recorder.rows[0]
    assert row["entropy"] == pytest.approx(row["entropy.move"] + row["entropy.turn"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_rho": 0}, "clip_rho=0"),
        ({"vtrace_leak": 1.5}, "vtrace_leak=1.5"),
        ({"vtrace_lambda": 2.0}, "vtrace_lambda=2.0"),
        ({"clip_advantage": 1}, "clip_advantage=1"),
        ({"reduction": "none"}, "reduction='none'"),
        ({"reward_clip": "abs"}, "reward_clip='abs'"),
        ({"reward_scale": 0.5, "normalization": {"rewards": True}}, "normalization.rewards=True"),
        ({"advantages": {"estimator": "monte_carlo"}}, "advantages.estimator='monte_carlo'"),
        ({"advantages": {"value_target": "empirical"}}, "advantages.value_target='empirical'"),
        ({"advantages": {"recompute_values": True}}, "advantages.recompute_values=True"),
    ],
)
def test_invalid_options_raise(options, message):
    with pytest.raises(ConfigurationError, match=message):
        make(**options)


@pytest.mark.parametrize("algorithm", [IMPALA, CLEAR])
@pytest.mark.parametrize(("precision", "bound"), [("32-true", 1e-6), ("64-true", 1e-12), ("bf16-mixed", 1e-2)])
def test_importance_weights_are_1_when_a_rollout_arrives(algorithm, precision, bound):
    data = make_data("Pendulum-v1", num_envs=4, rollout_length=32, rollouts_per_epoch=3)
    torch.manual_seed(0)
    model = algorithm(
        data.observation_space, data.action_space, policy={"hidden_sizes": (16,)}, normalization={"observations": True}
    )
    recorder = Recorder()
    make_trainer(precision=precision, callbacks=[recorder]).fit(model, data)
    assert len(recorder.rows) == 3 and max(recorder.column("first_ratio_error")) <= bound


@pytest.mark.parametrize(
    ("algorithm", "env_id", "memory"),
    [
        (IMPALA, "tests.probes:Probe/Aim-v0", None),
        (IMPALA, "tests.probes:Probe/RepeatFirst-v0", "gru"),
        (CLEAR, "tests.probes:Probe/Aim-v0", None),
    ],
)
def test_it_learns(algorithm, env_id, memory):
    """A goal that is shown, and one that has to be remembered; chance is a mean return of 4 of 8, and of 0.5 of 1."""
    kwargs = {} if memory else {"action_space": {"type": "Discrete", "n": 2, "start": 0}}
    data = make_data(env_id, env={"kwargs": kwargs}, num_envs=16, rollout_length=12, rollouts_per_epoch=60)
    torch.manual_seed(0)
    model = algorithm(
        data.observation_space,
        data.action_space,
        policy={"hidden_sizes": (16,), "memory": memory and {"kind": memory, "hidden_size": 16}},
        optimizer={"name": "torch.optim.Adam"},
        learning_rate=1e-2,
        gamma=0.9,
    )
    trainer = make_trainer(limit_val_batches=1)
    trainer.fit(model, data)
    best = 1 if memory else 8
    assert trainer.callback_metrics["val/episode_return"] >= 0.95 * best

"""CLEAR: replayed unrolls and cloning terms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback

from lightning_rl import CLEAR, IMPALA, FailedUpdate
from lightning_rl.nested import leaves
from lightning_rl.validation import ConfigurationError
from tests.algorithms.test_impala import SGD, estimated, learn, make, moved
from tests.helpers import (
    CONTINUOUS,
    VECTOR,
    FixedRollouts,
    make_data,
    make_trainer,
    parameters_of,
    random_rollout,
)

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")


def test_clear_learns_from_the_first_rollout_like_impala():
    models = [make(algorithm, optimizer=SGD) for algorithm in (CLEAR, IMPALA)]
    rollout = random_rollout(models[0].policy, off_policy=0.0)
    rows = [learn(model, [rollout]).rows[0] for model in models]
    assert "policy_cloning_loss" not in rows[0] and rows[0]["replay_unrolls"] == 4
    for own, theirs in zip(*(parameters_of(model).values() for model in models), strict=True):
        assert torch.equal(own, theirs)


def test_replayed_unrolls_have_the_vtrace_targets_of_older_rollouts():
    """Truncated episodes, resets and all."""
    model = make(CLEAR)
    rollout = random_rollout(model.policy, valid=True)
    rollout.policy_version = -1
    model.store_rollout(estimated(model, rollout))
    moved(model)
    direct = estimated(model, rollout)
    order = torch.tensor([kept.number for kept in model.kept._kept]).argsort()
    earlier, then = model.kept.gather(order)
    replayed = estimated(model, earlier, **then)
    for name in ("log_probs", "actions"):
        torch.testing.assert_close(
            replayed.batch.fields[name], direct.batch.fields[name], rtol=1e-12, atol=1e-12, msg=name
        )
    for name in ("advantages", "returns", "log_rhos", "values"):
        own, expected = getattr(replayed.estimates, name), getattr(direct.estimates, name)
        torch.testing.assert_close(own, expected, rtol=1e-12, atol=1e-12, msg=name)


def test_parts_of_a_failed_update_keep_their_common_weight(tmp_path):
    model = make(CLEAR)
    rollouts = [random_rollout(model.policy, seed=seed) for seed in range(2)]
    rollouts[1].rewards[3, 1] = float("nan")
    with pytest.raises(FloatingPointError):
        learn(model, rollouts, default_root_dir=tmp_path)
    parts = FailedUpdate.load(next(tmp_path.glob("failed-update-*.pt"))).minibatch.parts
    num_rows = sum(len(part.batch) for part in parts)
    assert [part.batch.weight for part in parts] == pytest.approx([1 / num_rows] * 2)


@pytest.mark.parametrize("given", [None, 1.0])
def test_replayed_steps_keep_the_weights_of_their_rollout(given):
    """`step_weights` is not asked again: a replayed rollout lacks what it may need."""

    class Weighted(CLEAR):
        def step_weights(self, rollout):
            assert rollout.policy_version >= 0
            return None if given is None else rollout.rewards.abs() + given

        def add_terms(self, loss, steps):
            used.append(steps.batch.fields.get("weights"))
            return super().add_terms(loss, steps)

    model, kept, used = make(Weighted), [], []
    rollouts = [random_rollout(model.policy, seed=seed) for seed in range(2)]
    model.on_train_batch_end = lambda *_: kept.extend(unroll.fields.get("weights") for unroll in model.kept._kept)
    learn(model, rollouts)
    assert kept and all((x is None) == (given is None) for x in kept)
    assert len(used) == 3 and all((x is None) == (given is None) for x in used)  # one new, then new and replayed
    if given is not None:
        expected = {tuple((x.abs() + given).tolist()) for rollout in rollouts for x in rollout.rewards.T}
        assert {tuple(x.tolist()) for x in kept} <= expected


@pytest.mark.parametrize("kind", [None, "running_std"])
def test_cloning_terms_compare_replayed_steps_with_the_learner_of_their_first_update(kind):
    options = {"policy_cloning_coef": 2.0, "value_cloning_coef": 3.0, "normalization": {"values": kind}}
    model = make(CLEAR, replay_ratio=0.5, **options)
    rollout = random_rollout(model.policy, off_policy=0.0)
    with torch.no_grad():
        then, values = model.policy(rollout.observations[:-1])
    learn(model, [rollout])
    moved(model)
    with torch.no_grad():
        now, values_now = model.policy(rollout.observations[:-1])
    divergences, squares = then.kl(now).sum(0), (values_now - values).square().sum(0)
    numbers = [kept.number for kept in model.kept._kept]
    drawn: list[int] = []
    model.draw = lambda num_new: torch.tensor([drawn.append(num_new) or 2, 0])
    new = random_rollout(model.policy, off_policy=0.0, seed=9)
    unit = float(model.policy.value_normalizer.moments.scale(1e-8)) if kind else 1.0
    row = learn(model, [new]).rows[0]
    chosen = [numbers[2], numbers[0]]
    steps = rollout.num_steps * 1.5  # two replayed unrolls beside four new ones
    assert drawn == [4]
    assert row["policy_cloning_loss"] == pytest.approx(divergences[chosen].sum().item() / steps)
    assert row["value_cloning_loss"] == pytest.approx(squares[chosen].sum().item() * unit**2 / steps)
    own = row["policy_loss"] + 0.5 * row["value_loss"] - 0.01 * row["entropy"]
    assert row["loss"] == pytest.approx(own + 2 * row["policy_cloning_loss"] + 3 * row["value_cloning_loss"])


@pytest.mark.parametrize(("ratio", "count"), [(0.1, 1), (0.4, 2), (0.5, 2), (1.0, 4), (2.6, 10)])
def test_replay_ratio_sets_the_number_of_replayed_unrolls(ratio, count):
    model = make(CLEAR, replay_ratio=ratio)
    learn(model, [random_rollout(model.policy, off_policy=0.0)])
    drawn = model.draw(4)
    assert drawn.shape == (count,) and 0 <= int(drawn.min()) <= int(drawn.max()) < 4


def test_recurrent_unrolls_are_replayed_from_their_stored_state():
    data = make_data("Pendulum-v1", rollout_length=24, env={"max_episode_steps": 7}, rollouts_per_epoch=2)
    torch.manual_seed(0)
    memory = {"kind": "lstm", "hidden_size": 8, "sequence_length": 8, "burn_in": 3}
    model = CLEAR(
        data.observation_space, data.action_space, policy={"hidden_sizes": (8,), "memory": memory}, learning_rate=1e-9
    )
    learned: list[Any] = []
    original = model.loss

    def spy(steps: Any) -> Any:
        learned.append(steps)
        return original(steps)

    model.loss = spy  # type: ignore[method-assign]
    make_trainer().fit(model, data)
    first, second = learned
    replayed = second.replayed
    assert first.replayed is None and replayed.rollout.memory is not None and len(replayed.rollout.final_indices)
    # Up to the learning rate the policy has not changed, nor have log-probabilities and distributions.
    now, then = replayed.estimates, replayed.batch.old_distribution
    torch.testing.assert_close(now.log_rhos, torch.zeros_like(now.log_rhos), rtol=0, atol=1e-4)
    for own, theirs in zip(leaves(replayed.distributions), leaves(then), strict=True):
        torch.testing.assert_close(own.expand_as(theirs), theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("same_objects", [False, True])
@pytest.mark.parametrize(("kept", "expected"), [(True, 4), (False, 0)])
def test_replay_is_empty_after_resuming_without_replay_in_checkpoint(tmp_path, kept, expected, same_objects):
    model = make(CLEAR, replay_in_checkpoint=kept)
    loader = FixedRollouts([random_rollout(model.policy, off_policy=0.0)], model)
    trainer = make_trainer(precision="64-true")
    trainer.fit(model, loader)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    if same_objects:
        make_trainer(precision="64-true").fit(model, loader)  # later ones, which the checkpoint knows nothing of
        assert len(model.kept) == 8
    else:
        model = make(CLEAR, replay_in_checkpoint=kept)
        loader = FixedRollouts(loader.rollouts, model)
    counts: list[int] = []
    callback = LambdaCallback(on_train_batch_start=lambda _, module, *args: counts.append(len(module.kept)))
    resuming = make_trainer(precision="64-true", max_epochs=2, callbacks=[callback])
    resuming.fit(model, loader, ckpt_path=tmp_path / "one.ckpt")
    assert counts == [expected]


def test_a_rollout_of_another_length_clears_the_replay_memory():
    model = make(CLEAR)
    rollouts = [random_rollout(model.policy, off_policy=0.0, length=length) for length in (12, 6)]
    rows = learn(model, [*rollouts, rollouts[1]], lag=1).rows
    assert [row["replay_unrolls"] for row in rows] == [4, 4, 8]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replay_ratio": 0}, "replay_ratio=0"),
        ({"replay_memory_gib": -1}, "replay_memory_gib=-1"),
        ({"replay_policy": "lifo"}, "replay_policy='lifo'"),
        ({"replay_in_checkpoint": "no"}, "replay_in_checkpoint='no'"),
        ({"policy_cloning_coef": -1}, "policy_cloning_coef=-1"),
        ({"value_cloning_coef": -1}, "value_cloning_coef=-1"),
    ],
)
def test_invalid_options_raise(options, message):
    with pytest.raises(ConfigurationError, match=message):
        make(CLEAR, **options)


def test_replay_memory_without_room_for_the_observations_of_one_unroll_raises():
    data = make_data(rollouts_per_epoch=1)
    model = CLEAR(data.observation_space, data.action_space, replay_memory_gib=1e-7)
    with pytest.raises(ConfigurationError, match=r"^replay_memory_gib=1e-07 .* at least .*, for \d+ steps of 24 bytes"):
        make_trainer().fit(model, data)


def test_replay_memory_without_room_for_one_whole_unroll_raises():
    data = make_data(rollouts_per_epoch=1)
    gib = data.rollout_length * 30 / 2**30  # a step has 24 bytes, and a distribution
    model = CLEAR(data.observation_space, data.action_space, replay_memory_gib=gib)
    with pytest.raises(ConfigurationError, match=r"^replay_memory_gib=.* at least .*: the unroll of one .* \d+ bytes"):
        make_trainer().fit(model, data)


def test_stored_distributions_are_from_before_the_gradient_step():
    """The deviation of a Gaussian is a parameter, which the step changes where it is."""
    torch.manual_seed(0)
    model = CLEAR(VECTOR, CONTINUOUS, policy={"hidden_sizes": (8,)}, learning_rate=0.5).double()
    rollout = random_rollout(model.policy, off_policy=0.0)
    learn(model, [rollout])
    _, then = model.kept.gather(torch.arange(4))
    assert not then["old_distribution"]["log_std"].any()
    assert model.policy.action_head.log_std.abs().min() > 0.1


def test_cloned_values_are_the_learners_values():
    model = make(CLEAR)
    rollout = random_rollout(model.policy, valid=True)
    moved(model)
    with torch.no_grad():
        distribution, values = model.policy(rollout.observations[:-1])
    learn(model, [rollout], lag=1)
    order = torch.tensor([kept.number for kept in model.kept._kept]).argsort()
    earlier, then = model.kept.gather(order)
    for own, expected in ((earlier.values, values), (then["old_distribution"], distribution.parameters())):
        torch.testing.assert_close(own[rollout.valid], expected[rollout.valid], rtol=1e-12, atol=1e-12)

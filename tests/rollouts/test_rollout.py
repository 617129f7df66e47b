"""Rollouts and batches: discounts and traces at episode ends, rows, weights and minibatches."""

import copy
import pickle

import pytest
import torch
from torch import Tensor

from lightning_rl import Batch, Rollout
from lightning_rl.nested import leaves
from lightning_rl.policies.actor_critic import ActorCritic
from lightning_rl.rollouts.batch import check_minibatches, on_grid
from lightning_rl.rollouts.rollout import Episode, EpisodeSummary
from lightning_rl.validation import ConfigurationError
from tests.helpers import DISCRETE, VECTOR, random_rollout


def make_rollout(valid: Tensor | None = None) -> Rollout:
    """Three steps of two environments: the first terminates at step 1, the second is truncated at step 0."""
    flags = torch.zeros(3, 2, dtype=torch.bool)
    terminated, truncated = flags.clone(), flags.clone()
    terminated[1, 0], truncated[0, 1] = True, True
    return Rollout(
        observations=torch.arange(8.0).view(4, 2, 1),
        actions=torch.arange(6).view(3, 2),
        rewards=torch.arange(6.0).view(3, 2),
        terminated=terminated,
        truncated=truncated,
        valid=valid,
        log_probs=-torch.arange(6.0).view(3, 2),
        values=torch.zeros(3, 2),
        next_values=torch.zeros(3, 2),
        final_indices=torch.tensor([[0, 1]]),
        final_observations=torch.zeros(1, 1),
    )


def make_batch(rows: int = 10, **options: float) -> Batch:
    return Batch({"observations": torch.arange(2.0 * rows).view(rows, 2), "actions": torch.arange(rows)}, **options)


def test_bootstrap_stops_at_terminal_states_and_not_at_time_limits():
    assert make_rollout().discounts(0.5, "bootstrap").tolist() == [[0.5, 0.5], [0.0, 0.5], [0.5, 0.5]]


def test_terminal_stops_at_time_limits_too():
    assert make_rollout().discounts(0.5, "terminal").tolist() == [[0.5, 0.0], [0.0, 0.5], [0.5, 0.5]]


def test_traces_stop_at_every_episode_end():
    assert make_rollout().traces(0.25).tolist() == [[0.25, 0.0], [0.0, 0.25], [0.25, 0.25]]
    assert make_rollout().dones.tolist() == [[False, True], [True, False], [False, False]]


def test_clone_copies_every_field():
    rollout = make_rollout(valid=torch.ones(3, 2, dtype=torch.bool))
    rollout.actions = {"move": (rollout.actions, rollout.actions + 1)}
    rollout.memory, rollout.starts, rollout.burn_in = {"actor": torch.ones(1, 2, 4)}, rollout.dones, 2
    rollout.repeats, rollout.log_rhos = torch.ones(3, 2), torch.zeros(3, 2)
    rollout.infos, rollout.episodes, rollout.policy_version = {"score": torch.ones(3, 2)}, EpisodeSummary([2.0], [3]), 5
    clone = rollout.clone()
    plain = ("num_steps", "burn_in", "policy_version")
    expected = copy.deepcopy(rollout)
    for leaf in leaves({**rollout.tensors(), "log_rhos": rollout.log_rhos}):
        leaf.copy_(leaf == 0)
    rollout.episodes.returns.append(4.0)
    assert clone.tensors().keys() == expected.tensors().keys() == rollout.tensors().keys()
    for found, wanted in zip(leaves(clone.tensors()), leaves(expected.tensors()), strict=True):
        assert torch.equal(found, wanted)
    assert torch.equal(clone.log_rhos, expected.log_rhos)
    assert all(getattr(clone, name) == getattr(expected, name) for name in plain)
    assert clone.episodes.returns == [2.0]


def test_flattening_keeps_fields_of_a_step_in_one_row():
    batch = make_rollout().flatten(advantages=10 * torch.arange(6.0).view(3, 2))
    assert len(batch) == 6
    assert batch.actions.tolist() == [0, 1, 2, 3, 4, 5]
    assert torch.equal(
        batch.observations.squeeze(1), batch.actions.float()
    )  # the observation after the last is left out
    assert torch.equal(batch.advantages, 10.0 * batch.actions)
    assert torch.equal(batch.log_probs, -1.0 * batch.actions)


def test_invalid_steps_are_no_rows():
    valid = torch.ones(3, 2, dtype=torch.bool)
    valid[1, 1] = False
    rollout = make_rollout(valid)
    batch = rollout.flatten(advantages=rollout.rewards)
    assert batch.actions.tolist() == [0, 1, 2, 4, 5]
    assert torch.equal(batch.advantages, 1.0 * batch.actions)
    assert rollout.num_steps == 5
    assert batch.weight == pytest.approx(1 / 5)


def test_rollout_counts_real_steps_and_moves_to_devices():
    rollout = make_rollout()
    assert (rollout.num_steps, rollout.shape) == (6, (3, 2))
    assert rollout.to("meta") is rollout
    assert {rollout.rewards.device.type, rollout.final_observations.device.type} == {"meta"}


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_copies_finish_before_they_are_read(device, monkeypatch):
    rollout, given = make_rollout().to("meta"), []  # a copy to these devices may be read too early if nothing blocks
    monkeypatch.setattr(Tensor, "to", lambda x, device, non_blocking=False: given.append(non_blocking) or x)
    rollout.to(device)
    assert given and not any(given)


@pytest.mark.parametrize("num_minibatches", [1, 2, 3, 10])
def test_minibatches_partition_the_rows(num_minibatches):
    batch = make_batch()
    parts = list(batch.shuffled(torch.Generator().manual_seed(0)).split(num_minibatches))
    assert len(parts) == num_minibatches
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert sorted(torch.cat([part.actions for part in parts]).tolist()) == list(range(10))
    for part in parts:
        assert torch.equal(part.observations[:, 0], 2.0 * part.actions)  # fields stay together
        assert part.weight == 1 / len(part)


@pytest.mark.parametrize(("large", "storage"), [(0, 6), (2**24, 20)])
def test_large_minibatches_are_gathered_one_at_a_time_and_are_the_same(monkeypatch, large, storage):
    monkeypatch.setattr("lightning_rl.rollouts.batch._LARGE", large)
    batch, order = make_batch(), torch.randperm(10, generator=torch.Generator().manual_seed(0))
    together = list(batch.ordered(order).split(4))
    for expected, minibatch in zip(together, batch.minibatches(order, 4), strict=True):
        assert torch.equal(minibatch.observations, expected.observations)
        assert torch.equal(minibatch.actions, expected.actions)
        assert minibatch.weight == expected.weight
    first = next(batch.minibatches(order, 4)).observations
    assert first.untyped_storage().nbytes() == 4 * storage  # three rows of two, or ten


def test_generator_determines_the_order_of_shuffled_rows():
    generator = torch.Generator().manual_seed(0)
    batch = make_batch(100)
    first, second = batch.shuffled(generator), batch.shuffled(generator)
    again = batch.shuffled(torch.Generator().manual_seed(0))
    assert not torch.equal(first.actions, second.actions)
    assert torch.equal(first.actions, again.actions)


def test_mean_is_the_sum_times_the_weight():
    x = torch.arange(10.0)
    assert make_batch().mean(x).item() == pytest.approx(4.5)
    assert make_batch(weight=2.0).mean(x).item() == 90.0
    assert Batch({"actions": torch.zeros(0)}).mean(torch.zeros(0)).item() == 0.0


def test_weights_make_the_average_over_ranks_the_mean_over_all_rows():
    """Ranks of 3 and 7 rows, averaged as by DDP: not the mean of the two means."""
    x = torch.arange(10.0).double()
    ranks = [Batch({"x": part}, weight=2 / 10) for part in x.split([3, 7])]
    assert sum(rank.mean(rank.x) for rank in ranks).item() / 2 == pytest.approx(4.5)


def test_replacing_a_field_keeps_the_others_and_the_weight():
    batch = make_batch(weight=0.5)
    changed = batch.replace(actions=batch.actions + 1)
    assert changed.actions.tolist() == list(range(1, 11))
    assert torch.equal(changed.observations, batch.observations)
    assert (changed.weight, batch.actions[0]) == (0.5, 0)


def test_error_of_an_unknown_field_lists_the_fields():
    with pytest.raises(AttributeError, match="no field 'advantage': it has observations, actions"):
        make_batch().advantage  # noqa: B018


def test_batches_can_be_copied_and_pickled():
    batch = make_batch(weight=0.5)
    for twin in (copy.copy(batch), copy.deepcopy(batch), pickle.loads(pickle.dumps(batch))):
        assert torch.equal(twin.actions, batch.actions)
        assert twin.weight == 0.5


def test_minibatches_must_divide_the_rollout():
    check_minibatches(1024, 4)
    with pytest.raises(ConfigurationError, match=r"num_minibatches=3 does not divide the 1024 steps of a rollout"):
        check_minibatches(1024, 3)


def test_on_grid_restores_the_positions_of_rows():
    rollout = make_rollout()
    places = torch.arange(6).view(3, 2)
    rows = rollout.flatten(places=places, pairs=torch.arange(12.0).view(3, 2, 2)).ordered(torch.tensor([4, 0]))
    elsewhere = torch.full((2, 3, 2), 9.0, dtype=torch.float64).transpose(0, 1)
    expected = torch.full((3, 2, 2), 9.0, dtype=torch.float64)
    expected[2, 0], expected[0, 0] = torch.tensor([8.0, 9.0]), torch.tensor([0.0, 1.0])
    assert torch.equal(on_grid(rows.pairs, rows.places, elsewhere), expected)
    assert elsewhere.eq(9).all()


def test_nested_actions_are_flattened_shuffled_and_split_as_one():
    rollout = random_rollout(ActorCritic(VECTOR, DISCRETE), valid=True)
    steps = torch.arange(48).view(12, 4)
    rollout.actions = {"move": steps, "arm": (steps.unsqueeze(-1) * 10,)}
    batch = rollout.flatten()
    assert rollout.valid is not None
    assert len(batch) == len(batch.actions["arm"][0]) == int(rollout.valid.sum()) < 48
    assert batch.actions["move"].tolist() == steps[rollout.valid].tolist()
    for part in batch.shuffled(torch.Generator().manual_seed(0)).split(3):
        assert isinstance(part.actions["arm"], tuple)
        assert part.actions["arm"][0].squeeze(-1).tolist() == (part.actions["move"] * 10).tolist()
        assert torch.equal(part.observations, rollout.observations[:12].flatten(0, 1)[part.actions["move"]])


@pytest.mark.parametrize("given", [torch.zeros(2, 3), torch.zeros(3), [1.0]])
def test_tensors_per_step_of_another_shape_are_refused(given):
    with pytest.raises(ValueError, match=r"^extra has the shape .*: expected a tensor \[3, 2, ...\]"):
        make_rollout().flatten(extra=given)
    assert make_rollout().flatten(extra=torch.arange(6).view(3, 2, 1)).extra.shape == (6, 1)


def test_mean_of_flags_is_the_share_of_the_rows_where_they_are_true():
    flags = torch.tensor([True, False, True, True])
    assert Batch({"actions": flags}).mean(flags) == 0.75
    assert Batch({"weights": torch.tensor([0.5, 1.0, 0.5, 0.0])}).mean(flags) == 0.5


def test_rows_of_weight_0_may_be_nan_in_a_mean():
    batch = Batch({"weights": torch.tensor([1.0, 0.0, 3.0])})
    assert batch.mean(torch.tensor([2.0, torch.nan, 4.0])) == 3.5


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Rollout, Episode])
def test_a_type_checker_refuses_a_misspelled_field(kind, tmp_path):
    mypy, name, file = pytest.importorskip("mypy.api"), kind.__name__, tmp_path / "own.py"
    file.write_text(f"from {kind.__module__} import {name}\n\ndef use(x: {name}):\n    x.rewrds\n    x.rewrds = 1\n")
    assert mypy.run([str(file)])[0].count(f'"{name}" has no attribute "rewrds"') == 2

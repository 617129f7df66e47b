"""Replay memories: content, dtypes, limits, sampling, rollback and checkpoints."""

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor

from lightning_rl import CLEAR, PPG, PPO, CriticPretraining, OffPolicyPPG
from lightning_rl.policies.values import with_recomputed_values
from lightning_rl.rollouts.replay import RolloutMemory, UnrollMemory, UseLimitedBuffer
from lightning_rl.rollouts.rollout import Rollout
from tests.helpers import DISCRETE, VECTOR, make_data, make_trainer, parameters_of, random_rollout
from tests.vectors.load import load

BUFFERS = load("ppg_vtrace/ding_buffers")
LENGTH, NUM_ENVS = 3, 2


def rollout(index: int) -> dict[str, Any]:
    """Fields with the numbers 100 · rollout + 10 · time + environment."""
    places = 100 * index + 10 * torch.arange(LENGTH)[:, None] + torch.arange(NUM_ENVS)
    image = places.to(torch.uint8)[..., None].expand(-1, -1, 4)
    return {"observations": {"image": image, "vector": places[..., None].double()}, "returns": places.float()}


def filled(*valid: Tensor | None) -> RolloutMemory:
    memory = RolloutMemory(4)
    for index, one in enumerate(valid):
        memory.append(rollout(index), one)
    return memory


def rows(numbers: list[int] | Tensor) -> dict[str, Tensor]:
    ids = torch.as_tensor(numbers)
    return {"ids": ids, "images": ids.to(torch.uint8)[:, None]}


def numbers_of(memory: UnrollMemory) -> list[int]:
    """Return the numbers of the unrolls, counted from 0 over all unrolls ever appended."""
    return sorted(number for part in memory.state_dict()["kept"] for number in part["numbers"])


def held(buffer: UseLimitedBuffer) -> list[int | None]:
    """Return the row in each place, without counting a use."""
    ids = buffer.state_dict()["fields"]["ids"].tolist()
    return [number if use >= 0 else None for number, use in zip(ids, buffer.uses.tolist(), strict=True)]


# -- rollouts


def test_steps_are_gathered_by_address_in_any_order():
    memory = filled(None, None)
    everything = memory.gather(memory.steps())
    assert everything["returns"].tolist() == [0, 1, 10, 11, 20, 21, 100, 101, 110, 111, 120, 121]
    some = memory.gather(torch.tensor([7, 0, 4]))
    assert some["returns"].tolist() == [101, 0, 20]
    assert some["observations"]["image"].tolist() == [[101] * 4, [0] * 4, [20] * 4]


def test_sequences_are_one_environment_in_one_rollout():
    memory = filled(None, None)
    addresses, sequences = memory.cut()
    assert sequences.lengths.tolist() == [LENGTH] * 2 * NUM_ENVS
    rows, _ = sequences.select(torch.tensor([3, 0]))
    found = memory.gather(addresses[rows])
    assert found["returns"].tolist() == [101, 111, 121, 0, 10, 20]
    assert found["observations"]["vector"].shape == (2 * LENGTH, 1)


def test_invalid_steps_are_not_returned():
    valid = torch.tensor([[True, True], [True, False], [True, True]])
    memory = filled(None, valid)
    assert memory.gather(memory.steps())["returns"].tolist() == [0, 1, 10, 11, 20, 21, 100, 101, 110, 120, 121]
    addresses, sequences = memory.cut()
    assert sequences.lengths.tolist() == [3, 3, 3, 2]
    assert memory.gather(addresses)["returns"].tolist()[-2:] == [101, 121]


def test_sequences_of_a_policy_with_memory_begin_with_their_states():
    """Two sequences of two steps in each environment and rollout, the second with one step of burn-in."""
    memory = RolloutMemory(2)
    for index in range(2):
        places = 100 * index + 10 * torch.arange(4)[:, None] + torch.arange(NUM_ENVS)
        starts = places % 20 == 0
        states = 1000 + places[[0, 1]][..., None]
        memory.append({"observations": places}, None, starts, (states, -states), burn_in=1)
    addresses, sequences = memory.cut()
    assert memory.gather(addresses)["observations"].view(-1, 2)[:, 0].tolist() == [0, 1, 100, 101, 20, 21, 120, 121]
    assert sequences.memory[0].flatten().tolist() == [1000, 1001, 1100, 1101, 1010, 1011, 1110, 1111]
    assert torch.equal(sequences.memory[1], -sequences.memory[0])
    assert sequences.starts.view(-1, 2)[:, 0].tolist() == [True, False, True, False] * 2
    assert sequences.burn_in.lengths.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    burnt = memory.gather(sequences.burn_in_observations)
    assert burnt["observations"].tolist() == [10, 11, 110, 111]


def test_memory_keeps_dtypes_and_reports_its_size():
    memory = filled(None, torch.ones(LENGTH, NUM_ENVS, dtype=torch.bool))
    found = memory.gather(memory.steps())
    assert found["observations"]["image"].dtype == torch.uint8
    assert found["observations"]["vector"].dtype == torch.float64
    assert memory.num_bytes == 2 * 6 * (4 + 8 + 4) + 6


def test_a_rollout_is_copied():
    fields = rollout(0)
    memory = RolloutMemory(1)
    memory.append(fields)
    fields["returns"][:] = -1
    assert memory.gather(torch.tensor([5]))["returns"].tolist() == [21]


def test_the_memory_is_bounded_and_of_one_layout(caplog):
    caplog.set_level("INFO")
    memory = filled(None, None, None)
    assert (len(memory), memory.is_full) == (3, False)
    memory.append(rollout(3))
    assert memory.is_full
    with pytest.raises(ValueError, match="holds 4 rollouts already"):
        memory.append(rollout(4))
    no_starts, states = torch.zeros(LENGTH, NUM_ENVS, dtype=torch.bool), torch.zeros(1, NUM_ENVS, 4)
    memory.append(rollout(3), None, no_starts, states)
    assert len(memory) == 1
    memory.append({"returns": torch.zeros(2, 2)})
    assert (len(memory), memory.shape) == (1, (2, 2))
    dropped = [
        "Stored rollouts have shape (3, 2), new ones shape (3, 2) with 1 stored states and a burn-in of 0: the stored "
        "ones are dropped",
        "Stored rollouts have shape (3, 2) with 1 stored states and a burn-in of 0, new ones shape (2, 2): the stored "
        "ones are dropped",
    ]
    assert caplog.messages == dropped
    memory.clear()
    assert (len(memory), memory.num_bytes, memory.shape, len(memory.steps())) == (0, 0, (0, 0), 0)


def test_rollback_restores_a_memory_of_rollouts():
    memory = filled(None, None)
    memory.begin()
    memory.append(rollout(2))
    memory.write("twice", memory.steps(), 2 * memory.gather(memory.steps())["returns"])
    memory.clear()
    memory.append(rollout(3))
    memory.rollback()
    found = memory.gather(memory.steps())
    assert found.keys() == {"observations", "returns"}
    assert (len(memory), found["returns"].max()) == (2, 121)
    memory.begin()
    memory.append(rollout(2))
    memory.commit()
    assert len(memory) == 3


def test_a_field_can_be_added_to_every_rollout():
    memory = filled(None, None)
    for addresses in (torch.tensor([7, 1, 4]), torch.tensor([5])):
        memory.write("twice", addresses, (2 * memory.gather(addresses)["returns"],))
    assert memory.gather(torch.tensor([4, 7, 5, 0]))["twice"][0].tolist() == [40, 202, 42, 0]


def test_memory_of_rollouts_is_restored_from_a_checkpoint(tmp_path):
    memory = filled(None, torch.tensor([[True, True], [True, False], [True, True]]))
    torch.save(memory.state_dict(), tmp_path / "state.pt")
    restored = RolloutMemory(4)
    restored.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for name, values in memory.gather(memory.steps())["observations"].items():
        assert torch.equal(restored.gather(restored.steps())["observations"][name], values)
    for capacity, kept in ((3, [0, 1, 2]), (2, [1, 2]), (1, [2]), (0, [])):
        full, smaller = filled(None, None, None), RolloutMemory(capacity + 1)
        smaller.load_state_dict(full.state_dict())
        assert not smaller.is_full  # the next rollout fits
        assert [int(x) for x in (smaller.gather(smaller.steps())["returns"][::6] if kept else ())] == [
            100 * index for index in kept[-capacity:]
        ]


# -- rows with a limited number of uses


def test_new_rows_overwrite_the_oldest_as_in_ding():
    golden = BUFFERS["overflow"]
    buffer = UseLimitedBuffer(golden["size"])
    buffer.append(rows(golden["pushed_first"]))
    assert held(buffer) == golden["slots_after_first"]
    buffer.append(rows([100, 101, 102]))
    assert held(buffer) == golden["slots_after_second"]
    assert len(buffer) == golden["count_after"]


def test_rows_are_removed_after_their_last_use_as_in_ding():
    golden = BUFFERS["max_use"]
    buffer = UseLimitedBuffer(golden["size"], golden["max_use"])
    buffer.append(rows(list(range(golden["size"]))))
    for step in golden["log"]:
        if step["ids"] is None:  # refused: too few are left
            assert buffer.sample(golden["batch"]) is None
        else:
            assert buffer.gather(torch.tensor(step["ids"]))["ids"].tolist() == step["ids"]
        assert held(buffer) == step["slots_after"]
        assert len(buffer) == step["count_after"]


def test_rows_are_removed_after_their_last_use_as_in_the_deque_of_ding():
    golden = BUFFERS["deque_max_use"]
    buffer = UseLimitedBuffer(golden["size"], golden["max_use"])
    buffer.append(rows(list(range(golden["size"]))))
    for step in golden["log"]:
        if step["ids"] is None:
            assert buffer.sample(golden["batch"]) is None
        else:
            buffer.gather(torch.tensor(step["ids"]))
        assert [number for number in held(buffer) if number is not None] == step["left"]


def test_two_buffers_hold_the_same_rows_as_in_ding_after_a_phase():
    golden = BUFFERS["cartpole_collect_phase"]
    sizes = golden["effective_config"]
    for phase, expected in enumerate(golden["phases"]):
        buffers = {
            name: UseLimitedBuffer(of["replay_buffer_size"], of["max_use"]) for name, of in sizes.items()
        }  # cleared after each phase there
        new = rows(torch.arange(golden["n_sample"]) + phase * golden["n_sample"])
        for buffer in buffers.values():
            buffer.append(new)
        assert min(x for x in held(buffers["policy"]) if x is not None) == expected["oldest_policy_id_kept"]
        for update in expected["updates"]:
            for name, buffer in buffers.items():
                assert len(buffer) == update[f"{name}_count"]
                assert buffer.sample(golden["batch_size"]) is not None
        # In DI-engine a batch may contain a row twice: one has 7 uses after five batches.
        assert expected["max_use_seen"][0] > golden["update_per_collect"] >= buffers["policy"].uses.max()


def test_buffers_count_uses_separately():
    """In DI-engine two views of one storage share the removal of rows."""
    once, often = UseLimitedBuffer(4, max_use=1), UseLimitedBuffer(4, max_use=3)
    for buffer in (once, often):
        buffer.append(rows([1, 2, 3, 4]))
    assert once.sample(4) is not None
    assert (len(once), len(often)) == (0, 4)


def test_sampling_is_uniform_without_replacement():
    buffer, generator = UseLimitedBuffer(8), torch.Generator().manual_seed(0)
    buffer.append(rows(list(range(8))))
    counts = torch.zeros(8)
    for _ in range(2000):
        batch = buffer.sample(4, generator)
        assert batch is not None
        assert len(batch["ids"].unique()) == 4
        counts[batch["ids"]] += 1
    assert torch.equal(counts, buffer.uses.float())
    # 4.5 deviations of a binomial distribution.
    assert ((counts - 1000).abs() < 4.5 * (2000 * 0.25) ** 0.5).all()


def test_generator_determines_the_samples():
    batches = []
    for seed in (1, 1, 2):
        buffer = UseLimitedBuffer(64)
        buffer.append(rows(list(range(64))))
        batches.append(buffer.sample(32, torch.Generator().manual_seed(seed))["ids"].tolist())
    assert batches[0] == batches[1] != batches[2]


def test_rollback_restores_a_buffer():
    buffer = UseLimitedBuffer(5, max_use=2)
    buffer.append(rows([1, 2, 3, 4]))
    buffer.gather(torch.tensor([1]))
    before = held(buffer), buffer.uses.tolist()
    buffer.begin()
    buffer.append(rows([5, 6]))
    buffer.gather(torch.tensor([1, 4]))
    buffer.append(rows([7, 8, 9, 10, 11, 12]))
    assert held(buffer) == [11, 12, 8, 9, 10]
    buffer.rollback()
    assert (held(buffer), buffer.uses.tolist()) == before
    buffer.append(rows([5]))
    assert held(buffer) == [1, 2, 3, 4, 5]
    buffer.begin()
    buffer.append(rows([6]))
    buffer.commit()
    assert held(buffer) == [6, 2, 3, 4, 5]


def test_gathered_places_must_be_filled_and_different():
    buffer = UseLimitedBuffer(4, max_use=1)
    for places in ([0], [0, 0]):
        with pytest.raises(ValueError, match="different places that have a row"):
            buffer.gather(torch.tensor(places))
        buffer.append(rows([7]))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.bfloat16])
def test_buffer_stores_and_rolls_back_numbers_of_every_dtype(dtype):
    buffer, rows = UseLimitedBuffer(5), (torch.arange(12) % 7).view(6, 2).to(dtype)
    buffer.append({"x": rows[:4]})
    buffer.begin()
    buffer.append({"x": rows[3:]})  # beyond the last place
    assert torch.equal(buffer.gather(torch.tensor([4, 0, 1, 2, 3]))["x"], rows[[3, 4, 5, 2, 3]])
    buffer.append({"x": rows})
    buffer.rollback()
    assert torch.equal(buffer.gather(torch.arange(4))["x"], rows[:4])


def test_buffer_keeps_dtypes_and_reports_its_size():
    buffer = UseLimitedBuffer(10)
    assert buffer.num_bytes == 0
    buffer.append(rows([1, 2, 3]))
    assert buffer.gather(torch.tensor([0]))["images"].dtype == torch.uint8
    assert buffer.num_bytes == 10 * (8 + 1)


def test_buffer_is_restored_from_a_checkpoint(tmp_path):
    buffer = UseLimitedBuffer(6, max_use=2)
    buffer.append(rows(list(range(8))))  # 6 and 7 are stored in front of 2
    for places in ([0, 3], [3, 4]):
        buffer.gather(torch.tensor(places))
    torch.save(buffer.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    restored, smaller, larger = (UseLimitedBuffer(size, max_use=2) for size in (6, 3, 9))
    for other in (restored, smaller, larger):
        other.load_state_dict(state)
    assert (held(restored), restored.uses.tolist()) == (held(buffer), buffer.uses.tolist())
    drawn = [b.sample(4, torch.Generator().manual_seed(3))["ids"].tolist() for b in (buffer, restored)]
    assert drawn[0] == drawn[1]
    assert (held(smaller), smaller.uses.tolist()) == ([6, 7, 5], [1, 0, 0])
    assert (held(larger)[:5], larger.uses.tolist()[:6]) == ([2, 4, 5, 6, 7], [0, 1, 0, 1, 0, -1])
    for other in (buffer, restored):
        other.append(rows([50]))
    assert held(restored) == held(buffer)
    restored.load_state_dict(UseLimitedBuffer(6).state_dict())
    assert len(restored) == 0


@pytest.mark.parametrize("size", [4, 6])
def test_rows_that_have_reached_a_smaller_max_use_are_not_restored(size):
    buffer = UseLimitedBuffer(4, max_use=None)
    buffer.append(rows([1, 2, 3]))
    for places in ([0, 1], [0, 1], [0]):
        buffer.gather(torch.tensor(places))
    restored = UseLimitedBuffer(size, max_use=2)
    restored.load_state_dict(buffer.state_dict())
    assert len(restored) == 1
    assert restored.sample(1)["ids"].tolist() == [3]


# -- step weights


def with_weights(numbers: list[int], weight: float | None) -> dict[str, Tensor]:
    return rows(numbers) | ({} if weight is None else {"weights": torch.full((len(numbers),), weight)})


@pytest.mark.parametrize("weights", [(0.5, None), (None, 0.5)])
def test_rows_without_step_weights_count_like_rows_of_weight_1(weights):
    first, second = (1.0 if weight is None else weight for weight in weights)
    buffer = UseLimitedBuffer(5)
    buffer.append(with_weights([0, 1, 2], weights[0]))
    buffer.begin()
    buffer.append(with_weights([3, 4, 5], weights[1]))
    assert buffer.gather(torch.arange(5))["weights"].tolist() == [second, first, first, second, second]
    buffer.rollback()
    assert held(buffer)[:3] == [0, 1, 2]
    assert buffer.gather(torch.arange(3)).get("weights", torch.ones(3)).tolist() == [first] * 3


class SetWeights(Callback):
    """Sets weights of every second rollout, 0 in its first half; other rollouts get the weight `otherwise`."""

    def __init__(self, first: int, otherwise: float | None) -> None:
        self.first, self.otherwise = first, otherwise

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Rollout, batch_idx: int) -> None:
        if pl_module.policy_version % 2 == self.first:
            batch.weights = torch.ones_like(batch.rewards)
            batch.weights[:8] = 0
        elif self.otherwise is not None:
            batch.weights = torch.full_like(batch.rewards, self.otherwise)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        (PPG, {"num_policy_iterations": 2, "num_aux_epochs": 1}),
        (OffPolicyPPG, {"num_policy_iterations": 2, "num_aux_epochs": 1, "batch_size": 16}),
        (CLEAR, {}),
        (CriticPretraining, {"replay_ratio": 1.0}),
    ],
)
def test_stored_rollouts_without_step_weights_count_like_rollouts_of_weight_1(algorithm, options, first):
    trained = []
    for otherwise in (None, 1.0):
        data = make_data(rollouts_per_epoch=4)
        torch.manual_seed(0)
        model = algorithm(data.observation_space, data.action_space, policy={"hidden_sizes": (8,)}, **options)
        make_trainer(precision="64-true", callbacks=[SetWeights(first, otherwise)]).fit(model, data)
        trained.append(parameters_of(model))
    for name, expected in trained[1].items():
        torch.testing.assert_close(trained[0][name], expected, rtol=1e-9, atol=1e-12)


# -- unrolls


def unrolls(length: int = 3, num_envs: int = 2, first: int = 0) -> Rollout:
    """Unrolls with the numbers 100 · unroll + time, counted from `first`; the first one is truncated."""
    numbers = first + torch.arange(num_envs)
    places = 100 * numbers + torch.arange(length + 1)[:, None]
    steps = places[:-1].float()
    truncated = torch.zeros(length, num_envs, dtype=torch.bool)
    truncated[1, 0] = True
    return Rollout(
        observations={"image": places.to(torch.uint8)[..., None].expand(-1, -1, 4), "place": places},
        actions=(places[:-1], -steps),
        rewards=steps,
        terminated=torch.zeros_like(truncated),
        truncated=truncated,
        log_probs=steps,
        values=steps,
        next_values=steps,
        final_indices=torch.tensor([[1, 0]]),
        final_observations={"image": torch.full((1, 4), 7, dtype=torch.uint8), "place": 50 + numbers[:1]},
    )


def test_gathered_unrolls_equal_the_appended_ones():
    memory = UnrollMemory(10_000, "fifo")
    memory.append(unrolls(), old=unrolls().rewards[..., None])
    memory.append(unrolls(first=2), old=unrolls(first=2).rewards[..., None])
    found, per_step = memory.gather(torch.tensor([3, 0, 2, 2]))
    assert found.observations["place"][0].tolist() == [300, 0, 200, 200]
    assert found.observations["image"].dtype == torch.uint8 and found.observations["image"].shape == (4, 4, 4)
    assert found.actions[1].tolist() == (-found.rewards).tolist() == (-per_step["old"][..., 0]).tolist()
    # Only the first unroll of each rollout is truncated: those with indices 0 and 2.
    assert found.final_indices.tolist() == [[1, 1], [1, 2], [1, 3]]
    assert found.final_observations["place"].tolist() == [50, 52, 52]
    assert found.truncated.nonzero().tolist() == [[1, 1], [1, 2], [1, 3]]


def test_gathered_unrolls_have_advantages_only_after_their_values_are_recomputed():
    model = PPO(VECTOR, DISCRETE, policy={"hidden_sizes": (8,)})
    rollout, memory = random_rollout(model.policy, off_policy=0.0), UnrollMemory(10**6, "fifo")
    memory.append(rollout)
    found, _ = memory.gather(torch.arange(rollout.shape[1]))
    assert model.estimator.batch(found).advantages.isnan().any()
    recomputed = model.estimator.batch(with_recomputed_values(model.policy, found))
    torch.testing.assert_close(recomputed.advantages, model.estimator.batch(rollout).advantages)


def test_memory_of_unrolls_reports_and_bounds_its_size():
    memory = UnrollMemory(10**6, "fifo")
    memory.append(unrolls(num_envs=2))
    of_each = 4 * (4 + 8) + 3 * (8 + 4 + 4 + 4 + 4 + 3)
    assert memory.num_bytes == 2 * of_each + (8 + 4 + 8)
    bounded = UnrollMemory(5 * of_each, "fifo")
    for first in range(0, 20, 2):
        bounded.append(unrolls(first=first))
        assert bounded.num_bytes <= 5 * of_each
    assert numbers_of(bounded) == [16, 17, 18, 19]
    rewards = bounded._kept[0].fields["rewards"]
    assert rewards.untyped_storage().nbytes() == rewards.nbytes  # no view of a whole rollout
    bounded.clear()
    assert (len(bounded), bounded.num_bytes) == (0, 0)


def test_reservoir_keeps_every_unroll_with_the_same_probability():
    generator, counts = torch.Generator().manual_seed(0), torch.zeros(40)
    for _ in range(100):
        memory = UnrollMemory(700, "reservoir")
        for first in range(0, 40, 2):
            memory.append(unrolls(first=first), generator)
        counts[numbers_of(memory)] += 1
    shares = counts.view(4, 10).sum(1) / counts.sum()
    assert 400 <= counts.sum() <= 600
    assert ((shares - 0.25).abs() < 0.06).all()


def test_rollback_restores_a_memory_of_unrolls():
    memory = UnrollMemory(600, "fifo")
    memory.append(unrolls())
    before = (numbers_of(memory), memory.num_bytes)
    memory.begin()
    for first in range(2, 10, 2):
        memory.append(unrolls(first=first))
    memory.rollback()
    assert (numbers_of(memory), memory.num_bytes) == before
    memory.append(unrolls(first=2))
    assert numbers_of(memory) == [0, 1, 2, 3]


def test_small_unrolls_are_saved_in_few_tensors_and_restored_in_their_order(tmp_path):
    memory = UnrollMemory(10**6, "fifo")
    for first in range(0, 40, 2):
        one = unrolls(first=first)
        one.weights = torch.full((3, 2), 0.5) if first >= 20 else None  # weights may begin during a run
        memory.append(one, old=one.rewards)
    torch.save(memory.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert len(state["kept"]) == 2 and (tmp_path / "state.pt").stat().st_size < 1000 * len(memory)
    restored = UnrollMemory(10**6, "fifo")
    restored.load_state_dict(state)
    assert restored.num_bytes == memory.num_bytes
    for index in map(torch.tensor, range(40)):
        (one, old), (other, other_old) = memory.gather(index[None]), restored.gather(index[None])
        torch.testing.assert_close(other.tensors(), one.tensors(), rtol=0, atol=0, equal_nan=True)
        assert torch.equal(other_old["old"], old["old"])


def test_large_unrolls_are_saved_without_copies():
    memory = UnrollMemory(10**8)
    memory.append(unrolls(length=50_000))
    for part, kept in zip(memory.state_dict()["kept"], memory._kept, strict=True):
        assert part["fields"]["rewards"] is kept.fields["rewards"]


@pytest.mark.parametrize(("policy", "max_bytes", "kept"), [("fifo", 2000, 6), ("reservoir", 2000, 6), ("fifo", 400, 2)])
def test_memory_of_unrolls_is_restored_with_another_size_and_policy(policy, max_bytes, kept):
    memory = UnrollMemory(2000, "fifo")
    for first in range(0, 6, 2):
        memory.append(unrolls(first=first))
    other = UnrollMemory(max_bytes, policy)
    other.load_state_dict(memory.state_dict())
    assert numbers_of(other) == [0, 1, 2, 3, 4, 5][-kept:]
    other.append(unrolls(first=6))
    assert {6, 7} & set(numbers_of(other))


def test_the_oldest_unrolls_leave_a_reservoir_that_becomes_fifo():
    for seed in range(5):
        memory, generator = UnrollMemory(2000, "reservoir"), torch.Generator().manual_seed(seed)
        for first in range(0, 6, 2):
            memory.append(unrolls(first=first), generator)
        other = UnrollMemory(400, "fifo")
        other.load_state_dict(memory.state_dict())
        assert numbers_of(other) == [4, 5]


def test_unrolls_of_another_layout_are_removed(caplog):
    caplog.set_level("INFO")
    memory = UnrollMemory(2000)
    memory.append(unrolls())
    memory.append(unrolls(length=5, first=2))
    assert numbers_of(memory) == [2, 3]
    assert caplog.messages == ["Stored rollouts have shape (3, 1), new ones shape (5, 1): the stored ones are dropped"]

"""Running moments against slow float64 loops, over ranks, precisions, checkpoints and rollouts."""

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_rl import PPO, RND
from lightning_rl.policies import normalization
from lightning_rl.policies.normalization import ObservationNormalizer, RunningMoments
from lightning_rl.training.normalizers import RewardNormalizer
from tests.helpers import make_data, make_trainer

EXACT = {"rtol": 1e-12, "atol": 1e-12}


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def slow_moments(rows: list[list[float]]) -> tuple[list[float], list[float]]:
    """Mean and population variance of each column, by loops over Python floats."""
    columns = list(zip(*rows, strict=True))
    means = [sum(column) / len(column) for column in columns]
    return means, [sum((x - m) ** 2 for x in column) / len(column) for column, m in zip(columns, means, strict=True)]


def assert_moments(moments: RunningMoments, rows: Tensor) -> None:
    means, variances = slow_moments(rows.double().flatten(1).tolist())
    assert moments.count.item() == len(rows)
    torch.testing.assert_close(moments.mean.flatten(), torch.tensor(means, dtype=torch.float64), **EXACT)
    torch.testing.assert_close(moments.variance.flatten(), torch.tensor(variances, dtype=torch.float64), **EXACT)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_moments_equal_moments_of_all_rows(shape):
    moments, rows = RunningMoments(shape), 3 * randn(50, *shape) + 7
    for part in rows.split([1, 20, 4, 25]):
        moments.update(part)
    assert_moments(moments, rows.view(50, -1))


def test_moments_of_large_numbers_are_accurate():
    moments, rows = RunningMoments((1,)), 1e8 + randn(1000, 1)
    for part in rows.split(100):
        moments.update(part)
    assert moments.variance.item() == pytest.approx(rows.var(correction=0).item(), rel=1e-7)


def test_images_are_summed_in_parts():
    shape = (3, 200, 200)  # eight rows at once
    rows = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (37, *shape), np.uint8))
    moments = RunningMoments(shape)
    moments.update(rows)
    assert moments.count.item() == 37
    torch.testing.assert_close(moments.mean, rows.double().mean(0), **EXACT)
    torch.testing.assert_close(moments.variance, rows.double().var(0, correction=0), **EXACT)


def test_update_without_rows_changes_nothing():
    moments = RunningMoments((2,))
    moments.update(torch.zeros(0, 2))
    assert (moments.count.item(), moments.mean.tolist(), moments.variance.tolist()) == (0, [0, 0], [1, 1])
    moments.update(rows := randn(5, 2))
    moments.update(torch.zeros(0, 2))
    assert_moments(moments, rows)


def test_all_ranks_get_the_moments_of_the_union_of_their_rows(monkeypatch):
    """Simulate two ranks of different sizes in turns: each reduction adds the sums of the other rank."""
    mine, others = randn(7, 3), 2 * randn(12, 3, seed=1) - 4
    before = randn(20, 3, seed=2)

    def run(reduce_of: list[Tensor], rows: Tensor) -> RunningMoments:
        moments, calls = RunningMoments((3,)), iter(reduce_of)
        moments.update(before)
        with monkeypatch.context() as patch:
            patch.setattr(normalization, "all_reduce", lambda x: x + next(calls))
            moments.update(rows)
        return moments

    # Sums of each rank: first count and sum, then the squares around the common mean.
    union = torch.cat([mine, others])
    contributions = []
    for rows in (mine, others):
        total = torch.cat([torch.tensor([float(len(rows))], dtype=torch.float64), rows.sum(0)])
        contributions.append([total, (rows - union.mean(0)).square().sum(0)])
    first, second = run(contributions[1], mine), run(contributions[0], others)
    for moments in (first, second):
        assert_moments(moments, torch.cat([before, union]))


@pytest.mark.parametrize("make", [lambda: ObservationNormalizer((3,)), lambda: RewardNormalizer(0.9)])
def test_statistics_stay_float64_through_casts_and_checkpoints(make):
    module = make()
    if isinstance(module, ObservationNormalizer):
        module.update(randn(10, 3))
    else:
        module.update(randn(10, 3), torch.zeros(10, 3, dtype=torch.bool))
    expected = {name: x.clone() for name, x in module.state_dict().items()}
    parent = torch.nn.ModuleDict({"normalizer": module, "linear": torch.nn.Linear(2, 2)})
    parent.to(torch.bfloat16).half().double().float().to(torch.bfloat16)
    assert parent["linear"].weight.dtype == torch.bfloat16
    restored = make()
    restored.load_state_dict(module.state_dict())
    restored.to(device="cpu", dtype=torch.bfloat16)
    for state in (module.state_dict(), restored.state_dict()):
        assert all(torch.equal(state[name], x) and x.dtype == torch.float64 for name, x in expected.items())


def test_statistics_move_with_the_module():
    assert ObservationNormalizer((3,)).to("meta").moments.mean.device.type == "meta"


def test_count_exceeds_float32_precision():
    moments = RunningMoments(()).to(torch.bfloat16)
    moments.count.fill_(2.0**24)
    moments.update(torch.ones(1))
    assert moments.count.item() == 2**24 + 1


def test_observations_are_standardized_and_clipped():
    normalizer, rows = ObservationNormalizer((2,)), 4 * randn(1000, 2) + 3
    x = torch.tensor([[3.0, 3.0], [1e6, -1e6]]).double()
    assert normalizer(x).tolist() == [[pytest.approx(3)] * 2, [10, -10]]  # before any data
    normalizer.update(rows)
    out = normalizer(rows)
    torch.testing.assert_close(out.mean(0), torch.zeros(2).double(), rtol=0, atol=1e-12)
    torch.testing.assert_close(out.std(0, correction=0), torch.ones(2).double(), rtol=0, atol=1e-8)
    assert normalizer(x)[1].tolist() == [10, -10]


def test_default_bound_and_epsilon_are_the_ones_of_openai_baselines():
    normalizer = ObservationNormalizer((1,))
    assert (normalizer.clip, normalizer.epsilon) == (10.0, 1e-8)


def test_booleans_are_normalized_as_numbers():
    """MinAtar observes booleans."""
    normalizer, rows = ObservationNormalizer((4,)), randn(20, 4) > 0.5
    normalizer.update(rows)
    assert torch.equal(normalizer(rows), normalizer(rows.to(torch.uint8)))
    assert not torch.equal(normalizer(rows), rows.float())


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_small_changes_of_large_integers_are_seen(dtype):
    """Float32 has a distance of 128 between times in seconds since 1970."""
    rows = 1_700_000_000 + torch.tensor([[-1], [1]], dtype=dtype)
    normalizer = ObservationNormalizer((1,))
    normalizer.update(rows)
    assert normalizer(rows).tolist() == [[-1], [1]]


@pytest.mark.parametrize("epsilon", [1e-8, 0.0])
def test_constant_observations_become_zero(epsilon):
    normalizer = ObservationNormalizer((1,), epsilon=epsilon)
    normalizer.update(torch.full((10, 1), 7.0))
    assert normalizer(torch.full((3, 1), 7.0)).tolist() == [[0]] * 3


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bfloat16])
def test_half_precision_observations_are_normalized_in_float32(dtype):
    normalizer = ObservationNormalizer((1,))
    normalizer.moments.mean.fill_(2.5)
    out = normalizer(torch.tensor([[4]], dtype=dtype))
    assert out.dtype == torch.float32
    assert out.item() == 1.5


def slow_discounted_returns(
    rewards: np.ndarray, ends: np.ndarray, gamma: float, repeats: np.ndarray | None = None
) -> np.ndarray:
    """OpenAI Baselines' VecNormalize, one environment and step at a time; a step discounts by gamma ** `repeats`."""
    returns = np.zeros_like(rewards)
    for b in range(rewards.shape[1]):
        running = 0.0
        for t in range(rewards.shape[0]):
            returns[t, b] = running + rewards[t, b]
            running = 0.0 if ends[t, b] else returns[t, b] * gamma ** (1 if repeats is None else repeats[t, b])
    return returns


def reward_rollout(length: int = 40, num_envs: int = 3) -> tuple[Tensor, Tensor]:
    rewards = randn(length, num_envs) + 1
    return rewards, torch.rand(length, num_envs, generator=torch.Generator().manual_seed(1)) < 0.15


def test_reward_normalizer_equals_a_loop_over_environments_and_rollouts():
    rewards, ends = reward_rollout()
    normalizer = RewardNormalizer(0.9)
    for part, part_ends in zip(rewards.split([16, 8, 16]), ends.split([16, 8, 16]), strict=True):
        normalizer.update(part, part_ends)
    returns = slow_discounted_returns(rewards.numpy(), ends.numpy(), 0.9)
    variance = returns.var()
    assert normalizer.moments.count.item() == returns.size
    assert normalizer.moments.variance.item() == pytest.approx(variance, rel=1e-12)
    torch.testing.assert_close(normalizer(rewards), (rewards / (variance + 1e-8) ** 0.5).clamp(-10, 10), **EXACT)


def test_reward_normalizer_discounts_once_per_repeat():
    rewards, ends = reward_rollout()
    repeats = torch.randint(1, 5, rewards.shape, generator=torch.Generator().manual_seed(2))
    normalizer = RewardNormalizer(0.9)
    for part in range(2):
        rows = slice(20 * part, 20 * part + 20)
        normalizer.update(rewards[rows], ends[rows], repeats=repeats[rows])
    returns = slow_discounted_returns(rewards.numpy(), ends.numpy(), 0.9, repeats.numpy())
    assert normalizer.moments.variance.item() == pytest.approx(returns.var(), rel=1e-12)


@pytest.mark.parametrize("algorithm", [PPO, RND])
def test_reward_normalization_discounts_learned_action_repeats(algorithm):
    """With a discount factor of 0.5 the variances with and without repeats differ by a third."""
    given: list[tuple[Tensor, ...]] = []
    data = make_data(rollouts_per_epoch=1, env={"learned_action_repeat": 4})
    options = {"intrinsic_gamma": 0.5} if algorithm is RND else {}
    model = algorithm(data.observation_space, data.action_space, gamma=0.5, normalization={"rewards": True}, **options)
    normalizer = model.intrinsic_normalizer if algorithm is RND else model.normalizers.of_rewards
    updated = normalizer.update
    normalizer.update = lambda *args, **kwargs: given.append((*args, kwargs["repeats"])) or updated(*args, **kwargs)
    make_trainer().fit(model, data)
    ((rewards, ends, _, repeats),) = given
    assert repeats.min() < repeats.max()
    returns = slow_discounted_returns(rewards.double().numpy(), ends.numpy(), 0.5, repeats.numpy())
    assert normalizer.moments.variance.item() == pytest.approx(returns.var(), rel=1e-6)


def test_rewards_are_scaled_and_clipped_but_not_shifted():
    normalizer = RewardNormalizer(0.9)
    normalizer.moments.variance.fill_(4.0)
    out = normalizer(torch.tensor([0.0, 1.0, -3.0, 100.0]))
    torch.testing.assert_close(out, torch.tensor([0.0, 0.5, -1.5, 10.0]))


def test_reward_statistics_are_float64_for_float32_rewards():
    rewards, ends = reward_rollout()
    normalizer = RewardNormalizer(0.9)
    normalizer.update(rewards.float(), ends)
    assert normalizer.discounted_return.dtype == torch.float64
    variance = slow_discounted_returns(rewards.float().double().numpy(), ends.numpy(), 0.9).var()
    assert normalizer.moments.variance.item() == pytest.approx(variance, rel=1e-12)


def test_invalid_steps_do_not_change_reward_statistics():
    """Invalid rows after each episode end do not change the statistics."""
    rewards, ends = reward_rollout(20, 1)
    with_resets: list[tuple[float, bool, bool]] = []
    for reward, end in zip(rewards[:, 0].tolist(), ends[:, 0].tolist(), strict=True):
        with_resets.append((reward, end, True))
        if end:
            with_resets.append((123.0, False, False))  # arbitrary values of invalid rows
    plain, masked = RewardNormalizer(0.9), RewardNormalizer(0.9)
    plain.update(rewards, ends)
    rows, row_ends, valid = zip(*with_resets, strict=True)
    masked.update(torch.tensor([rows], dtype=torch.float64).T, torch.tensor([row_ends]).T, torch.tensor([valid]).T)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(masked.state_dict()[name], value, **EXACT)


def test_changed_number_of_environments_resets_returns_and_keeps_statistics():
    rewards, ends = reward_rollout()
    source, target = RewardNormalizer(0.9), RewardNormalizer(0.9)
    source.update(rewards, ends)
    target.load_state_dict(source.state_dict())
    target.discounted_return = source.discounted_return
    count = target.moments.count.item()
    target.update(rewards[:, :2], ends[:, :2])
    assert target.moments.count.item() == count + rewards[:, :2].numel()
    fresh = RewardNormalizer(0.9)
    fresh.update(rewards[:, :2], ends[:, :2])
    torch.testing.assert_close(target.discounted_return, fresh.discounted_return)


def test_running_returns_are_per_rank_and_not_in_the_state_dict():
    normalizer = RewardNormalizer(0.9)
    normalizer.update(*reward_rollout())
    assert not [name for name in normalizer.state_dict() if "discounted_return" in name]


def test_each_actor_has_its_own_running_returns():
    """Two actors with two environments each; new episodes reset the running returns."""
    together, (one, other) = RewardNormalizer(0.5), (RewardNormalizer(0.5), RewardNormalizer(0.5))
    rewards, ends, none = torch.ones(2, 2), torch.zeros(2, 2, dtype=torch.bool), torch.zeros(2, dtype=torch.bool)
    for turn in range(3):
        together.update(rewards, ends, first=2, starts=none)
        other.update(rewards, ends)
        if turn == 1:
            together.update(3 * rewards, ends, first=0, starts=none)
            one.update(3 * rewards, ends)
    expected = torch.cat([one.discounted_return, other.discounted_return])
    assert together.discounted_return.tolist() == expected.tolist() == [2.25, 2.25, 0.984375, 0.984375]
    together.update(rewards, ends, first=2, starts=torch.tensor([True, False]))
    assert together.discounted_return.tolist() == [2.25, 2.25, 0.75, 0.99609375]
    assert together.moments.count == 4 * 4 + 4

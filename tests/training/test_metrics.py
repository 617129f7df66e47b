"""Statistics of a log window: values by hand, precision and new names."""

import math

import pytest
import torch

from lightning_rl.rollouts.rollout import EpisodeSummary
from lightning_rl.training.metrics import EpisodeStatistics, LogWindow


def test_episode_statistics_cover_all_episodes_since_the_reset():
    metric = EpisodeStatistics()
    metric.update([1.0, 4.0], [10, 20])
    metric.update([], [])
    metric.update([-2.0], [6])
    assert metric.compute() == {
        "episode_return": 1.0,
        "episode_return_min": -2.0,
        "episode_return_max": 4.0,
        "episode_length": 12.0,
        "episode_length_min": 6.0,
        "episode_length_max": 20.0,
        "episodes": 3.0,
    }
    metric.reset()
    metric.update([], [])
    assert metric.compute() == {}
    metric.update([7.0], [3])
    assert metric.compute()["episode_return_min"] == 7.0


def window_of(*rollouts: dict[str, list[float]], **counts: int) -> LogWindow:
    window = LogWindow()
    for scalars in rollouts:
        window.add(EpisodeSummary([], []), scalars, {f"rollout/{name}": count for name, count in counts.items()})
    return window


def test_means_average_values_not_means():
    assert window_of({"a": [1.0, 2.0, 3.0], "b": [5.0], "c": []}, {"a": [10.0]}).compute() == {"a": 4.0, "b": 5.0}


def test_means_accept_new_and_missing_names():
    window = window_of({"a": [1.0]}, {"b": [4.0], "a": [3.0]}, {"b": [6.0]})
    assert window.compute() == {"a": 2.0, "b": 5.0}
    window.begin(0)
    window.add(EpisodeSummary([], []), {"b": [1.0]}, {})
    assert window.compute() == {"b": 1.0}


def test_names_are_in_the_same_order_on_all_ranks():
    ones = window_of({"b": [1.0], "a": [2.0]}, {"d": [3.0]}, {"c": [4.0], "b": [5.0]}, dropped=1, env_restarts=2)
    others = window_of({"d": [3.0]}, {"a": [2.0], "b": [1.0]}, {"b": [5.0], "c": [4.0]}, env_restarts=2, dropped=1)
    assert [*ones.compute().items()] == [*others.compute().items()]


def test_counts_are_summed_and_the_largest_lag_is_kept():
    window = LogWindow()
    for lag in (2, 5, 3):
        window.add(EpisodeSummary([], []), {}, {"rollout/dropped": lag, "train/policy_lag_max": lag})
    assert window.compute() == {"rollout/dropped": 10.0, "train/policy_lag_max": 5.0}


def test_statistics_are_exact_whatever_the_default_dtype():
    torch.set_default_dtype(torch.bfloat16)  # as under Lightning's bf16-true
    try:
        window = LogWindow()
        for _ in range(300):
            window.add(EpisodeSummary([1001.0], [12345]), {"x": [1 / 3]}, {})
        found = window.compute()
    finally:
        torch.set_default_dtype(torch.float32)
    assert (found["rollout/episodes"], found["rollout/episode_return"]) == (300, 1001)
    assert found["rollout/episode_length_max"] == 12345
    assert found["x"] == pytest.approx(1 / 3, rel=1e-12)


def test_rounding_does_not_depend_on_the_number_of_updates():
    values, lengths = [0.1, 0.2, 0.3, 1e16, -1e16, 0.7], [1, 2, 3, 4, 5, 6]
    one_by_one, together = LogWindow(), LogWindow()
    for value, length in zip(values, lengths, strict=True):
        one_by_one.add(EpisodeSummary([value], [length]), {"a": [value], "b": []}, {})
    together.add(EpisodeSummary(values, lengths), {"a": values, "b": []}, {})
    total = 0.0
    for value in values:
        total += value
    assert one_by_one.compute() == together.compute()
    assert together.compute()["a"] == together.compute()["rollout/episode_return"] == total / 6
    assert not math.isclose(total, sum(sorted(values)))

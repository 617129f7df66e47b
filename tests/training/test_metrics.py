"""Metrics of a log window: values by hand, precision, ranks and new names."""

import pytest
import torch

from lightning_rl.training.metrics import EpisodeStatistics, ScalarMeans, Total


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


def test_scalar_means_average_values_not_means():
    metric = ScalarMeans(["a", "b", "c"])
    metric.update({"a": [1.0, 2.0, 3.0], "b": [5.0], "c": []})
    metric.update({"a": [10.0], "b": [], "c": []})
    assert metric.compute() == {"a": 4.0, "b": 5.0}


def test_scalar_means_accept_new_and_missing_names():
    metric = ScalarMeans()
    metric.update({"a": [1.0]})
    metric.update({"b": [4.0], "a": [3.0]})
    metric.update({"b": [6.0]})
    assert metric.compute() == {"a": 2.0, "b": 5.0}
    metric.reset()
    metric.update({"b": [1.0]})
    assert metric.compute() == {"b": 1.0}


def test_scalar_means_sort_names_equally_on_all_ranks():
    ones = [{"b": [1.0], "a": [2.0]}, {"d": [3.0]}, {"c": [4.0], "b": [5.0]}]
    others = [{"a": [2.0], "b": [1.0]}, {"b": [5.0], "c": [4.0]}, {"d": [3.0]}]
    metrics = ScalarMeans(), ScalarMeans()
    for metric, reported in zip(metrics, (ones, others), strict=True):
        for values in reported:
            metric.update(values)
        assert metric.names == ["a", "b", "c", "d"]
        assert (metric.sums.tolist(), metric.counts.tolist()) == ([2.0, 6.0, 4.0, 3.0], [1.0, 2.0, 1.0, 1.0])
        metric.reset()
        metric.update({"c": [7.0]})
        assert metric.compute() == {"c": 7.0}


def test_total_is_the_sum_since_the_reset():
    metric, twin = Total(), Total()
    metric.update(2)
    metric.update(3)
    assert metric.compute() == 5
    twin.restore(metric.snapshot())
    twin.update(1)
    assert twin.compute() == 6
    metric.reset()
    metric.update(7)
    assert metric.compute() == 7


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_statistics_stay_float64_after_a_cast(dtype):
    module = torch.nn.ModuleDict({"episodes": EpisodeStatistics(), "means": ScalarMeans(["x"])}).to(dtype)
    torch.set_default_dtype(dtype)  # as under Lightning's bf16-true
    try:
        for _ in range(300):
            module["episodes"].update([1001.0], [12345])
            module["means"].update({"x": [1 / 3]})
        module.to(dtype)
        episodes, means = module["episodes"].compute(), module["means"].compute()
        module["episodes"].reset()
        module["episodes"].update([1001.0], [12345])
    finally:
        torch.set_default_dtype(torch.float32)
    assert (episodes["episodes"], episodes["episode_return"], episodes["episode_length_max"]) == (300, 1001, 12345)
    assert means["x"] == pytest.approx(1 / 3, rel=1e-12)
    assert module["episodes"].compute()["episode_return"] == 1001


def test_restored_statistics_continue_from_the_snapshot():
    metric, twin = EpisodeStatistics(), EpisodeStatistics()
    metric.update([1.0, 4.0], [10, 20])
    twin.restore(metric.snapshot())
    for one in (metric, twin):
        one.update([10.0], [1])
    assert twin.compute() == metric.compute()
    assert twin.update_called == metric.update_called


def test_rounding_does_not_depend_on_the_number_of_updates():
    values, lengths = [0.1, 0.2, 0.3, 1e16, -1e16, 0.7], [1, 2, 3, 4, 5, 6]
    one_by_one, together = (EpisodeStatistics(), ScalarMeans()), (EpisodeStatistics(), ScalarMeans())
    for value, length in zip(values, lengths, strict=True):
        one_by_one[0].update([value], [length])
        one_by_one[1].update({"a": [value], "b": []})
    together[0].update(values, lengths)
    together[1].update({"a": values, "b": []})
    assert one_by_one[0].compute() == together[0].compute()
    assert one_by_one[1].compute() == together[1].compute() == {"a": sum_in_order(values) / 6}
    assert together[1].count("a") == one_by_one[1].count("a") == 6
    assert all(str(x.snapshot()) == str(y.snapshot()) for x, y in zip(one_by_one, together, strict=True))


def sum_in_order(values):
    total = 0.0
    for value in values:
        total += value
    return total

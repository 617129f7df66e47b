"""Statistics of a logging window: values by hand, precision, ranks, growing names; and the record of updates."""

import math

import pytest
import torch

from lightning_rl.training.gradient_steps import UpdateRecord
from lightning_rl.training.metrics import EpisodeStatistics, ScalarMeans, Total


def test_episode_statistics_are_those_of_every_episode_since_the_reset():
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


def test_scalar_means_are_over_all_values_not_over_means():
    metric = ScalarMeans(["a", "b", "c"])
    metric.update({"a": [1.0, 2.0, 3.0], "b": [5.0], "c": []})
    metric.update({"a": [10.0], "b": [], "c": []})
    assert metric.compute() == {"a": 4.0, "b": 5.0}


def test_names_may_be_reported_now_and_then_and_join_later():
    metric = ScalarMeans()
    metric.update({"a": [1.0]})
    metric.update({"b": [4.0], "a": [3.0]})
    metric.update({"b": [6.0]})
    assert metric.compute() == {"a": 2.0, "b": 5.0}
    metric.reset()
    metric.update({"b": [1.0]})
    assert metric.compute() == {"b": 1.0}


def test_ranks_that_report_names_in_different_orders_and_windows_keep_them_in_the_same():
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
def test_statistics_keep_their_digits_in_a_module_cast_to(dtype):
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


def test_a_snapshot_goes_on_where_it_was_taken():
    metric, twin = EpisodeStatistics(), EpisodeStatistics()
    metric.update([1.0, 4.0], [10, 20])
    twin.restore(metric.snapshot())
    for one in (metric, twin):
        one.update([10.0], [1])
    assert twin.compute() == metric.compute()
    assert twin.update_called == metric.update_called


def test_records_average_over_minibatches():
    record = UpdateRecord(torch.device("cpu"))
    for value in (1.0, 2.0, 6.0):
        record.add(loss=torch.tensor(value), norm=torch.tensor(2 * value, dtype=torch.float64))
    assert record.means() == {"loss": 3.0, "norm": 6.0}
    assert UpdateRecord(torch.device("cpu")).means() == {}


def test_sums_of_bfloat16_terms_go_on_growing():
    record = UpdateRecord(torch.device("cpu"))
    for _ in range(1000):
        record.add(grad_norm=torch.tensor(1.0, dtype=torch.bfloat16))
    assert record.means() == {"grad_norm": 1.0}


def test_only_terms_that_make_up_the_update_must_be_finite():
    record = UpdateRecord(torch.device("cpu"))
    record.add(entropy=torch.tensor(1.0), policy_loss=torch.tensor(math.inf))
    record.observe(explained_variance=torch.tensor(math.nan))
    assert record.not_finite(record.means()) == {"policy_loss": math.inf}


def test_once_closed_record_stay_closed():
    record = UpdateRecord(torch.device("cpu"))
    assert not record.stopped
    for condition in (True, False, True):
        record.stop_unless(torch.tensor(condition))
    assert record.stopped


def test_values_taken_in_one_by_one_or_together_are_the_same_to_the_last_digit():
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

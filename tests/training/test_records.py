"""What is recorded of updates, and that it is the same where the host does not wait for the device."""

from collections.abc import Iterator

import pytest
import torch

from lightning_rl import PPO
from lightning_rl.distributed import moments
from lightning_rl.training.advantages import AdvantageEstimator
from lightning_rl.training.gradient_steps import UpdateRecord
from lightning_rl.training.normalizers import Normalizers
from tests.helpers import DISCRETE, VECTOR, FixedRollouts, Recorder, make_trainer, parameters_of, random_rollout


def scalar(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(value, dtype=dtype)


def test_terms_are_averaged_over_the_minibatches_that_recorded_them():
    record = UpdateRecord(torch.device("cpu"))
    record.observe(once=scalar(7.0))
    for value in (1.0, 2.0, 6.0):
        record.next_minibatch()
        record.add(term=scalar(value))
    assert record.means() == {"once": 7.0, "term": 3.0}


def test_the_minibatch_that_stops_the_updates_counts_and_those_after_it_do_not():
    record = UpdateRecord(torch.device("cpu"))
    for value in (1.0, 3.0, 50.0, float("nan")):
        record.next_minibatch()
        record.add(before=scalar(value))
        record.stop_unless(scalar(value) < 3)
        record.add(after=scalar(value))
        if value == 50:
            record.add(only_then=scalar(value))
    assert record.means() == {"before": 2.0, "after": 2.0}


def test_means_are_not_limited_by_the_precision_of_the_terms():
    record = UpdateRecord(torch.device("cpu"))
    for _ in range(1000):  # a sum in bfloat16 stops at 256
        record.add(term=scalar(1.0, torch.bfloat16), exact=scalar(0.1, torch.float64))
    assert record.means() == {"term": 1.0, "exact": pytest.approx(0.1, rel=1e-12)}


def test_numbers_are_terms_too():
    record = UpdateRecord(torch.device("cpu"))
    record.add(coefficient=0.5)
    record.observe(count=3)
    assert record.means() == {"coefficient": 0.5, "count": 3.0}


def test_only_terms_of_the_update_must_be_finite():
    record = UpdateRecord(torch.device("cpu"))
    record.observe(described=scalar(float("inf")))
    record.add(loss=scalar(float("-inf")), fine=scalar(0.0))
    assert record.not_finite(record.means()) == {"loss": float("-inf")}


def test_absolute_values_are_those_of_the_means_over_ranks_which_talk_once(monkeypatch):
    asked: list[torch.Tensor] = []

    def average(x: torch.Tensor) -> torch.Tensor:
        asked.append(x)
        return (x + torch.tensor([3.0, 1.0, -2.0, 50.0])) / 2  # with what another rank has

    monkeypatch.setattr("lightning_rl.training.gradient_steps.average", average)
    record = UpdateRecord(torch.device("cpu"))
    record.add_absolute("size", torch.tensor([1.0, -5.0]))
    record.next_minibatch()
    record.add_absolute("size", torch.tensor([-2.0]))
    record.add(fine=scalar(0.0))
    record.stop_unless(scalar(0.0) > 1)
    record.next_minibatch()
    record.add_absolute("size", torch.tensor([9.0]))
    assert record.means() == {"fine": 0.0, "size": ((2.0 + 2.0) + 2.0) / 2}  # |2| + |-2|, then |-2|
    assert len(asked) == 1


def test_terms_that_are_told_together_are_as_terms_told_one_by_one():
    record = UpdateRecord(torch.device("cpu"))
    record.next_minibatch()
    record.add_together(("loss", "kl"), torch.tensor([1.0, 0.5]), ["kl"])
    record.next_minibatch()
    record.add(loss=scalar(4.0))
    record.next_minibatch()
    record.add_together(("loss", "kl"), torch.tensor([1.0, torch.inf]), ["kl"])
    record.stop_unless(scalar(0.0) > 1)
    record.next_minibatch()
    record.add_together(("loss", "kl"), torch.tensor([9.0, 9.0]), ["kl"])
    means = record.means()
    assert means == {"loss": 2.0, "kl": torch.inf}
    assert record.not_finite(means) == {}  # the divergence describes an update, and is no part of it
    record.start_phase("aux_")
    record.add_together(("loss",), torch.tensor([7.0]))
    assert record.means() == {"loss": 2.0, "kl": torch.inf, "aux_loss": 7.0}


class Ranks:
    """Three ranks, one after the other; what any of them has said before is all that a sum is made of."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rank = 0
        self.said: dict[int, torch.Tensor] = {}
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: self.rank)
        monkeypatch.setattr("lightning_rl.distributed.world_size", lambda: 3)
        monkeypatch.setattr("lightning_rl.training.advantages.world_size", lambda: 3)
        monkeypatch.setattr("lightning_rl.distributed.all_reduce", self.add_up)

    def add_up(self, x: torch.Tensor, operation: str = "sum") -> torch.Tensor:
        self.said[self.rank] = x
        return torch.stack(list(self.said.values())).sum(0)

    def __iter__(self) -> Iterator[int]:
        self.said.clear()
        for self.rank in (0, 1, 2, 0, 1, 2):  # the second time all of them are known
            yield self.rank


def estimator() -> AdvantageEstimator:
    policy = PPO(VECTOR, DISCRETE).policy
    return AdvantageEstimator(policy, Normalizers(policy, None, "after"))


def test_moments_are_those_of_all_ranks_together(monkeypatch):
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


def test_equal_entries_of_several_ranks_become_0(monkeypatch):
    for rank in Ranks(monkeypatch):
        standardized = estimator().standardize([torch.full((rank + 3,), 0.1)])[0]
    assert not standardized.any()


class Unaware(UpdateRecord):
    """Of a device that the host does not wait for."""

    @property
    def stopped(self) -> bool:
        return False


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
def test_an_early_stop_is_reported_the_same_whether_or_not_the_host_waits_for_it(monkeypatch):
    def learn() -> tuple[dict[str, torch.Tensor], list[dict[str, float]], int]:
        torch.manual_seed(0)
        model = PPO(VECTOR, DISCRETE, policy={"hidden_sizes": (8,)}, learning_rate=1e-2, target_kl=1e-3)
        recorder = Recorder()
        trainer = make_trainer(callbacks=[recorder])
        trainer.fit(model, FixedRollouts([random_rollout(model.policy, off_policy=0.0)], model))
        return parameters_of(model), recorder.rows, trainer.global_step

    parameters, rows, steps = learn()
    assert 1 <= steps < 4 * 4
    monkeypatch.setattr("lightning_rl.training.gradient_steps.UpdateRecord", Unaware)
    unaware, rows_of_unaware, steps_of_unaware = learn()
    assert steps_of_unaware == steps
    assert rows_of_unaware == rows
    assert all(torch.equal(value, unaware[name]) for name, value in parameters.items())

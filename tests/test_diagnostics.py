"""What is recorded of updates, and that it is the same where the host does not wait for the device."""

import pytest
import torch

from lightning_rl import PPO
from lightning_rl.diagnostics import Diagnostics
from tests.helpers import DISCRETE, VECTOR, FixedRollouts, Recorder, make_trainer, parameters_of, random_rollout


def scalar(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(value, dtype=dtype)


def test_terms_are_averaged_over_the_minibatches_that_recorded_them():
    diagnostics = Diagnostics(torch.device("cpu"))
    diagnostics.observe(once=scalar(7.0))
    for value in (1.0, 2.0, 6.0):
        diagnostics.next_minibatch()
        diagnostics.add(term=scalar(value))
        diagnostics.observe_first("first", lambda value=value: scalar(value))
    assert diagnostics.means() == {"once": 7.0, "term": 3.0, "first": 1.0}


def test_the_minibatch_that_stops_the_updates_counts_and_those_after_it_do_not():
    diagnostics = Diagnostics(torch.device("cpu"))
    for value in (1.0, 3.0, 50.0, float("nan")):
        diagnostics.next_minibatch()
        diagnostics.add(before=scalar(value))
        diagnostics.close_unless(scalar(value) < 3)
        diagnostics.add(after=scalar(value))
        if value == 50:
            diagnostics.add(only_then=scalar(value))
    assert diagnostics.means() == {"before": 2.0, "after": 2.0}


def test_means_are_not_limited_by_the_precision_of_the_terms():
    diagnostics = Diagnostics(torch.device("cpu"))
    for _ in range(1000):  # a sum in bfloat16 stops at 256
        diagnostics.add(term=scalar(1.0, torch.bfloat16), exact=scalar(0.1, torch.float64))
    assert diagnostics.means() == {"term": 1.0, "exact": pytest.approx(0.1, rel=1e-12)}


def test_only_terms_of_the_update_must_be_finite():
    diagnostics = Diagnostics(torch.device("cpu"))
    diagnostics.observe(described=scalar(float("inf")))
    diagnostics.add(loss=scalar(float("-inf")), fine=scalar(0.0))
    assert diagnostics.not_finite(diagnostics.means()) == {"loss": float("-inf")}


class Unaware(Diagnostics):
    """Of a device that the host does not wait for."""

    @property
    def known_closed(self) -> bool:
        return False


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
def test_an_early_stop_is_reported_the_same_whether_or_not_the_host_waits_for_it(monkeypatch):
    def learn() -> tuple[dict[str, torch.Tensor], list[dict[str, float]], int]:
        torch.manual_seed(0)
        model = PPO(VECTOR, DISCRETE, hidden_sizes=(8,), learning_rate=1e-2, target_kl=1e-3)
        recorder = Recorder()
        trainer = make_trainer(callbacks=[recorder])
        trainer.fit(model, FixedRollouts([random_rollout(model.policy, off_policy=0.0)], model))
        return parameters_of(model), recorder.rows, trainer.global_step

    parameters, rows, steps = learn()
    assert 1 <= steps < 4 * 4
    monkeypatch.setattr("lightning_rl.algorithms.base.Diagnostics", Unaware)
    unaware, rows_of_unaware, steps_of_unaware = learn()
    assert steps_of_unaware == steps
    assert rows_of_unaware == rows
    assert all(torch.equal(value, unaware[name]) for name, value in parameters.items())

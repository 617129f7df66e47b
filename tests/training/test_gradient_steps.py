"""The record of updates, and early stops that the host does not wait for."""

import pytest
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch.overrides import TorchFunctionMode

from lightning_rl import PPO
from lightning_rl.fast import FastEngine
from lightning_rl.training.gradient_steps import UpdateRecord, scale_to_norm
from tests.helpers import DISCRETE, VECTOR, FixedRollouts, Recorder, make_trainer, parameters_of, random_rollout


def scalar(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(value, dtype=dtype)


def test_record_averages_over_minibatches_that_recorded_a_term():
    record = UpdateRecord(torch.device("cpu"))
    record.observe(once=scalar(7.0))
    for value in (1.0, 2.0, 6.0):
        record.next_minibatch()
        record.add(term=scalar(value))
    assert record.means() == {"once": 7.0, "term": 3.0}
    assert UpdateRecord(torch.device("cpu")).means() == {}


def test_record_drops_minibatches_after_the_stop():
    record = UpdateRecord(torch.device("cpu"))
    for value in (1.0, 3.0, 50.0, float("nan")):
        record.next_minibatch()
        record.add(before=scalar(value))
        record.stop_unless(scalar(value) < 3)
        record.add(after=scalar(value))
        if value == 50:
            record.add(only_then=scalar(value))
    assert record.means() == {"before": 2.0, "after": 2.0}


@pytest.mark.parametrize("norm", [0.0, 0.5, 0.985, 0.995, 0.9999995, 1.0, 1.005, 1.5, 3.0])
def test_gradients_are_scaled_as_pytorch_clips_them(norm):
    parameters = [torch.nn.Parameter(torch.zeros(3)) for _ in range(2)]
    for parameter in parameters:
        parameter.grad = torch.full((3,), norm / 6**0.5)
    scaled = [parameter.grad.clone() for parameter in parameters]
    scale_to_norm(scaled, 1.0, torch.nn.utils.get_total_norm(scaled))
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    assert all(torch.equal(x, parameter.grad) for x, parameter in zip(scaled, parameters, strict=True))


class HostReads(TorchFunctionMode):
    """Records the calls that make the host wait for the values of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        if name in ("tolist", "item", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__", "nonzero"):
            self.calls.append(name)
        return function(*args, **(kwargs or {}))


def test_values_and_stops_are_read_at_once():
    record = UpdateRecord(torch.device("cpu"))
    for value in (1.0, 3.0, 50.0):
        record.next_minibatch()
        record.add(loss=scalar(value))
        record.observe(ratio=scalar(torch.inf, torch.float64))
        record.add_absolute("total", torch.tensor([value, -1.0]))
        record.stop_unless(scalar(value) < 3)
    with HostReads() as reads:
        means = record.means()
    assert means == {"loss": 2.0, "ratio": torch.inf, "total": 3.0}
    assert reads.calls == ["tolist"]


def test_record_adds_bfloat16_terms_exactly():
    record = UpdateRecord(torch.device("cpu"))
    for _ in range(1000):  # a sum in bfloat16 stops at 256
        record.add(term=scalar(1.0, torch.bfloat16), exact=scalar(0.1, torch.float64))
    assert record.means() == {"term": 1.0, "exact": pytest.approx(0.1, rel=1e-12)}


def test_record_accepts_python_numbers():
    record = UpdateRecord(torch.device("cpu"))
    record.add(coefficient=0.5)
    record.observe(count=3)
    assert record.means() == {"coefficient": 0.5, "count": 3.0}


def test_observed_terms_may_be_non_finite():
    record = UpdateRecord(torch.device("cpu"))
    record.observe(described=scalar(float("inf")), undefined=scalar(float("nan")))
    record.add(loss=scalar(float("-inf")), fine=scalar(0.0))
    assert record.not_finite(record.means()) == {"loss": float("-inf")}


def test_absolute_terms_are_averaged_over_ranks_in_one_call(monkeypatch):
    calls: list[torch.Tensor] = []

    def average(x: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        return (x + torch.tensor([3.0, 1.0, -2.0, 50.0])) / 2  # with the values of another rank

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
    assert len(calls) == 1


def test_terms_recorded_together_equal_single_terms():
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
    assert record.not_finite(means) == {}  # observed values may be infinite
    record.start_phase("aux_")
    record.add_together(("loss",), torch.tensor([7.0]))
    assert record.means() == {"loss": 2.0, "kl": torch.inf, "aux_loss": 7.0}


def test_phase_ends_with_its_block_and_the_early_stop_before_it_stays():
    record = UpdateRecord(torch.device("cpu"))
    record.next_minibatch()
    record.add(loss=1.0)
    record.stop_unless(scalar(0.0) > 1)
    with record.phase("sil_"):
        record.next_minibatch()
        record.add(loss=5.0)
        assert not record.stopped
    assert record.stopped
    record.observe(kl=2.0)
    record.next_minibatch()
    record.add(loss=9.0)
    assert record.means() == {"loss": 1.0, "sil_loss": 5.0, "kl": 2.0}
    with record.phase("sil_"):
        record.stop_all_phases_unless(scalar(0.0) > 1)
    assert record.stopped and not record.finite


def test_stopped_record_stays_stopped():
    record = UpdateRecord(torch.device("cpu"))
    assert not record.stopped
    for condition in (True, False, True):
        record.stop_unless(torch.tensor(condition))
    assert record.stopped


class Unaware(UpdateRecord):
    """A record on a device that the host does not wait for."""

    @property
    def stopped(self) -> bool:
        return False


class ObservesAfterwards(PPO):
    def update(self, rollout):
        super().update(rollout)
        self.steps.observe(passes_done=1.0)


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
def test_early_stop_is_logged_equally_if_the_host_does_not_wait(monkeypatch):
    def learn() -> tuple[dict[str, torch.Tensor], list[dict[str, float]], int]:
        torch.manual_seed(0)
        options = {"policy": {"hidden_sizes": (8,)}, "learning_rate": 1e-2, "target_kl": 1e-3}
        model = ObservesAfterwards(VECTOR, DISCRETE, **options)
        recorder = Recorder()
        trainer = make_trainer(callbacks=[recorder])
        trainer.fit(model, FixedRollouts([random_rollout(model.policy, off_policy=0.0)], model))
        return parameters_of(model), recorder.rows, trainer.global_step

    parameters, rows, steps = learn()
    assert 1 <= steps < 4 * 4 and rows[0]["passes_done"] == 1
    monkeypatch.setattr("lightning_rl.training.gradient_steps.UpdateRecord", Unaware)
    unaware, rows_of_unaware, steps_of_unaware = learn()
    assert steps_of_unaware == steps
    assert rows_of_unaware == rows
    assert all(torch.equal(value, unaware[name]) for name, value in parameters.items())


class OnMPS(torch.Tensor):
    """A flag that seems to be on a GPU of Apple."""

    is_cpu, device = False, torch.device("mps")


class IgnoresFoundInf(torch.optim.Adam):
    """As fused optimizers on MPS do before https://github.com/pytorch/pytorch/pull/186360."""

    def step(self, closure=None):
        self.found_inf = None
        return super().step(closure)


def test_fused_optimizers_skip_steps_on_mps():
    model = PPO(VECTOR, DISCRETE)
    model.steps.engine = FastEngine()
    optimizer = IgnoresFoundInf(model.policy.parameters(), lr=0.1, fused=True)
    for parameter in model.policy.parameters():
        parameter.grad = torch.ones_like(parameter)
    for takes_step in (True, False, True):
        before = parameters_of(model)
        model.steps.record.is_open = torch.tensor(takes_step).as_subclass(OnMPS)
        model.steps._step(LightningOptimizer(optimizer), counts=False)
        assert all(torch.equal(x, before[name]) != takes_step for name, x in parameters_of(model).items())
    assert {float(state["step"]) for state in optimizer.state.values()} == {2.0}

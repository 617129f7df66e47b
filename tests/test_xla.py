"""What is done differently for XLA, as far as it shows on a machine without it; `tests/xla/` has the rest."""

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies.xla import XLAStrategy
from torch import nn

from lightning_rl import EnvStepLimit, LastCheckpoint
from lightning_rl.distributed import gather_on_rank_zero, gather_ranks, gather_rows, world_size
from lightning_rl.policies.actor_critic import ActorCritic, copy_to_cpu
from lightning_rl.rollouts.rollout import EpisodeSummary
from lightning_rl.training.gradient_steps import step_where
from lightning_rl.training.metrics import LogWindow
from lightning_rl.validation import ConfigurationError
from tests.helpers import (
    DISCRETE,
    VECTOR,
    assert_equal_parameters,
    make_data,
    make_model,
    make_trainer,
    parameters_of,
)

XLA = torch.device("xla")


def on_xla(**trainer_options):
    """A model that believes to be on XLA, attached to a Trainer."""
    data = make_data()
    model = make_model(data)
    model.trainer = make_trainer(**trainer_options)
    model._device = XLA
    return model, data


@pytest.mark.parametrize("optimizer_class", [torch.optim.Adam, torch.optim.NAdam, torch.optim.RMSprop])
def test_a_step_is_taken_back_whole_or_not_at_all(optimizer_class):
    torch.manual_seed(0)
    gradients = torch.randn(4, 3)
    results = []
    for steps in ([0, 1, 3], [0, 1, 2, 3]):
        parameter = nn.Parameter(torch.ones(3))
        optimizer = optimizer_class([parameter], lr=0.1)
        for index in steps:
            parameter.grad = gradients[index]
            if index == 0:
                optimizer.step()
            else:
                step_where(torch.tensor(index != 2), optimizer, optimizer.step)
        results.append([parameter.detach(), *optimizer.state[parameter].values()])
    without, taken_back = results
    assert len(without) > 1
    assert all(torch.equal(one, other) for one, other in zip(without, taken_back, strict=True))


def test_a_copy_of_a_policy_is_its_own_and_acts_the_same():
    torch.manual_seed(0)
    policy = ActorCritic(VECTOR, DISCRETE, hidden_sizes=(8,), normalize_observations=True)
    policy.observation_normalizer.update(torch.randn(50, 3))
    before = parameters_of(policy)
    copied = copy_to_cpu(policy)
    assert {name for name, _ in copied.named_parameters()} == set(before)
    observations = torch.randn(5, 3)
    assert torch.equal(copied.value(observations), policy.value(observations))
    with torch.no_grad():
        for tensor in [*copied.parameters(), *copied.buffers()]:
            tensor += 1
    assert_equal_parameters(policy, before)
    assert policy.observation_normalizer.moments.count == 50


def test_environments_see_a_copy_of_the_policy_on_the_cpu():
    model, data = on_xla()
    data.trainer = model.trainer
    model.trainer.strategy.connect(model)
    policy, _, _, device = data._policy()
    assert device == torch.device("cpu")
    assert policy is not model.policy
    assert_equal_parameters(policy, parameters_of(model.policy))
    model._device = torch.device("cpu")
    assert data._policy()[0] is model.policy


def test_the_default_optimizer_counts_its_steps_on_the_device():
    model, _ = on_xla()
    assert model.configure_optimizers().defaults["capturable"] is True
    assert not model.configure_optimizers().defaults["fused"]


def test_only_full_precision_is_accepted():
    model, _ = on_xla(precision="bf16-mixed")
    with pytest.raises(ConfigurationError, match="precision='bf16-mixed' is not valid: expected one of 32-true"):
        model.on_fit_start()


def test_what_is_logged_does_not_go_to_the_device(monkeypatch):
    model, _ = on_xla()
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(LightningModule, "log", lambda self, name, value, **_: seen.append(value))
    model.metrics.logged(model, on_epoch=False)
    model.metrics.evaluation.add(EpisodeSummary([1.5], [3]), {}, {}, {})
    monkeypatch.setattr(LightningModule, "log_dict", lambda self, values, **_: seen.extend(values.values()))
    model.metrics.log_evaluation(model, "val")
    assert len(seen) > 3
    assert {value.device for value in seen} == {torch.device("cpu")}


def test_a_run_goes_on_from_a_checkpoint_of_another_kind_of_device(tmp_path):
    """Whose Adam was capturable rather than fused."""

    def train(max_env_steps, ckpt_path=None):
        data = make_data(rollouts_per_epoch=1)
        model = make_model(data)
        callbacks = [EnvStepLimit(max_env_steps), LastCheckpoint(tmp_path)]
        trainer = make_trainer(max_epochs=-1, callbacks=callbacks, enable_checkpointing=True)
        trainer.fit(model, data, ckpt_path=ckpt_path)
        return model

    train(32)
    checkpoint = torch.load(tmp_path / "last.ckpt", weights_only=True)
    for group in checkpoint["optimizer_states"][0]["param_groups"]:
        group |= {"fused": None, "capturable": True}
    torch.save(checkpoint, tmp_path / "xla.ckpt")
    resumed = train(64, tmp_path / "xla.ckpt")
    (group,) = resumed.optimizers().param_groups
    assert (group["fused"], group["capturable"]) == (True, False)
    assert_equal_parameters(resumed, parameters_of(train(64, None)))


class Devices:
    """A `torch_xla` whose devices are two threads."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2, timeout=10)
        self.of_thread = threading.local()
        self.sent = [torch.empty(0)] * 2
        self.sizes: list[int] = []
        self._XLAC = SimpleNamespace(_xla_runtime_is_initialized=lambda: hasattr(self.of_thread, "rank"))
        self.runtime = SimpleNamespace(world_size=lambda: 2, global_ordinal=lambda: self.of_thread.rank)
        self.core = SimpleNamespace(xla_model=SimpleNamespace(all_reduce=self.all_reduce))

    def device(self) -> torch.device:
        return torch.device("cpu")

    def all_reduce(self, operation: str, x: torch.Tensor) -> torch.Tensor:
        self.sent[self.of_thread.rank] = x
        self.barrier.wait()
        both = torch.stack(self.sent)
        self.barrier.wait()
        self.sizes.append(x.numel())
        return both.sum(0, dtype=x.dtype) if operation == "sum" else both.amax(0)

    def run(self, function: Callable[[int], object]) -> list[object]:
        """Return what `function` returns on each rank."""

        def on_rank(rank: int) -> object:
            self.of_thread.rank = rank
            return function(rank)

        with ThreadPoolExecutor(2) as threads:
            return [*threads.map(on_rank, range(2))]


@pytest.fixture
def devices(monkeypatch):
    made = Devices()
    monkeypatch.setitem(sys.modules, "torch_xla", made)
    return made


def test_the_process_that_launches_xla_ranks_is_not_one_of_them(devices):
    assert world_size() == 1
    assert devices.run(lambda rank: world_size()) == [2, 2]
    assert gather_ranks("alone") == ["alone"]


def test_ranks_on_xla_devices_gather_objects_of_different_sizes(devices):
    states = ["short", {"long": list(range(100))}]
    assert devices.run(lambda rank: gather_ranks(states[rank])) == [states, states]
    assert devices.run(lambda rank: gather_on_rank_zero(states[rank])) == [states, []]
    assert {size for size in devices.sizes if size > 1} == {2 * 256}


def test_ranks_on_xla_devices_gather_rows_of_different_numbers(devices):
    rows, places = zip(*devices.run(lambda rank: gather_rows(torch.arange(rank + 1.0) + 10 * rank)), strict=True)
    assert [x.tolist() for x in rows] == [[0.0, 10.0, 11.0]] * 2
    assert places == ((0, 2), (1, 0))


def test_episode_statistics_are_over_all_xla_devices(devices):
    def statistics(rank: int) -> dict[str, float]:
        window = LogWindow()
        window.add(EpisodeSummary([10.0, 30.0][: 2 * rank], [1, 3][: 2 * rank]), {}, {}, {})
        return window.compute()

    one, other = devices.run(statistics)
    assert one == other
    assert tuple(one[f"rollout/{name}"] for name in ("episodes", "episode_return", "episode_return_max")) == (
        2,
        20.0,
        30.0,
    )


def test_rollouts_are_not_fetched_ahead_on_xla(monkeypatch):
    model, data = on_xla()
    strategy = object.__new__(XLAStrategy)
    monkeypatch.setattr(type(model.trainer), "strategy", strategy)
    data.trainer = model.trainer
    loader = data.train_dataloader()
    assert strategy.process_dataloader(loader) is loader

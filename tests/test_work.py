"""How much work a rollout and its updates are, in calls of the policy and of PyTorch: a slow-down that no timer sees.

The bounds are a few per cent above what it is with the newest PyTorch. Where one is passed on purpose, raise it, and
say in benchmarks/README.md what for.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_rl import PPO, RolloutDataModule
from lightning_rl.policies.actor_critic import ActorCritic
from lightning_rl.rollouts.replay import RolloutMemory
from tests.helpers import make_trainer

ENVIRONMENTS, STEPS, EPOCHS, MINIBATCHES = 4, 32, 2, 4
# Without a kernel: they look at a tensor, or ask about it.
FREE = ("detach", "view", "t", "slice", "select", "expand", "unsqueeze", "squeeze", "reshape", "to", "lift_fresh")
FREE_PREFIXES = ("profiler", "resolve_", "promote_types")


class Operations(TorchDispatchMode):
    """Counts the operations that do something, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, name, *_ = str(operation).split(".")
        if namespace == "aten" and name not in FREE and not name.startswith(FREE_PREFIXES):
            self.counts[name] += 1
        return operation(*args, **kwargs or {})


class Work:
    """Counts of the last rollout: operations of collection and of updates, and calls of the policy."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: Counter[str] = Counter()
        self.operations: dict[str, Counter[str]] = {}
        for name in ("act", "forward", "log_prob", "value"):
            monkeypatch.setattr(ActorCritic, name, self._called(name, getattr(ActorCritic, name)))
        monkeypatch.setattr(RolloutDataModule, "collect", self._measured("collect", RolloutDataModule.collect))
        monkeypatch.setattr(PPO, "training_step", self._measured("learn", PPO.training_step))

    def _called(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            return method(*args, **kwargs)

        return called

    def _measured(self, part: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def measured(*args: Any, **kwargs: Any) -> Any:
            if part == "collect":
                self.calls.clear()
            with self._counting(part):
                return method(*args, **kwargs)

        return measured

    @contextmanager
    def _counting(self, part: str) -> Iterator[None]:
        with Operations() as operations:
            yield
        self.operations[part] = operations.counts


@pytest.mark.parametrize(
    ("env_id", "options", "per_step", "per_minibatch"),
    [
        ("CartPole-v1", {"entropy_coef": 0.01}, 12, 134),
        ("Pendulum-v1", {"normalization": {"observations": True, "rewards": True}}, 18, 159),
    ],
)
def test_a_rollout_of_ppo_by_plain_pytorch_is_no_more_work_than_it_was(
    monkeypatch, env_id, options, per_step, per_minibatch
):
    work = Work(monkeypatch)
    data = RolloutDataModule(env_id, ENVIRONMENTS, STEPS, rollouts_per_epoch=3)
    passes = {"num_epochs": EPOCHS, "num_minibatches": MINIBATCHES}
    model = PPO(data.observation_space, data.action_space, debug={"fast_paths": "none"}, **passes, **options)
    make_trainer().fit(model, data)
    # Values at the end of truncated episodes are one call more.
    assert work.calls.pop("value") in (1, 2)
    assert work.calls == {"act": STEPS, "log_prob": 1, "forward": EPOCHS * MINIBATCHES}
    collecting, learning = work.operations["collect"], work.operations["learn"]
    assert collecting["linear"] == 3 * STEPS  # two layers and a head: those of the actor alone
    assert collecting.total() / STEPS <= per_step
    assert learning.total() / (EPOCHS * MINIBATCHES) <= per_minibatch
    # One call for all parameters.
    assert learning["_fused_adam_"] == EPOCHS * MINIBATCHES


def test_gathering_steps_of_many_rollouts_takes_one_operation_per_rollout_and_field():
    memory = RolloutMemory(32)
    for index in range(32):
        numbers = 8.0 * index + torch.arange(8.0).view(4, 2)
        memory.append({"values": numbers, "observations": {"a": numbers, "b": numbers}})
    addresses = torch.randperm(32 * 8, generator=torch.Generator().manual_seed(0))
    with Operations() as operations:
        found = memory.gather(addresses)
    assert found["observations"]["b"].equal(addresses.float())
    assert operations.counts.total() <= 3 * 32 + 20


def calls_within(function: Callable[..., Any], counts: list[int]) -> Callable[..., Any]:
    """Return a function that also appends how many calls, of Python and of C, it came to."""

    def counted(*args: Any, **kwargs: Any) -> Any:
        number = 0

        def count(frame: Any, event: str, argument: Any) -> None:
            nonlocal number
            number += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            return function(*args, **kwargs)
        finally:
            sys.setprofile(None)
            counts.append(number)

    return counted


@pytest.mark.parametrize(
    ("env_id", "options", "per_step", "per_minibatch"),
    [
        ("CartPole-v1", {"entropy_coef": 0.01}, 235, 870),
        ("Pendulum-v1", {"normalization": {"observations": True, "rewards": True}}, 320, 925),
    ],
)
def test_the_short_ways_are_no_longer_than_they_were(monkeypatch, env_id, options, per_step, per_minibatch):
    """By the fast paths most of what is left is calls."""
    collecting: list[int] = []
    learning: list[int] = []
    monkeypatch.setattr(RolloutDataModule, "collect", calls_within(RolloutDataModule.collect, collecting))
    monkeypatch.setattr(PPO, "training_step", calls_within(PPO.training_step, learning))
    # As many episodes end each time.
    torch.manual_seed(0)
    data = RolloutDataModule(env_id, ENVIRONMENTS, STEPS, rollouts_per_epoch=3, seed=0)
    model = PPO(data.observation_space, data.action_space, num_epochs=EPOCHS, num_minibatches=MINIBATCHES, **options)
    make_trainer().fit(model, data)
    # Not of the last rollout, which the run's log is written after.
    assert collecting[-2] / STEPS <= per_step
    assert learning[-2] / (EPOCHS * MINIBATCHES) <= per_minibatch

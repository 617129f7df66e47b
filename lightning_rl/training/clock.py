"""The clock of a run in environment steps, and the options that follow it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info  # type: ignore[attr-defined]
from torch.optim import Optimizer

from lightning_rl.distributed import all_reduce
from lightning_rl.rollouts.rollout import Rollout
from lightning_rl.training.optimizers import set_learning_rate
from lightning_rl.training.schedules import Ramp, Schedule, Scheduled, parse_schedule
from lightning_rl.validation import check


def planned_env_steps(trainer: Trainer) -> int | None:
    """Return the number of environment steps after which `trainer` will stop, None if nothing bounds it.

    The smallest of every callback's `max_env_steps` and what `max_epochs` allows, where each epoch has
    ranks · environments · rollout length · rollouts steps, and the first one begins where the module's clock was then:
    a module may have been trained before. Known from the start of training on.
    """
    limits = _limits(trainer)
    shape = getattr(trainer.datamodule, "rollout_shape", None)  # type: ignore[attr-defined]
    rollouts = trainer.num_training_batches
    if shape is not None and trainer.max_epochs not in (None, -1) and math.isfinite(rollouts):
        clock: RunClock | None = getattr(trainer.lightning_module, "clock", None)
        before = 0 if clock is None else clock.env_steps_before_epochs
        limits.append(before + trainer.max_epochs * int(rollouts) * shape[0] * shape[1] * trainer.world_size)
    return min(limits, default=None)


def is_bounded(trainer: Trainer) -> bool:
    """Whether anything that the clock knows of ends the run."""
    return bool(_limits(trainer)) or trainer.max_epochs not in (None, -1)


def _limits(trainer: Trainer) -> list[int]:
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return [limit for callback in callbacks if (limit := getattr(callback, "max_env_steps", None)) is not None]


def validates_now(trainer: Trainer) -> bool:
    """Whether `trainer` validates when the callbacks of the present batch are done."""
    loop: Any = trainer.fit_loop.epoch_loop
    # Private to Lightning, because a copy of its rules would drift. The argument, its fetcher of batches, matters only
    # to a `training_step` that takes the iterator of the loader.
    return bool(trainer.enable_validation and loop._should_check_val_fx(None))


def ends_epoch(trainer: Trainer) -> bool:
    """Whether the present batch is the last one of its epoch."""
    return bool(trainer.fit_loop.epoch_loop.batch_progress.is_last_batch)


class RunClock:
    """Where a run is.

    Attributes:
        env_steps: Environment steps of all ranks that were learned from.
        frames: Steps of the simulation in them: more where each action is repeated.
        policy_version: Number of rollouts that were learned from.
        env_steps_before_epochs: Where it was when the Trainer began to count epochs: above 0 where an earlier run has
            trained the module, and this one does not go on from it by `ckpt_path`.
        planned_env_steps: Where the run ends; None where that is not known.
    """

    def __init__(self) -> None:
        self.env_steps = self.frames = self.policy_version = self.env_steps_before_epochs = 0
        self.planned_env_steps: int | None = None

    def lag(self, rollout: Rollout, may_lag: bool) -> int:
        """Return by how many versions the policy of a rollout is older than the current one.

        Raises:
            RuntimeError: It is not the current one, and only that can be learned from.
        """
        lag = self.policy_version - rollout.policy_version
        if lag < 0 or (lag and not may_lag):
            raise RuntimeError(
                f"the rollout was collected with version {rollout.policy_version} of the policy, not with version "
                f"{self.policy_version}: the train loader must have a length, or Lightning fetches one batch ahead"
            )
        return lag

    def advance(self, rollout: Rollout, device: torch.device) -> None:
        """Count a rollout that was learned from, on all ranks; a collective call."""
        frames = rollout.num_steps if rollout.frames is None else rollout.frames
        counts = all_reduce(torch.tensor([rollout.num_steps, frames], device=device)).tolist()
        self.env_steps, self.frames = self.env_steps + counts[0], self.frames + counts[1]


RATES = ("learning_rate", "critic_learning_rate")


class ScheduledOptions:
    """Sets the attributes of an algorithm to what their schedules say at the present environment step."""

    def __init__(self) -> None:
        self._schedules: dict[str, Schedule] = {}
        self._owners: dict[str, object] = {}
        self._options: dict[str, str] = {}
        self._annealed = False

    def add(
        self,
        name: str,
        value: Scheduled,
        above: float | None = None,
        at_least: float | None = None,
        at_most: float | None = None,
        owner: object = None,
        option: str | None = None,
    ) -> float:
        """Take in an option, and return its value at the beginning of a run; see `parse_schedule` for the bounds.

        `owner` has the attribute `name`; None: the algorithm. `option` is its full name, for errors; None: `name`.

        Raises:
            ConfigurationError: It is neither a number within the bounds nor a schedule.
        """
        option = option or name
        schedule = parse_schedule(option, value, above=above, at_least=at_least, at_most=at_most)
        if schedule.varies:
            self._schedules[name] = schedule
            self._options[name] = option
            if owner is not None:
                self._owners[name] = owner
        return schedule.at(0, None)

    def anneal(self, name: str, value: float) -> None:
        """Lower an option on a line from `value` to 0 at the end of the run."""
        self._schedules[name] = Ramp(value, 0.0)
        self._annealed = True

    def first(self, name: str, otherwise: float) -> float:
        """Return the value of an option at the beginning of a run, or `otherwise` where it does not change."""
        return self._schedules[name].at(0, None) if name in self._schedules else otherwise

    def apply(self, module: LightningModule, clock: RunClock, optimizers: Sequence[Optimizer]) -> dict[str, float]:
        """Set the options that change to what their schedules say, and return them.

        Args:
            module: The algorithm.
            clock: Where the run is.
            optimizers: Whose learning rates are set: that of the policy, and of the critic if it has its own.
        """
        values = {name: x.at(clock.env_steps, clock.planned_env_steps) for name, x in self._schedules.items()}
        for name, value in values.items():
            setattr(self._owners.get(name, module), name, value)
        for name, optimizer in zip(RATES, optimizers, strict=False):
            if name in values:
                set_learning_rate(optimizer, values[name])
        return values

    def attributes(self, module: LightningModule) -> Iterator[tuple[object, str]]:
        """Yield owner and name of each attribute that changes over the run, but for learning rates."""
        yield from ((self._owners.get(name, module), name) for name in self._schedules if name not in RATES)

    def check_end(self, module: Any, has_end: bool, expected: str) -> None:  # noqa: ANN401 - an algorithm
        """Raise unless there is an end for the schedules that go to the end.

        Raises:
            ConfigurationError: There is none; names the first of them.
        """
        for name, schedule in self._schedules.items():
            option = "optimizer.anneal" if self._annealed and name in RATES else self._options[name]
            check(has_end or not schedule.over_run, option, module.options[option], expected)

    def report_new_end(self, env_steps: int, planned: int | None, before: int | None) -> None:
        """Say that a resumed run ends elsewhere than it would have, if that moves schedules."""
        names = [name for name, schedule in self._schedules.items() if schedule.over_run]
        if not names or before in (None, planned) or env_steps >= (planned or 0):
            return
        if self._annealed:
            rank_zero_info(
                f"Resuming with a learning rate that reaches 0 at {planned} environment steps (before: {before}): it "
                f"goes on from {env_steps} of them on the new line"
            )
        if options := {self._options[name]: 1 for name in names if not (self._annealed and name in RATES)}:
            rank_zero_info(
                f"Resuming with schedules that end at {planned} environment steps (before: {before}), of "
                f"{', '.join(options)}: they go on from {env_steps} of them as if that had been planned from the start"
            )

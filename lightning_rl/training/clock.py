"""The clock of a run in environment steps, its planned end, and the options that follow a schedule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info  # type: ignore[attr-defined]
from torch.optim import Optimizer

from lightning_rl.distributed import all_reduce
from lightning_rl.rollouts.rollout import Rollout
from lightning_rl.training.optimizers import set_learning_rate
from lightning_rl.training.schedules import Schedule, Scheduled, parse_schedule
from lightning_rl.validation import check


def env_steps_of(module: LightningModule) -> int:
    """Return the number of environment steps of all ranks that an algorithm has learned from."""
    return int(module.env_steps)  # type: ignore[arg-type]


def planned_env_steps(trainer: Trainer) -> int | None:
    """Return the number of environment steps at which `trainer` will stop, or None without a limit.

    This is the minimum of `max_env_steps` of all callbacks and of the steps of `max_epochs`; known during training.
    """
    limits, size = _limits(trainer), epoch_size(trainer)
    if size is not None and trainer.max_epochs not in (None, -1):
        clock: RunClock | None = getattr(trainer.lightning_module, "clock", None)
        before = 0 if clock is None else clock.before_epochs(trainer, size)
        limits.append(before + trainer.max_epochs * size[0] * size[1])
    return min(limits, default=None)


def epoch_size(trainer: Trainer) -> tuple[int, int] | None:
    """Return the rollouts of an epoch, and the environment steps of a rollout on all ranks; None if unknown."""
    shape = getattr(trainer.datamodule, "rollout_shape", None)  # type: ignore[attr-defined]
    rollouts = trainer.num_training_batches
    if shape is None or not math.isfinite(rollouts):
        return None
    return int(rollouts), shape[0] * shape[1] * trainer.world_size


def is_bounded(trainer: Trainer) -> bool:
    """Whether `max_env_steps` or `max_epochs` ends the run."""
    return bool(_limits(trainer)) or trainer.max_epochs not in (None, -1)


def _limits(trainer: Trainer) -> list[int]:
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return [limit for callback in callbacks if (limit := getattr(callback, "max_env_steps", None)) is not None]


def validates_now(trainer: Trainer) -> bool:
    """Whether `trainer` validates after the callbacks of the current batch."""
    loop: Any = trainer.fit_loop.epoch_loop
    # Private in Lightning 2.6, because a copy of its rules would diverge. The argument, the data fetcher, matters only
    # if `training_step` takes the loader's iterator.
    return bool(trainer.enable_validation and loop._should_check_val_fx(None))


def ends_epoch(trainer: Trainer) -> bool:
    """Whether the current batch is the last of its epoch."""
    return bool(trainer.fit_loop.epoch_loop.batch_progress.is_last_batch)


class RunClock:
    """Counters of a run.

    Attributes:
        env_steps: Environment steps of all ranks that were learned from.
        frames: Simulation steps in them; more than `env_steps` with action repeat.
        policy_version: Number of rollouts that were learned from.
        env_steps_before_epochs: Environment steps, less the steps of the epochs that the Trainer counts: above 0 after
            an earlier run that `ckpt_path` does not resume, below 0 after epochs that were stopped early.
        epoch_size: Size of an epoch, as `epoch_size` returns it. None: unknown, or a new run.
        planned_env_steps: Environment steps at the end of the run. None: unknown.
    """

    def __init__(self) -> None:
        self.env_steps = self.frames = self.policy_version = self.env_steps_before_epochs = 0
        self.epoch_size: tuple[int, int] | None = None
        self.planned_env_steps: int | None = None

    def start(self, trainer: Trainer, planned_before: int | None) -> None:
        """Set the size of epochs and the planned end when training starts; `planned_before` is of the resumed run."""
        if planned_env_steps(trainer) != planned_before:  # an epoch may have been stopped early
            self.epoch_size = None
        if (size := epoch_size(trainer)) is not None:
            self.env_steps_before_epochs = self.before_epochs(trainer, size)
        self.epoch_size = size
        self.planned_env_steps = planned_env_steps(trainer)

    def before_epochs(self, trainer: Trainer, size: tuple[int, int]) -> int:
        """Return `env_steps_before_epochs`; computed for a new run, another size of epochs, or another planned end."""
        if self.epoch_size == size:
            return self.env_steps_before_epochs
        rollouts, steps = size
        epochs: Any = trainer.fit_loop.epoch_progress.current
        done = int(epochs.completed) * rollouts
        if trainer.fit_loop.restarting and epochs.started > epochs.completed:
            begun = trainer.fit_loop.epoch_loop.batch_progress.current.ready
            done += begun if begun < rollouts else 0  # Lightning repeats an epoch that has fewer rollouts now
        return self.env_steps - done * steps

    def lag(self, rollout: Rollout, may_lag: bool) -> int:
        """Return how many versions the policy of a rollout is older than the current policy.

        Raises a `RuntimeError` if the rollout is newer, or older without `may_lag`.
        """
        lag = self.policy_version - rollout.policy_version
        if lag < 0 or (lag and not may_lag):
            raise RuntimeError(
                f"the rollout was collected with version {rollout.policy_version} of the policy, not with version "
                f"{self.policy_version}: the train loader must have a length, or Lightning prefetches a batch"
            )
        return lag

    def advance(self, rollout: Rollout, device: torch.device) -> None:
        """Count the steps of a rollout on all ranks; a collective call."""
        frames = rollout.num_steps if rollout.frames is None else rollout.frames
        counts: list[int] = all_reduce(torch.tensor([rollout.num_steps, frames], device=device)).tolist()
        self.env_steps, self.frames = self.env_steps + counts[0], self.frames + counts[1]


RATES = ("learning_rate", "critic_learning_rate")


class _Entry(NamedTuple):
    schedule: Schedule
    option: str
    owner: object


class ScheduledOptions:
    """Sets the attributes of an algorithm that follow a schedule."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}

    def add(
        self, name: str, value: Scheduled, owner: object, option: str | None = None, **bounds: float | None
    ) -> float:
        """Add the attribute `name` of `owner`, and return its initial value (`parse_schedule`)."""
        option = option or name
        schedule = parse_schedule(option, value, **bounds)
        if schedule.varies:
            self._entries[name] = _Entry(schedule, option, owner)
        return schedule.at(0, None)

    def first(self, name: str, otherwise: float) -> float:
        """Return the first value of an attribute, or `otherwise` if it has no schedule."""
        return self._entries[name].schedule.at(0, None) if name in self._entries else otherwise

    def apply(self, clock: RunClock, optimizers: Sequence[Optimizer]) -> dict[str, float]:
        """Set all scheduled attributes and learning rates for the current environment step, and return the values."""
        values = {}
        for name, (schedule, _, owner) in self._entries.items():
            values[name] = schedule.at(clock.env_steps, clock.planned_env_steps)
            setattr(owner, name, values[name])
        for name, optimizer in zip(RATES, optimizers, strict=False):
            if name in values:
                set_learning_rate(optimizer, values[name])
        return values

    def attributes(self) -> list[tuple[object, str]]:
        """Return owner and name of each scheduled attribute, except learning rates."""
        return [(entry.owner, name) for name, entry in self._entries.items() if name not in RATES]

    def check_end(self, module: Any, has_end: bool, expected: str) -> None:  # an algorithm
        """Check that the run has an end, if a schedule ends with the run."""
        for schedule, option, _ in self._entries.values():
            check(has_end or not schedule.over_run, option, module.options.get(option, schedule), expected)

    def report_new_end(self, env_steps: int, planned: int | None, before: int | None) -> None:
        """Log that the planned end of a resumed run has changed, if a schedule ends with the run."""
        options = sorted({option for schedule, option, _ in self._entries.values() if schedule.over_run})
        if options and before not in (None, planned) and env_steps < (planned or 0):
            rank_zero_info(
                f"Resuming with schedules that end at {planned} environment steps (before: {before}): "
                f"{', '.join(options)}; from step {env_steps} they continue as if this end had always been planned"
            )

"""The clock of a run is the environment step; this module knows how long a run is planned to be."""

from __future__ import annotations

import math
from typing import Any

from lightning.pytorch import Trainer


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
        before = getattr(trainer.lightning_module, "env_steps_before_epochs", 0)
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
    loop: Any = trainer.fit_loop
    return bool(trainer.enable_validation and loop.epoch_loop._should_check_val_fx(loop._data_fetcher))


def ends_epoch(trainer: Trainer) -> bool:
    """Whether the present batch is the last one of its epoch."""
    return bool(trainer.fit_loop.epoch_loop.batch_progress.is_last_batch)

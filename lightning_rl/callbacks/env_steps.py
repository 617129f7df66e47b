"""Limits, validation and checkpoints by environment steps."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_warn  # type: ignore[attr-defined]
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor

from lightning_rl.training.clock import ends_epoch, env_steps_of, validates_now
from lightning_rl.validation import check, check_positive_int, is_int, make_folder, whole_number


class EnvStepInterval(Callback):
    """Base of callbacks that act after a number of environment steps since they last acted.

    With an interval of 10 and rollouts that end at steps 3, 9, 10, 14, 25, 29, 34 and 35, the callback acts at 10, 25
    and 35. (`EnvStepValidation` and `EnvStepCheckpoint` act at multiples of the interval instead, so that runs with
    different rollout lengths act near the same steps.) A subclass overrides `on_interval`. Checkpoints hold the step of
    the last action.

    Args:
        every_n_env_steps: Environment steps of all ranks between actions; 0 or less disables the callback.
    """

    def __init__(self, every_n_env_steps: int) -> None:
        check(is_int(every_n_env_steps), "every_n_env_steps", every_n_env_steps, "an integer")
        self.every_n_env_steps = every_n_env_steps
        self._last: int | None = None

    def on_interval(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Act; called on every rank, after the updates from a rollout."""
        raise NotImplementedError(f"{type(self).__name__} has no on_interval")

    def fire(self, trainer: Trainer, pl_module: LightningModule, force: bool = False) -> bool:
        """Act if the interval is over, or once at any step with `force`; return whether it was over."""
        now, last = env_steps_of(pl_module), self._last or 0
        due = now >= last + self.every_n_env_steps or (force and now != last)
        if self.every_n_env_steps <= 0 or not due:
            return False
        self._last = now
        self.on_interval(trainer, pl_module)
        return True

    @property
    def state_key(self) -> str:
        return f"{type(self).__qualname__}{{'every_n_env_steps': {self.every_n_env_steps}}}"

    def state_dict(self) -> dict[str, Any]:
        return {"last": self._last}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._last = state_dict["last"]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        now = env_steps_of(pl_module)
        if self._last is None or self._last > now:
            self._last = now

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int
    ) -> None:
        self.fire(trainer, pl_module)


class EnvStepWriter(EnvStepInterval):
    """Base of intervals after which the first rank writes files, also at the end of a run; it overrides `write`."""

    subfolder = ""  # of the folder of the logger or, without one, of the Trainer

    def __init__(self, every_n_env_steps: int, dirpath: str | Path | None) -> None:
        check_positive_int("every_n_env_steps", every_n_env_steps)
        super().__init__(every_n_env_steps)
        self.dirpath = dirpath

    @property
    def state_key(self) -> str:
        return f"{super().state_key}{self.dirpath or ''}"  # two callbacks may write into two folders

    def write(self, folder: Path, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the files of the current environment step into a folder; called on the first rank."""
        raise NotImplementedError

    def check_folder(self, trainer: Trainer) -> None:
        """Raise a `ConfigurationError` if the folder cannot be written, or another such callback writes there too."""
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        folders = [str(callback.dirpath) for callback in callbacks if type(callback) is type(self)]
        expected = f"a folder of its own for each {type(self).__name__}"
        check(folders.count(str(self.dirpath)) == 1, "dirpath", self.dirpath, expected)
        if self.dirpath is not None:
            make_folder("dirpath", self.dirpath)

    def on_interval(self, trainer: Trainer, pl_module: LightningModule) -> None:
        folder = Path(trainer.log_dir or trainer.default_root_dir)  # `log_dir` is a collective call
        if trainer.is_global_zero and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            if (logger := trainer.logger) is not None and logger.log_dir is None:
                # Runs of W&B or MLflow share the folder of the logger; `ModelCheckpoint` uses the same subfolders.
                folder = folder / str(logger.name) / str(logger.version)
            self.write(folder / self.subfolder if self.dirpath is None else Path(self.dirpath), trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.fire(trainer, pl_module, force=True)


class EnvStepLimit(Callback):
    """Stop training with the first rollout that reaches a number of environment steps.

    Schedules and progress bars read the limit from this callback. The epoch ends early, and is validated like others.

    Args:
        max_env_steps: Environment steps of all ranks, an integer or a float such as 1e5.
    """

    def __init__(self, max_env_steps: int | float) -> None:
        self.max_env_steps = int(check_positive_int("max_env_steps", whole_number(max_env_steps)))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._stop_if_reached(trainer, pl_module):
            rank_zero_warn(
                f"max_env_steps={self.max_env_steps} was reached before: the run is at "
                f"{env_steps_of(pl_module)} environment steps, and nothing is trained. Raise the limit to continue."
            )

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int
    ) -> None:
        self._stop_if_reached(trainer, pl_module)

    def _stop_if_reached(self, trainer: Trainer, pl_module: LightningModule) -> bool:
        reached = env_steps_of(pl_module) >= self.max_env_steps
        trainer.should_stop = trainer.should_stop or reached
        return reached


class EnvStepValidation(Callback):
    """Validate with the first rollout that reaches each multiple of a number of environment steps.

    Replaces the Trainer's `val_check_interval`, which counts rollouts. `ModelCheckpoint` and `EarlyStopping` read the
    validation metrics after each of these validations.

    Args:
        every_n_env_steps: Environment steps of all ranks between validations.
    """

    def __init__(self, every_n_env_steps: int) -> None:
        check_positive_int("every_n_env_steps", every_n_env_steps)
        self.every_n_env_steps = every_n_env_steps
        self._last = 0
        self._replaced: Any = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            epochs = trainer.check_val_every_n_epoch
            check(epochs in (None, 1), "check_val_every_n_epoch", epochs, "1 or None with EnvStepValidation")
            by_number = hasattr(trainer, "val_check_interval")
            check(by_number, "val_check_interval", "a time", "a number with EnvStepValidation, which replaces it")
            # With 1.0, Lightning's callbacks would wait for the end of an epoch instead of a validation.
            self._replaced, trainer.val_check_interval = trainer.val_check_interval, 0.5

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._replaced is not None:
            trainer.val_check_interval, self._replaced = self._replaced, None

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "fit")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last = env_steps_of(pl_module) // self.every_n_env_steps
        for callback in trainer.early_stopping_callbacks:
            # Private to Lightning 2.6; its `setup`, which sets it, may come before the `setup` of this callback.
            if callback.monitor.startswith("val/"):
                callback._check_on_train_epoch_end = False

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int
    ) -> None:
        """Make the Trainer validate after this batch, or not before the next one."""
        now = env_steps_of(pl_module) // self.every_n_env_steps
        # The Trainer validates if val_check_batch divides the number of batches done in this epoch.
        done = trainer.fit_loop.total_batch_idx if trainer.check_val_every_n_epoch is None else batch_idx
        trainer.val_check_batch = done + 1 if now > self._last else done + 2
        self._last = now


class EnvStepCheckpoint(ModelCheckpoint):
    """Save a checkpoint with the first rollout that reaches each multiple of a number of environment steps.

    Args:
        every_n_env_steps: Environment steps of all ranks between checkpoints.
        dirpath: Folder; by default `checkpoints` in the folder of the logger; on the command line, in the run folder.
        filename: As in `ModelCheckpoint`; `{step}` is the number of environment steps.
        monitor: Logged value by which the best are kept (`val/...`: after the next validation). None keeps the newest.
        mode: Whether the largest (`max`) or the smallest (`min`) value is the best.
        save_top_k: Number of checkpoints to keep; -1 keeps all.
        save_last: Save a `last.ckpt` beside each checkpoint that is kept.
        save_weights_only: Save the weights alone; no run can resume from them.
    """

    def __init__(
        self,
        every_n_env_steps: int,
        dirpath: str | Path | None = None,
        filename: str = "{step}",
        monitor: str | None = None,
        mode: Literal["min", "max"] = "max",
        save_top_k: int = -1,
        save_last: bool | None = None,
        save_weights_only: bool = False,
    ) -> None:
        check_positive_int("every_n_env_steps", every_n_env_steps)
        expected = "False with save_weights_only, since a run is resumed from last.ckpt"
        check(not (save_last and save_weights_only), "save_last", save_last, expected)
        if monitor is None and save_top_k > 1:
            # Lightning keeps more than one checkpoint only by a monitored value; the step keeps the newest.
            monitor, mode = "step", "max"
        super().__init__(
            dirpath,
            filename,
            monitor,
            mode=mode,
            save_top_k=save_top_k,
            save_last=save_last,
            save_weights_only=save_weights_only,
            save_on_train_epoch_end=False,
        )
        self.every_n_env_steps = every_n_env_steps
        self._last = 0
        self._due = False
        self._validated_at: int | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit" and not env_steps_of(pl_module):  # an earlier run may have left a checkpoint due
            self._due, self._validated_at = False, None

    @property
    def state_key(self) -> str:
        # No folder, which may be moved before the run resumes.
        names = ("monitor", "mode", "every_n_env_steps", "filename")
        options = {name: getattr(self, name) for name in names}
        return f"{type(self).__qualname__}{options}"

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"due": self._due}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._due = state_dict["due"]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last = env_steps_of(pl_module) // self.every_n_env_steps

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int
    ) -> None:
        now = env_steps_of(pl_module) // self.every_n_env_steps
        self._due, self._last = self._due or now > self._last, now
        if not (validates_now(trainer) or ends_epoch(trainer)):
            self._save_if_due(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validated_at = env_steps_of(pl_module)
        if not ends_epoch(trainer):
            self._save_if_due(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._save_if_due(trainer)

    def _save_if_due(self, trainer: Trainer) -> None:
        if not self._due:
            return
        module: Any = trainer.lightning_module
        monitor = self.monitor or ""
        if monitor.startswith("val/"):
            if self._validated_at != env_steps_of(module):
                return
        elif monitor:
            module.metrics.show_unlogged(trainer)  # the score of these rollouts, not of those before the last log
        if monitor.startswith("rollout/"):
            score = trainer.callback_metrics.get(monitor)
            if score is None or score.isnan():  # no episode has ended
                return
        # Private to Lightning 2.6, which would not save again before the next gradient step.
        self._due, self._last_global_step_saved = False, -1
        super().on_validation_end(trainer, module)

    def _monitor_candidates(self, trainer: Trainer) -> dict[str, Tensor]:
        # Overrides a private method of Lightning 2.6, which casts "step" to 32 bits.
        clock = {"epoch": trainer.current_epoch, "step": env_steps_of(trainer.lightning_module)}
        return copy.deepcopy(trainer.callback_metrics) | {name: torch.tensor(count) for name, count in clock.items()}

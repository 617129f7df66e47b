"""Callbacks that count in environment steps."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_rl.validation import check_positive_int


def _env_steps(module: LightningModule) -> int:
    return int(module.env_steps)  # type: ignore[arg-type]


class EnvStepLimit(Callback):
    """Stop training with the first rollout that reaches a number of environment steps.

    A callback rather than an option of the data: when to stop is the Trainer's business, and the same data serve runs of
    any length. Schedules and progress bars read the limit from here.

    Args:
        max_env_steps: Environment steps of all ranks.
    """

    def __init__(self, max_env_steps: int) -> None:
        check_positive_int("max_env_steps", max_env_steps)
        self.max_env_steps = max_env_steps

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Train no further where a resumed run has reached the limit already."""
        self._stop_if_reached(trainer, pl_module)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,  # noqa: ANN401
    ) -> None:
        """Look at the clock after each rollout."""
        self._stop_if_reached(trainer, pl_module)

    def _stop_if_reached(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if _env_steps(pl_module) >= self.max_env_steps:
            trainer.should_stop = True


class EnvStepValidation(Callback):
    """Validate with the first rollout that reaches each multiple of a number of environment steps.

    In place of the Trainer's `val_check_interval`, which counts rollouts.

    Args:
        every_n_env_steps: Environment steps of all ranks between validations.
    """

    def __init__(self, every_n_env_steps: int) -> None:
        check_positive_int("every_n_env_steps", every_n_env_steps)
        self.every_n_env_steps = every_n_env_steps
        self._last = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take over the Trainer's validation interval."""
        trainer.val_check_batch = float("inf")
        self._last = _env_steps(pl_module) // self.every_n_env_steps

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,  # noqa: ANN401
    ) -> None:
        """Ask the Trainer to validate after this very batch, or not before the next one."""
        now = _env_steps(pl_module) // self.every_n_env_steps
        # The Trainer validates where val_check_batch divides the number of batches done in this epoch.
        done = trainer.fit_loop.total_batch_idx if trainer.check_val_every_n_epoch is None else batch_idx
        trainer.val_check_batch = done + 1 if now > self._last else done + 2
        self._last = now


class EnvStepCheckpoint(ModelCheckpoint):
    """Save a checkpoint with the first rollout that reaches each multiple of a number of environment steps.

    Args:
        every_n_env_steps: Environment steps of all ranks between checkpoints.
        **kwargs: Those of `ModelCheckpoint`; without `save_top_k` or `monitor` every checkpoint is kept.
    """

    def __init__(self, every_n_env_steps: int, **kwargs: Any) -> None:  # noqa: ANN401
        check_positive_int("every_n_env_steps", every_n_env_steps)
        kwargs.setdefault("save_top_k", -1)
        kwargs.setdefault("filename", "{step}")
        super().__init__(save_on_train_epoch_end=False, **kwargs)
        self.every_n_env_steps = every_n_env_steps
        self._last = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin counting."""
        super().on_train_start(trainer, pl_module)
        self._last = _env_steps(pl_module) // self.every_n_env_steps

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,  # noqa: ANN401
    ) -> None:
        """Save where an interval is complete."""
        now = _env_steps(pl_module) // self.every_n_env_steps
        if now > self._last:
            candidates = self._monitor_candidates(trainer)
            self._save_topk_checkpoint(trainer, candidates)
            self._save_last_checkpoint(trainer, candidates)
        self._last = now

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Do not save: only environment steps count."""

"""Checkpoint files that are written whole or not at all, and clear errors when a disk is full."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.utilities.rank_zero import rank_zero_only  # type: ignore[attr-defined]
from lightning.pytorch.utilities.types import STEP_OUTPUT

from lightning_rl.checkpointing.format import CHECKPOINT_KEY, check_format
from lightning_rl.distributed import gather_ranks
from lightning_rl.files import WriteFailure, read_data, save_file, when_closed
from lightning_rl.training.clock import ends_epoch, validates_now
from lightning_rl.validation import ConfigurationError, ExplainedError, check

if TYPE_CHECKING:  # importing TensorBoard is slow
    from torch.utils.tensorboard import FileWriter


class CheckpointFailure(ExplainedError):
    """A checkpoint could not be written; an earlier file of the same name is unchanged."""


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes checkpoints atomically, and checks and reads them without unpickling.

    A checkpoint is written to a temporary file in its own folder, flushed to disk, and renamed. A process that is
    killed therefore leaves the earlier checkpoint or the new one, never a part of a file. (Lightning writes to the
    system's temporary folder, and copies from there if that is on another disk.)
    """

    def load_checkpoint(
        self, path: str | Path, map_location: object = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint whose checksums match; nothing is unpickled unless `weights_only` is False."""
        checkpoint = read_data(path, map_location, weights_only)
        check_format(checkpoint, f"ckpt_path={str(path)!r}")  # before Lightning reads its own entries
        return checkpoint

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: object = None) -> None:
        if "pytorch-lightning_version" in checkpoint and CHECKPOINT_KEY not in checkpoint:
            raise ConfigurationError("on_save_checkpoint of the model does not call super(), which stores the run")
        if storage_options is not None or "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        try:
            save_file(checkpoint, path)
        except WriteFailure as error:
            raise CheckpointFailure(
                f"checkpoint {error}; earlier checkpoints are unchanged. Free some space or choose another folder, "
                "then resume"
            ) from error.__cause__

    def remove_checkpoint(self, path: str | Path) -> None:
        when_closed(super().remove_checkpoint, path)


class LastCheckpoint(ModelCheckpoint):
    """Saves `last.ckpt` at the end of every epoch, so that interrupted runs can be resumed.

    (`ModelCheckpoint(monitor=..., save_last=True)` writes its `last.ckpt` only when it saves one of the best.)
    `InterruptionGuard` saves it once more when a signal stops the run.

    Args:
        dirpath: Folder; by default `checkpoints` in the folder of the logger; on the command line, in the run folder.
        train_time_interval: Also save within an epoch, after the first rollout that ends this long after the last save.
            Rollouts that are followed by a validation are excluded, since a run that resumes there would skip the
            validation. None saves only at the end of epochs.
    """

    def __init__(self, dirpath: str | Path | None = None, train_time_interval: timedelta | None = None) -> None:
        super().__init__(dirpath, "last", save_on_train_epoch_end=True, enable_version_counter=False)
        valid = train_time_interval is None or train_time_interval > timedelta()
        check(valid, "train_time_interval", train_time_interval, "a time above 0")
        self.train_time_interval = train_time_interval
        self._saved_at = time.monotonic()

    def save(self, trainer: Trainer) -> None:
        """Save now; call it between two rollouts, on all ranks."""
        self.on_train_epoch_end(trainer, trainer.lightning_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_epoch_end(trainer, pl_module)
        self._saved_at = time.monotonic()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int
    ) -> None:
        """Save if the interval is over, after the same rollout on all ranks."""
        # Private to Lightning 2.6, which would not save again before the next gradient step.
        self._last_global_step_saved = -1
        if self.train_time_interval is None or validates_now(trainer) or ends_epoch(trainer):
            return
        waited = time.monotonic() - self._saved_at
        if gather_ranks(waited >= self.train_time_interval.total_seconds())[0]:
            self.save(trainer)


class LogFailure(ExplainedError):
    """A log could not be written."""


def event_files(logger: TensorBoardLogger) -> FileWriter:
    """Return the writer of a logger's event files; open it again if an earlier run closed it."""
    experiment: Any = logger.experiment
    if experiment.file_writer is None:
        from torch.utils.tensorboard import FileWriter

        options = experiment.max_queue, experiment.flush_secs, experiment.filename_suffix
        experiment.file_writer = FileWriter(experiment.log_dir, *options)
        experiment.all_writers = {experiment.log_dir: experiment.file_writer}
    writer: FileWriter = experiment.file_writer
    return writer


@rank_zero_only
def report_log_failures(trainer: Trainer) -> None:
    """Make each `TensorBoardLogger` of a Trainer raise one `LogFailure` if its events cannot be written.

    TensorBoard writes in a thread. Otherwise its error is printed there, and raised again by every later call of the
    logger, which turns some of them into misleading errors.
    """
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            writer = event_files(logger)
            if not isinstance(writer.event_writer, _EventWriter):
                writer.event_writer = _EventWriter(writer.event_writer)
            if not isinstance(threading.excepthook, _ThreadErrors):
                threading.excepthook = _ThreadErrors(threading.excepthook)


class _ThreadErrors:
    """A `threading.excepthook` that prints no errors of TensorBoard's threads, which `_EventWriter` raises."""

    def __init__(self, default: Callable[[threading.ExceptHookArgs], object]) -> None:
        self._default = default

    def __call__(self, args: threading.ExceptHookArgs) -> None:
        is_writer = type(args.thread).__module__ == "tensorboard.summary.writer.event_file_writer"
        if not (is_writer and isinstance(args.exc_value, OSError)):
            self._default(args)


class _EventWriter:
    """Wraps TensorBoard's `EventFileWriter`; the first `flush` or `close` after a failed write raises `LogFailure`."""

    def __init__(self, writer: Any) -> None:  # has no types
        self._writer = writer
        self._has_failed = False

    def get_logdir(self) -> str:
        return str(self._writer.get_logdir())

    def add_event(self, event: object) -> None:
        with contextlib.suppress(OSError):  # for which Lightning would blame the value; `flush` raises it again
            self._writer.add_event(event)

    def flush(self) -> None:
        self._call(self._writer.flush)

    def close(self) -> None:
        self._call(self._writer.close)

    def _call(self, method: Callable[[], None]) -> None:
        if self._has_failed:
            return
        try:
            method()
        except OSError as error:
            self._has_failed = True
            path = os.path.join(self.get_logdir(), "events.out.tfevents.*")
            raise LogFailure(
                f"log {path!r} could not be written: {error.strerror or error}. Free some space or choose another "
                "folder, then resume from the last checkpoint"
            ) from error

"""Writes files whole or not at all, and names the file when a disk is full."""

from __future__ import annotations

import glob
import io
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.utilities.rank_zero import rank_zero_only  # type: ignore[attr-defined]

from lightning_rl.files import check_intact, read_data
from lightning_rl.training.clock import ends_epoch, validates_now
from lightning_rl.validation import check

if TYPE_CHECKING:  # the loggers import TensorBoard, which is slow, only where they are used
    from torch.utils.tensorboard import FileWriter

# Ends unlike a checkpoint, and has no part of the name of one: Lightning looks for numbers in names.
_PREFIX, _SUFFIX = ".unfinished-", ".tmp"


class CheckpointFailure(Exception):
    """A checkpoint could not be written: which, and why. The one that it would have replaced is as it was."""


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint beside its place, and moves it there when all of it is on the disk; reads intact ones only.

    Whatever cuts the writing short, at the place of the checkpoint is the earlier one or the new one, and nothing else.
    Lightning's own writes into the folder for temporary files, and copies from there if that is on another disk. What a
    killed process leaves behind is removed by the next that writes into the same folder. Paths that are URLs are left
    to Lightning. A checkpoint is read as data.
    """

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Any = lambda storage, _: storage,  # noqa: ANN401
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Read a checkpoint; unless `weights_only` is False, nothing in it is unpickled.

        Raises:
            DamagedFileError: The file does not match its checksums.
        """
        check_intact(path, "ckpt_path", "an intact checkpoint")
        return read_data(path, map_location, weights_only)

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | Path,
        storage_options: Any | None = None,  # noqa: ANN401
    ) -> None:
        """Write a checkpoint.

        Raises:
            CheckpointFailure: The disk is full, or the folder cannot be written.
        """
        if storage_options is not None or "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        # In memory first: torch hides why a file cannot be written.
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        try:
            _replace(Path(path), buffer.getbuffer())
        except OSError as error:
            kept = "the one before is unchanged" if Path(path).is_file() else "earlier ones are unchanged"
            raise CheckpointFailure(
                f"checkpoint {str(path)!r} could not be written: {error.strerror or error}; {kept}. Make room, or "
                "choose another folder, and go on from there"
            ) from error


def write_atomically(trainer: Trainer) -> None:
    """Have a Trainer use `AtomicCheckpointIO`, unless its strategy or its plugins have a way of their own."""
    if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
        trainer.strategy.checkpoint_io = AtomicCheckpointIO()


def _replace(path: Path, content: memoryview) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_unfinished(path.parent)
    unfinished = path.parent / f"{_PREFIX}{os.getpid()}{_SUFFIX}"
    try:
        with unfinished.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Make a new name survive a power failure, where folders can be opened."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_unfinished(folder: Path) -> None:
    """Remove what processes left behind that are no more."""
    for path in folder.glob(f"{_PREFIX}*{_SUFFIX}"):
        pid = path.name.removeprefix(_PREFIX).removesuffix(_SUFFIX)
        if pid.isdecimal() and not (int(pid) != os.getpid() and _runs(int(pid))):
            path.unlink(missing_ok=True)


def _runs(pid: int) -> bool:
    if os.name != "posix":  # asking would end it
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


class LastCheckpoint(ModelCheckpoint):
    """Keep one checkpoint, `last.ckpt`, from the end of the newest epoch: what an interrupted run goes on from.

    `ModelCheckpoint(monitor=..., save_last=True)` writes its `last.ckpt` only when it saves one of the best. A run that
    a signal stops between two epochs saves it once more; see `InterruptionGuard`.

    Args:
        dirpath: Folder; by default `checkpoints` in that of the logger.
        train_time_interval: Also save within an epoch, after the first rollout that ends this long after the last save.
            A rollout with a validation, or the last one of an epoch, is not saved until these are over, since a
            resumed run would leave them out. None saves at the end of epochs only.
    """

    def __init__(self, dirpath: str | Path | None = None, train_time_interval: timedelta | None = None) -> None:
        super().__init__(dirpath, "last", save_on_train_epoch_end=True, enable_version_counter=False)
        valid = train_time_interval is None or train_time_interval > timedelta()
        check(valid, "train_time_interval", train_time_interval, "a time above 0")
        self.train_time_interval = train_time_interval
        self._saved_at = time.monotonic()

    def save(self, trainer: Trainer) -> None:
        """Save at once, between two rollouts; a collective call."""
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]
            super().on_train_epoch_end(trainer, trainer.lightning_module)
            self._saved_at = time.monotonic()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to measure the time."""
        super().on_train_start(trainer, pl_module)
        self._saved_at = time.monotonic()

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,  # noqa: ANN401
        batch: Any,  # noqa: ANN401
        batch_idx: int,
    ) -> None:
        """Save after a rollout if the interval is over, at the same rollout on every rank."""
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if self.train_time_interval is None or validates_now(trainer) or ends_epoch(trainer):
            return
        waited = time.monotonic() - self._saved_at
        if trainer.strategy.broadcast(waited >= self.train_time_interval.total_seconds()):
            self.save(trainer)


class LogFailure(Exception):
    """A log could not be written: which file, and why."""


def event_files(logger: TensorBoardLogger) -> FileWriter:
    """Return the writer of a logger's events, opened again if an earlier run has closed it."""
    experiment: Any = logger.experiment
    if experiment.file_writer is None:
        from torch.utils.tensorboard import FileWriter

        options = experiment.max_queue, experiment.flush_secs, experiment.filename_suffix
        experiment.file_writer = FileWriter(experiment.log_dir, *options)
        experiment.all_writers = {experiment.log_dir: experiment.file_writer}
    writer: FileWriter = experiment.file_writer
    return writer


@rank_zero_only
def name_event_files(trainer: Trainer) -> None:
    """Make each `TensorBoardLogger` of a Trainer raise `LogFailure` where it would lose what it logs.

    TensorBoard writes in a thread. Its error is printed there, and raised again by every later call of the logger,
    some of which turn it into errors of another kind.
    """
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            writer = event_files(logger)
            if not isinstance(writer.event_writer, _NamingWriter):
                writer.event_writer = _NamingWriter(writer.event_writer)
            if not isinstance(threading.excepthook, _QuietWriters):
                threading.excepthook = _QuietWriters(threading.excepthook)


class _QuietWriters:
    """Handler of exceptions in threads that prints none of TensorBoard's writers: `_NamingWriter` raises them.

    Args:
        others: Handles all other exceptions.
    """

    def __init__(self, others: Callable[[threading.ExceptHookArgs], object]) -> None:
        self._others = others

    def __call__(self, args: threading.ExceptHookArgs) -> None:
        """Handle an exception that has ended a thread."""
        is_writer = type(args.thread).__module__ == "tensorboard.summary.writer.event_file_writer"
        if not (is_writer and isinstance(args.exc_value, OSError)):
            self._others(args)


class _NamingWriter:
    """Writes events to a file until that fails; `flush` or `close` then raises the error, once.

    Args:
        writer: An `EventFileWriter` of TensorBoard.
    """

    def __init__(self, writer: Any) -> None:  # noqa: ANN401 - it has no types
        self._writer, self._folder = writer, writer.get_logdir()
        files = glob.glob(os.path.join(glob.escape(self._folder), f"events.out.tfevents.*.{os.getpid()}.*"))
        self._path = max(files, key=os.path.getmtime, default=self._folder)
        self._error: OSError | None = None
        self._is_raised = False

    def get_logdir(self) -> str:
        """Return the folder of the file."""
        return str(self._folder)

    def add_event(self, event: object) -> None:
        """Hand an event to TensorBoard's thread."""
        self._call(self._writer.add_event, event)

    def flush(self) -> None:
        """Flush the file.

        Raises:
            LogFailure: An event could not be written.
        """
        self._call(self._writer.flush)
        self._raise_once()

    def close(self) -> None:
        """Close the file; raises as `flush` does."""
        self._call(self._writer.close)
        self._raise_once()

    def _call(self, method: Callable[..., None], *args: object) -> None:
        """Call a method of the writer, and keep the first error."""
        try:
            method(*args)
        except OSError as error:
            self._error = self._error or error

    def _raise_once(self) -> None:
        if self._error is not None and not self._is_raised:
            self._is_raised = True
            raise LogFailure(
                f"log {self._path!r} could not be written: {self._error.strerror or self._error}. Make room, or choose "
                "another folder, and go on from the last checkpoint"
            ) from self._error

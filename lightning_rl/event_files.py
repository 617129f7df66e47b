"""TensorBoard's event files on a disk that is full: one error that names the file."""

from __future__ import annotations

import threading
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only  # type: ignore[attr-defined]


class LogFailure(Exception):
    """A log could not be written: which file, and why."""


@rank_zero_only
def name_event_files(trainer: Trainer) -> None:
    """Make each `TensorBoardLogger` of a Trainer raise `LogFailure` where it would lose what it logs.

    TensorBoard writes in a thread: its error is printed there, and raised again by every later call of the logger,
    some of which turn it into errors of another kind.
    """
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            # No public way leads to the file. Checked with torch 2.13 and tensorboard 2.21.
            events = logger.experiment._get_file_writer().event_writer
            asynchronous: Any = events._async_writer
            if not isinstance(asynchronous._writer, _NamingWriter):
                named = _NamingWriter(asynchronous._writer, events._file_name, asynchronous._worker)
                asynchronous._writer = asynchronous._worker._record_writer = named


class _NamingWriter:
    """Writes records to a file until that fails; the error is raised once, in the thread that logs.

    Args:
        writer: A `RecordWriter` of TensorBoard.
        path: Of its file.
        worker: TensorBoard's thread.
    """

    def __init__(self, writer: Any, path: str, worker: threading.Thread) -> None:  # noqa: ANN401 - it has no types
        self._writer, self._path, self._worker = writer, path, worker
        self._error: OSError | None = None
        self._is_raised = False

    def write(self, data: bytes) -> None:
        """Write a record; called in TensorBoard's thread."""
        self._call(self._writer.write, data)

    def flush(self) -> None:
        """Flush the file; called in TensorBoard's thread, and in that which logs.

        Raises:
            LogFailure: A record could not be written.
        """
        self._call(self._writer.flush)
        self._raise_once()

    def close(self) -> None:
        """Close the file; raises as `flush` does."""
        self._call(self._writer.close)
        self._raise_once()

    def _call(self, method: Any, *args: Any) -> None:  # noqa: ANN401
        """Call a method of the file, unless it has failed before."""
        if self._error is None:
            try:
                method(*args)
            except OSError as error:
                self._error = error

    def _raise_once(self) -> None:
        if self._error is not None and not self._is_raised and threading.current_thread() is not self._worker:
            self._is_raised = True
            raise LogFailure(
                f"log {self._path!r} could not be written: {self._error.strerror or self._error}. Make room, or choose "
                "another folder, and go on from the last checkpoint"
            ) from self._error

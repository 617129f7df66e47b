"""Messages of Lightning that say something wrong about training here, or that nobody can act on.

All filters are in this file, each for one message, with the reason beside it. `import lightning_rl` applies the first
list; the others are for the command line, which makes these choices itself.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_WRONG_HERE = (
    # Deprecated by torch 2.13, used by Lightning 2.6: for its authors to mend.
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
    # The logging interval counts rollouts across epochs here, so nothing is lost in a short epoch.
    r"The number of training batches \(\d+\) is smaller than the logging interval",
    # Rollouts are collected, not read: there is no position in a data set to resume from.
    r"You're resuming from a checkpoint that ended before the epoch ended and your dataloader is not resumable",
    # A checkpoint between two rollouts is meant to hold the parameters after the updates.
    r"Using ModelCheckpoint with manual optimization and every_n_train_steps, but no pre-optimization state was saved",
)
_DECIDED_BY_COMMAND_LINE = (
    # A resumed run goes on in its own folder.
    r"Checkpoint directory .* exists and is not empty",
    # One that goes on from an older checkpoint has a new folder, and keeps the best of what it saves there.
    r"The dirpath has changed from",
    # Only where a configuration asks for the CPU.
    r"GPU available but not used",
    # The size that the model summary prints is a rough figure in any case.
    r"Precision .* is not supported by the model summary",
)
_OF_NO_USE_IN_EVALUATION = (
    # Callbacks that stop or save training have nothing to restore when episodes are only played.
    r"Be aware that when using `ckpt_path`, callbacks used to create the checkpoint need to be provided",
)
_ADVERTISEMENT = "\N{ELECTRIC LIGHT BULB} Tip: "
_LOGGED_AGAIN = "Detected out of order event.step"


class _Without(logging.Filter):
    """Drops the messages of a log that begin in a certain way.

    Args:
        beginning: How.
    """

    def __init__(self, beginning: str) -> None:
        super().__init__()
        self._beginning = beginning

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(self._beginning)


_NO_ADVERTISEMENTS = _Without(_ADVERTISEMENT)


def everywhere() -> None:
    """Drop what is wrong about this package, wherever it is used."""
    _ignore(_WRONG_HERE)


def command_line(evaluating: bool = False) -> None:
    """Drop what the command line decides, and advertisements.

    Args:
        evaluating: Whether episodes are only played.
    """
    everywhere()  # again, since the filters may have been changed since the import
    _ignore(_DECIDED_BY_COMMAND_LINE + (_OF_NO_USE_IN_EVALUATION if evaluating else ()))
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addFilter(_NO_ADVERTISEMENTS)  # which is there once, however often it is added


@contextmanager
def reading_events() -> Iterator[None]:
    """Drop, while TensorBoard reads a log, what it says of steps that a resumed run logged again.

    It calls it a purge of expired events; they are replaced by those that came last.
    """
    logger, again = logging.getLogger("tensorboard"), _Without(_LOGGED_AGAIN)
    logger.addFilter(again)
    try:
        yield
    finally:
        logger.removeFilter(again)


def _ignore(messages: tuple[str, ...]) -> None:
    for message in messages:
        warnings.filterwarnings("ignore", message=message)

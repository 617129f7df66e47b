"""Filters for warnings of other libraries that are misleading or not actionable here.

Each filter matches one message, with the reason beside it. The first list applies to every run, from the moment when
the Trainer meets the algorithm; the others apply to the command line only.
"""

from __future__ import annotations

import logging
import warnings

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


class DropMessages(logging.Filter):
    """Drop log messages that start with a text.

    Args:
        start: The text.
    """

    def __init__(self, start: str) -> None:
        super().__init__()
        self._start = start

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the message is kept."""
        return not record.getMessage().startswith(self._start)


_NO_ADVERTISEMENTS = DropMessages(_ADVERTISEMENT)


def filter_misleading_warnings() -> None:
    """Ignore the warnings that are wrong for every run of this package."""
    _ignore(_WRONG_HERE)


def filter_command_line_warnings(evaluating: bool = False) -> None:
    """Ignore warnings about choices that the command line makes itself, and Lightning's tips.

    Args:
        evaluating: Whether the command only plays episodes.
    """
    filter_misleading_warnings()
    _ignore(_DECIDED_BY_COMMAND_LINE + (_OF_NO_USE_IN_EVALUATION if evaluating else ()))
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addFilter(_NO_ADVERTISEMENTS)  # adding the same filter twice has no effect


def _ignore(messages: tuple[str, ...]) -> None:
    for message in messages:
        warnings.filterwarnings("ignore", message=message)

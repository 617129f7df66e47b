"""Filters for warnings of other libraries that are misleading or not actionable here."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable

# Patterns of ignored messages, each with the reason.
_MISLEADING = (
    # Lightning 2.6 uses an API that torch 2.13 deprecates.
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
    # The logging interval counts rollouts across epochs, so short epochs are logged too.
    r"The number of training batches \(\d+\) is smaller than the logging interval",
    # Rollouts are collected, so there is no position in a data set to restore.
    r"You're resuming from a checkpoint that ended before the epoch ended and your dataloader is not resumable",
    # Checkpoints between rollouts should hold the parameters after the updates.
    r"Using ModelCheckpoint with manual optimization and every_n_train_steps, but no pre-optimization state was saved",
    # Scores of an evaluation are over all ranks already.
    r"It is recommended to use `self.log\('((val|test)/episode\w*|step)', \.\.\., sync_dist=True\)`",
    # The model's `configure_model` changes nothing unless `ModelParallelStrategy` shards it.
    r"You're using the WeightAveraging callback with a model that overrides the configure_model",
    # The actor's optimizer takes no step during the warm-up of the critic, but its scheduler counts these rollouts.
    r"Detected call of `lr_scheduler\.step\(\)` before `optimizer\.step\(\)`",
    # What barebones switches off is listed when the Trainer is made.
    r"You are trying to `self\.log\(\)` but `Trainer\(barebones=True\)` is configured",
    # FSDP2: values are views, and no operation changes them in place.
    r"FSDP2-wrapped module .* returned a view tensor",
    # `FlatAdam` moves the weights into its vector; cuDNN's copies of so small a network cost little.
    r"RNN module weights are not part of single contiguous chunk of memory",
)
_COMMAND_LINE = (
    # A resumed run continues in its own folder.
    r"Checkpoint directory .* exists and is not empty",
    # A run that resumes from an older checkpoint has a new folder, and tracks the best checkpoint there.
    r"The dirpath has changed from",
    # The configuration selects the CPU.
    r"GPU available but not used",
    # The size in the model summary is approximate anyway.
    r"Precision .* is not supported by the model summary",
)
_EVALUATION = (
    # Callbacks of training have nothing to restore in an evaluation.
    r"Be aware that when using `ckpt_path`, callbacks used to create the checkpoint need to be provided",
)


def drop_messages(start: str) -> Callable[[logging.LogRecord], bool]:
    """Return a filter for `Logger.addFilter` that drops messages with the prefix `start`."""
    return lambda record: not record.getMessage().startswith(start)


_NO_TIPS = drop_messages("\N{ELECTRIC LIGHT BULB} Tip: ")


def filter_misleading_warnings() -> None:
    """Ignore the warnings that mislead in every run."""
    _ignore(_MISLEADING)


def filter_command_line_warnings(evaluating: bool = False) -> None:
    """Ignore warnings about choices of the command line, and the tips of Lightning; `evaluating` ignores more."""
    filter_misleading_warnings()
    _ignore(_COMMAND_LINE + (_EVALUATION if evaluating else ()))
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addFilter(_NO_TIPS)  # adding the same filter twice has no effect


def _ignore(messages: tuple[str, ...]) -> None:
    for message in messages:
        warnings.filterwarnings("ignore", message=message)

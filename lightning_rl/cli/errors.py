"""Errors of the command line: one message in place of a traceback."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_rl.checkpointing.atomic import CheckpointFailure, LogFailure
from lightning_rl.distributed import RankFailure, causes
from lightning_rl.environments import EnvironmentFailure
from lightning_rl.tools.export import RoundTripError
from lightning_rl.validation import ConfigurationError

DEBUG = "LIGHTNING_RL_DEBUG"
"""Environment variable that has errors shown with their whole traceback."""
_EXPECTED = (
    CheckpointFailure,
    ConfigurationError,
    EnvironmentFailure,
    FloatingPointError,
    LogFailure,
    MisconfigurationException,
    RankFailure,
    RoundTripError,
)
# Of the folder of a logger, a figure, an export. Where a file is not there, the traceback says who looked for it.
_NOT_USABLE = (PermissionError, NotADirectoryError, FileExistsError)


def error_message(error: BaseException) -> str | None:
    """Return the message of an error, None where only a traceback would help.

    The parser wraps what a class raises when it is made; the cause of the error says more.
    """
    for cause in causes(error):
        if isinstance(cause, _EXPECTED):
            return str(cause) + (_place(cause) if isinstance(cause, EnvironmentFailure) else "")
    if isinstance(error, _NOT_USABLE) and error.filename is not None:
        return f"{error.strerror}: {str(error.filename)!r}"
    return None


def end_with_message(error: BaseException) -> None:
    """End the process with one message and status 1; return where only a traceback would help, or one is wanted."""
    if not os.environ.get(DEBUG) and (message := error_message(error)) is not None:
        print(f"lightning-rl: error: {message}", file=sys.stderr, flush=True)
        raise SystemExit(1) from None


def _place(failure: EnvironmentFailure) -> str:
    """Return the line of an environment that raised, in this process or in a worker: the traceback is not shown."""
    text = "" if failure.__cause__ is None else "".join(traceback.format_tb(failure.__cause__.__traceback__))
    # The first traceback that a worker reports is that of the environment.
    text = text or "".join(getattr(failure, "__notes__", [])).partition("\nThe above exception was")[0]
    frames = [line for line in text.splitlines() if line.startswith('  File "')]
    own = str(Path(__file__).parents[1])  # what found out that a worker is gone
    return f"\n{frames[-1]}" if frames and own not in frames[-1] else ""

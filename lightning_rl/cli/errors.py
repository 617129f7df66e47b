"""Errors of the command line: one message in place of a traceback."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_rl.distributed import causes
from lightning_rl.environments import EnvironmentFailure
from lightning_rl.validation import ExplainedError

DEBUG = "LIGHTNING_RL_DEBUG"
"""Environment variable that shows errors with their whole traceback."""
_EXPLAINED = (ExplainedError, FloatingPointError, MisconfigurationException)
# Raised for the folder of a logger, a figure or an export. A missing file needs the traceback, which says who reads it.
_NOT_USABLE = (PermissionError, NotADirectoryError, FileExistsError)


def error_message(error: BaseException) -> str | None:
    """Return the message of an error; None if the user needs the traceback.

    The parser wraps the errors of constructors, so the causes of an error are searched too.
    """
    for cause in causes(error):
        if isinstance(cause, _EXPLAINED):
            return str(cause) + (_place(cause) if isinstance(cause, EnvironmentFailure) else "")
    if isinstance(error, _NOT_USABLE) and error.filename is not None:
        return f"{error.strerror}: {str(error.filename)!r}"
    return None


def end_with_message(error: BaseException) -> None:
    """End the process with one message and status 1; return if the user needs the traceback, or asked for it."""
    if not os.environ.get(DEBUG) and (message := error_message(error)) is not None:
        print(f"lightning-rl: error: {message}", file=sys.stderr, flush=True)
        raise SystemExit(1) from None


def _place(failure: EnvironmentFailure) -> str:
    """Return the line in which an environment raised, in this process or in a worker process."""
    text = "" if failure.__cause__ is None else "".join(traceback.format_tb(failure.__cause__.__traceback__))
    # A worker reports the traceback of the environment first.
    text = text or "".join(getattr(failure, "__notes__", [])).partition("\nThe above exception was")[0]
    frames = [line for line in text.splitlines() if line.startswith('  File "')]
    own = str(Path(__file__).parents[1])  # a frame of this package has found that a worker is gone
    return f"\n{frames[-1]}" if frames and own not in frames[-1] else ""

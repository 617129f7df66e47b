"""Errors of the command line: one message in place of a traceback."""

from __future__ import annotations

import os
import shlex
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_rl.checkpointing.atomic import CheckpointFailure, LogFailure
from lightning_rl.distributed import RankFailure, causes
from lightning_rl.environments import EnvironmentFailure
from lightning_rl.tools.export import RoundTripError
from lightning_rl.validation import ConfigurationError

DEBUG = "LIGHTNING_RL_DEBUG"
"""Environment variable that shows errors with their whole traceback."""
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
# Raised for the folder of a logger, a figure or an export. A missing file needs the traceback, which says who reads it.
_NOT_USABLE = (PermissionError, NotADirectoryError, FileExistsError)


def error_message(error: BaseException) -> str | None:
    """Return the message of an error; None if the user needs the traceback.

    The parser wraps the errors of constructors, so the causes of an error are searched too.
    """
    for cause in causes(error):
        if isinstance(cause, _EXPECTED):
            return str(cause) + (_place(cause) if isinstance(cause, EnvironmentFailure) else "")
    if isinstance(error, _NOT_USABLE) and error.filename is not None:
        return f"{error.strerror}: {str(error.filename)!r}"
    return None


def end_with_message(error: BaseException, arguments: Sequence[str]) -> None:
    """End the process with one message and status 1; return if the user needs the traceback, or asked for it."""
    if not os.environ.get(DEBUG) and (message := error_message(error)) is not None:
        lines = [f"lightning-rl: error: {message}", *missing_module(error, arguments)]
        print("\n".join(lines), file=sys.stderr, flush=True)
        raise SystemExit(1) from None


def missing_module(error: BaseException | None, arguments: Sequence[str]) -> list[str]:
    """Return a line with the command that finds a missing module, if the module lies beside a configuration."""
    for name in [cause.name for cause in causes(error) if isinstance(cause, ModuleNotFoundError) and cause.name]:
        module = name.partition(".")[0]
        for folder in [Path(argument.rpartition("=")[2]).parent for argument in arguments if ".yaml" in argument]:
            if (folder / f"{module}.py").is_file() or (folder / module).is_dir():
                command = f"PYTHONPATH={shlex.quote(str(folder))} lightning-rl {shlex.join(arguments)}"
                return [f"Python does not search the folder of the configuration, where {module} is. Use: {command}"]
    return []


def _place(failure: EnvironmentFailure) -> str:
    """Return the line in which an environment raised, in this process or in a worker process."""
    text = "" if failure.__cause__ is None else "".join(traceback.format_tb(failure.__cause__.__traceback__))
    # A worker reports the traceback of the environment first.
    text = text or "".join(getattr(failure, "__notes__", [])).partition("\nThe above exception was")[0]
    frames = [line for line in text.splitlines() if line.startswith('  File "')]
    own = str(Path(__file__).parents[1])  # a frame of this package has found that a worker is gone
    return f"\n{frames[-1]}" if frames and own not in frames[-1] else ""

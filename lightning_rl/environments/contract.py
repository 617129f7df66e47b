"""What environments of every backend have in common: autoreset, failures, finite values."""

from __future__ import annotations

import dis
import functools
import signal
import threading
import traceback
from collections.abc import Sequence
from types import CodeType
from typing import Any, NoReturn

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv

from lightning_rl.validation import ConfigurationError


class EnvironmentFailure(RuntimeError):
    """An environment raised, died, hung or returned what cannot be learned from; the message says which and when."""


def is_failure(error: BaseException) -> bool:
    """Whether an exception that left an environment is a failure of that environment.

    `SystemExit` and `KeyboardInterrupt` are failures too, unless a signal handler raised them: a program that is
    asked to end must end.

    Args:
        error: The exception, as it was caught.
    """
    if isinstance(error, Exception):
        return True
    return isinstance(error, SystemExit | KeyboardInterrupt) and not _comes_from_signal(error)


def summary(error: BaseException) -> str:
    """Return the class and the text of an exception, as Python prints them."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def place(error: BaseException) -> str:
    """Return where an exception was raised, with the statement if the exception has no text; nothing if unknown."""
    if not (frames := traceback.extract_tb(error.__traceback__)):
        return ""
    frame = frames[-1]
    statement = "" if str(error) or not frame.line else f": {frame.line}"
    return f" (at {frame.filename}:{frame.lineno} in {frame.name}{statement})"


def _comes_from_signal(error: BaseException) -> bool:
    """Whether a signal handler of this process raised an exception."""
    if threading.current_thread() is not threading.main_thread():  # Python runs signal handlers in the main thread
        return False
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if isinstance(error, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Python's own handler has no frame, and interrupts anything but a `raise` statement.
        last = error.__traceback__
        while last is not None and last.tb_next is not None:
            last = last.tb_next
        if last is None or dis.opname[last.tb_frame.f_code.co_code[last.tb_lasti]] != "RAISE_VARARGS":
            return True
    handlers = {_code_of(signal.getsignal(signum)) for signum in signal.valid_signals()}
    return any(frame.f_code in handlers for frame in frames)


def _code_of(handler: object) -> CodeType | None:
    """Return the code of a signal handler written in Python, None for other handlers."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    if not callable(handler):
        return None
    for function in (getattr(handler, "__func__", handler), type(handler).__call__):
        if isinstance(code := getattr(function, "__code__", None), CodeType):
            return code
    return None


def autoreset_mode(env: VectorEnv[Any, Any, Any]) -> AutoresetMode:
    """Return what an environment says in `metadata["autoreset_mode"]`.

    Raises:
        ConfigurationError: It says nothing, or something else.
    """
    mode = (env.metadata or {}).get("autoreset_mode")
    try:
        return mode if isinstance(mode, AutoresetMode) else AutoresetMode(mode)
    except ValueError:
        raise ConfigurationError(
            f"env_id: {env} has metadata['autoreset_mode']={mode!r}: expected one of "
            f"{[mode.value for mode in AutoresetMode]}, so that episode ends can be told apart from resets"
        ) from None


_LARGEST = float(np.finfo(np.float32).max)
# A sum of squares below this has no term that float32 could not hold.
_SAFE_SQUARES = 1e76


def surely_finite(x: np.ndarray[Any, Any]) -> bool:
    """Whether every entry is certainly finite: one product; False for NaN, infinity and all that is very large."""
    return float(np.vdot(x, x)) < _SAFE_SQUARES


def first_not_finite(x: np.ndarray[Any, Any]) -> tuple[int, ...] | None:
    """Return the place of the first entry that float32 cannot hold as a finite number, None if there is none."""
    places = np.argwhere(~(np.abs(x) <= _LARGEST))
    return tuple(int(i) for i in places[0]) if len(places) else None


def complaint(what: str, x: np.ndarray[Any, Any]) -> str | None:
    """Say what is wrong with an observation or reward that float32 cannot hold as finite numbers, None if nothing."""
    if surely_finite(x) or (bad := first_not_finite(x)) is None:
        return None
    entry = f" (entry {', '.join(map(str, bad))})" if bad else ""
    return f"returned {what}{entry} {x[bad]}: expected a finite number that float32 can hold"


def batch_infos(infos: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Combine the `info` dicts of single environments as Gymnasium's vector environments do.

    Args:
        infos: One per environment.

    Returns:
        For each key an array `[B, ...]`, or a dict of such arrays if the values are dicts; under `_<key>` a boolean
        array `[B]`: which environments have the key.
    """
    batched: dict[str, Any] = {}
    for key in dict.fromkeys(key for info in infos for key in info):
        has = np.array([key in info for info in infos])
        values = {index: info[key] for index, info in enumerate(infos) if key in info}
        first = next(iter(values.values()))
        if isinstance(first, dict) and key != "final_obs":
            batched[key] = batch_infos([info.get(key, {}) for info in infos])
        else:
            batched[key] = _empty_column(len(infos), object() if key == "final_obs" else first)
            for index, value in values.items():
                batched[key][index] = value
        batched[f"_{key}"] = has
    return batched


def _empty_column(length: int, like: object) -> np.ndarray[Any, Any]:
    """Return an array `[length, ...]` of the kind of `like`, one value of an `info`."""
    if isinstance(like, np.ndarray):
        return np.zeros((length, *like.shape), like.dtype)
    is_number = type(like) in (int, float, bool) or isinstance(like, np.number)
    return np.zeros(length, type(like)) if is_number else np.full(length, None, object)


MAX_RESTARTS_IN_A_ROW = 3
"""An environment that fails once more without having completed a step in between will not recover."""
FAILURE, LOST, EPISODE = "lightning_rl/failure", "lightning_rl/lost", "lightning_rl/episode"
"""Keys of the `info` of a new environment: what happened to those before it (a list, an entry for each restart),
whether that was in a step, which has no outcome then, and which episode of the stream has begun."""


def give_up(failure: EnvironmentFailure) -> NoReturn:
    """Raise the failure of an environment that restarts do not help."""
    raise EnvironmentFailure(
        f"{failure}; {MAX_RESTARTS_IN_A_ROW} restarts in a row, without a completed step in between, did not help"
    ) from failure


OWN_STATE = "own"
"""Where a record has what the environment itself returned as its state, which is left as it is."""
IDLE = "lightning_rl/idle"
"""Key of the `info` of a step: rows that ignored their action since they wait for others, `[B]`."""

LIFE_LOST = "lightning_rl/life_lost"
"""Key of the `info` of a step in which a game that is played as one episode lost a life and went on."""


class WorkerFailure(Exception):
    """Workers died, hung or raised: which, and what happened; `EnvironmentBatch` adds episode, seed and step."""

    def __init__(self, indices: Sequence[int], what: str) -> None:
        super().__init__(f"environment {', '.join(map(str, indices)) or '(unknown)'} {what}")
        self.indices = indices
        self.what = what

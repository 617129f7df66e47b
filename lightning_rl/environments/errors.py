"""What goes wrong in environments."""

from __future__ import annotations

import dis
import functools
import signal
import threading
import traceback
from types import CodeType


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

"""Ctrl-C before a command does anything: the program ends at once and without a word.

Python would raise KeyboardInterrupt in the middle of an import: pages of the source of others are printed, and some
modules catch it and break later, with an error of another name. The package's first line imports this module, since
`python -m lightning_rl` and the script `lightning-rl` import the package before any line of theirs that could do so.
"""

from __future__ import annotations

import os.path  # not pathlib, which would have to be imported first
import signal
import sys

_NAMES = {"lightning_rl", "lightning-rl"}


def _is_command_line() -> bool:
    """Whether this process was started as the command line, not as a worker of it or as a program of somebody else.

    Workers have the `sys.argv` of the process that started them, but were not started with it.
    """
    started = sys.orig_argv[-len(sys.argv) :][0]  # the module after `-m`, or the script; the arguments follow
    # With more than the name: `-mlightning_rl`, `lightning-rl.exe`, and `lightning_rl.__main__`, as ranks are started.
    return os.path.splitext(os.path.basename(started.removeprefix("-m")))[0] in _NAMES


# Not where SIGINT is ignored, as it is in the background of a shell.
_held = _is_command_line() and signal.getsignal(signal.SIGINT) is signal.default_int_handler
if _held:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def over() -> None:
    """Have SIGINT raise KeyboardInterrupt from now on: what begins now must be cleaned up after."""
    global _held
    if _held:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    _held = False


def led_to(error: BaseException | None) -> bool:
    """Whether an error is a KeyboardInterrupt, or was raised because of one: Lightning makes `SystemExit(1)` of it."""
    seen: set[int] = set()  # one that is raised twice may be its own cause
    while error is not None and id(error) not in seen and not isinstance(error, KeyboardInterrupt):
        seen.add(id(error))
        # One that an environment raised has ended in a message, and in an exit `from None`.
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return isinstance(error, KeyboardInterrupt)

"""`python -m lightning_rl` is `lightning-rl`."""

from __future__ import annotations

import contextlib
import difflib
import os
import signal
import sys
from collections.abc import Iterator

from lightning_rl.__about__ import __version__
from lightning_rl.cli import COMMANDS, TRAINER_COMMANDS


def run() -> None:
    """Run the command line of this process; what is returned here would be its exit status."""
    if os.getcwd() not in sys.path and "" not in sys.path:
        # As `python -m` has it: modules beside the configurations can be named in them.
        sys.path.insert(0, os.getcwd())
    arguments = sys.argv[1:]
    _answer_at_once(arguments)
    with _quiet_interrupt():
        import torch

        from lightning_rl.cli.main import main
    try:
        if arguments[0] in COMMANDS and arguments[0] not in TRAINER_COMMANDS:
            from lightning_rl.cli.commands import run_command

            run_command(arguments)
        else:
            main()
    except BaseException as error:
        if _is_interrupt(error):
            sys.exit(128 + signal.SIGINT)
        raise
    finally:
        # Gloo's threads, where they still run when the interpreter ends, abort it: the exit status would be theirs.
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def _answer_at_once(arguments: list[str]) -> None:
    """Answer what needs neither PyTorch nor Lightning: the version, and a command that does not exist."""
    if arguments == ["--version"]:
        print(f"lightning-rl {__version__}")
        sys.exit(0)
    if arguments and (arguments[0].startswith("-") or arguments[0] in COMMANDS):
        return
    error = f"expected one of {', '.join(COMMANDS)}"
    if arguments:
        near = difflib.get_close_matches(arguments[0], COMMANDS)
        error = f"{arguments[0]!r} is no command: {error}" + (f"; did you mean {' or '.join(near)}?" if near else "")
    sys.stderr.write(f"lightning-rl: error: {error}\nAll options: lightning-rl --help\n")
    sys.exit(2)


@contextlib.contextmanager
def _quiet_interrupt() -> Iterator[None]:
    """End the process without a traceback if Ctrl-C comes while packages are imported.

    Some packages turn a KeyboardInterrupt in their imports into other errors, so it is not caught but never raised.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _is_interrupt(error: BaseException | None) -> bool:
    """Return whether an error is a KeyboardInterrupt or was raised because of one, as Lightning's `SystemExit(1)`."""
    seen: set[int] = set()  # an exception that is raised twice may be its own cause
    while error is not None and id(error) not in seen and not isinstance(error, KeyboardInterrupt):
        seen.add(id(error))
        # The KeyboardInterrupt of an environment ends in an exit `from None`.
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return isinstance(error, KeyboardInterrupt)


if __name__ == "__main__":
    run()

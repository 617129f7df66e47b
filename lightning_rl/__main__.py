"""`python -m lightning_rl` is `lightning-rl`."""

from __future__ import annotations

import contextlib
import difflib
import io
import os
import signal
import sys

from lightning_rl import __version__
from lightning_rl.cli import COMMANDS


def run() -> None:
    """Run the command line with the arguments of this process; returns None, the exit status of success."""
    if os.getcwd() not in sys.path and "" not in sys.path:
        # Like `python -m`, so that configurations can name modules in the current folder.
        sys.path.insert(0, os.getcwd())
    main_module = sys.modules["__main__"]
    if getattr(main_module.__spec__, "name", None) == "__main__":  # of an archive, as the .exe on Windows is
        main_module.__spec__ = __spec__  # the name by which Lightning starts further ranks
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.encoding.lower() != "utf-8":
        # Pipes and files on Windows have no Greek letters, which the help has.
        with contextlib.suppress(OSError):  # the program has redirected it from a file to a pipe
            sys.stdout.reconfigure(errors="backslashreplace")
    arguments = sys.argv[1:]
    _answer_at_once(arguments)
    interrupt = signal.getsignal(signal.SIGINT)
    if interrupt is not signal.SIG_IGN:
        # Some packages turn a KeyboardInterrupt in their imports into other errors with long tracebacks.
        signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))
    from lightning_rl.cli.main import main
    from lightning_rl.distributed import causes, leave_process_group

    signal.signal(signal.SIGINT, interrupt)
    try:
        main()
    except BaseException as error:
        # Also Lightning's `SystemExit(1)`, but not an environment's interrupt, which ends in an exit `from None`.
        if any(isinstance(cause, KeyboardInterrupt) for cause in causes(error)):
            sys.exit(128 + signal.SIGINT)
        if isinstance(error, SystemExit):
            sys.exit(error.code)  # from which W&B learns that the run has failed
        raise
    finally:
        leave_process_group()


def _answer_at_once(arguments: list[str]) -> None:
    """Answer `--version` and unknown commands without importing PyTorch and Lightning."""
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


if __name__ == "__main__":
    run()

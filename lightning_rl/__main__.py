"""`python -m lightning_rl` is `lightning-rl`."""

import os
import signal
import sys

import torch

from lightning_rl.cli.commands import run_command
from lightning_rl.cli.main import main


def run() -> None:
    """Run the command line of this process; what is returned here would be its exit status."""
    if os.getcwd() not in sys.path and "" not in sys.path:
        # As `python -m` has it: modules beside the configurations can be named in them.
        sys.path.insert(0, os.getcwd())
    try:
        if not run_command(sys.argv[1:]):
            main()
    except BaseException as error:
        if _is_interrupt(error):
            sys.exit(128 + signal.SIGINT)
        raise
    finally:
        # Gloo's threads, where they still run when the interpreter ends, abort it: the exit status would be theirs.
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


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

"""`python -m lightning_rl` is `lightning-rl`."""

import importlib
import os
import sys

import torch

from lightning_rl.cli import main
from lightning_rl.cli_errors import error_message
from lightning_rl.commands import COMMANDS


def run_command(name: str, *args: str) -> None:
    """Run a command that is none of the Trainer's.

    Raises:
        SystemExit: With status 1, after one message on the standard error, where a setting is at fault.
    """
    try:
        importlib.import_module(f"lightning_rl.commands.{name}").run(list(args))
    except Exception as error:
        if (message := error_message(error)) is None:
            raise
        print(f"lightning-rl {name}: error: {message}", file=sys.stderr, flush=True)
        sys.exit(1)


def run() -> None:
    """Run the command line of this process; what is returned here would be its exit status."""
    if os.getcwd() not in sys.path and "" not in sys.path:
        # As `python -m` has it: modules beside the configurations can be named in them.
        sys.path.insert(0, os.getcwd())
    try:
        if sys.argv[1:2] and sys.argv[1] in COMMANDS:
            run_command(*sys.argv[1:])
        else:
            main()
    finally:
        # Gloo's threads, where they still run when the interpreter ends, abort it: the exit status would be theirs.
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


if __name__ == "__main__":
    run()

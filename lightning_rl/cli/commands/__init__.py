"""What `lightning-rl` does besides running a Trainer: a module for each command, imported when it is asked for."""

from __future__ import annotations

import importlib

from lightning_rl.cli.errors import end_with_message
from lightning_rl.training.warning_filters import filter_command_line_warnings

COMMANDS = {
    "export": "Write the policy of a checkpoint as programs that act without this package.",
    "plot": "Draw learning curves of runs.",
    "pull": "Fetch a checkpoint from the Hugging Face Hub.",
    "push": "Put a checkpoint, its configuration, score and model card on the Hugging Face Hub.",
}
"""Summary of each command. `MODULES` names its module, which has `<command>(arguments)` and `<command>_parser()`."""
MODULES = {"export": "export", "plot": "plot", "pull": "hub", "push": "hub"}
CKPT_PATH_HELP = (
    "The checkpoint: a file, or 'last' for the newest one or 'best' for the newest best one under runs; with --config, "
    "of its algorithm and environment."
)
TRUST_HELP = (
    "A package, or several as [a, b], whose classes and environments the checkpoint and the configuration beside it "
    "may name; those of lightning_rl, torch and gymnasium and of --config need no trust."
)


def run_command(arguments: list[str]) -> bool:
    """Run the command that arguments begin with; return whether there is one of that name."""
    if not arguments or arguments[0] not in COMMANDS:
        return False
    filter_command_line_warnings()
    try:
        getattr(importlib.import_module(f"{__name__}.{MODULES[arguments[0]]}"), arguments[0])(arguments[1:])
    except Exception as error:
        end_with_message(error)
        raise
    return True


def overview() -> str:
    """Return a line about each command, for the help of the command line."""
    return "Further commands, each with a --help of its own: " + " ".join(f"{n}: {COMMANDS[n]}" for n in COMMANDS)

"""The commands that run no Trainer; the parameters of their functions are the options."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_rl.cli import COMMANDS
from lightning_rl.cli.parser import CommandParser, say
from lightning_rl.files import relative
from lightning_rl.tools.hub import pull_from_hub, push_to_hub
from lightning_rl.tools.plots import draw_runs
from lightning_rl.tools.shipped_configs import search_beside
from lightning_rl.tools.trained import config_of, export_checkpoint

FUNCTIONS: dict[str, Any] = {"export": export_checkpoint, "plot": draw_runs, "pull": pull_from_hub, "push": push_to_hub}


def run_command(arguments: Sequence[str]) -> None:
    """Run the command that arguments begin with, and print what its function returns."""
    options = make_parser(arguments[0]).parse_args(arguments[1:])
    search_beside(options.get("config"))
    result = FUNCTIONS[arguments[0]](**options)
    say(f"Done: {relative(result) if isinstance(result, Path) else result}")
    if isinstance(result, Path) and (config := config_of(result)) is not None:
        say(f"  next: lightning-rl test --config {relative(config)} --ckpt_path {relative(result)}")


def make_parser(command: str) -> CommandParser:
    """Return the parser of a command."""
    parser = CommandParser(prog=f"lightning-rl {command}", description=COMMANDS[command])
    if command == "plot":  # a list takes one positional argument otherwise
        about = "Folder of one or more runs. Runs that differ only in their seed, or have the same name, are one curve."
        parser.add_argument("runs", nargs="+", metavar="[NAME=]RUN", help=about)
    parser.sources = [("", FUNCTIONS[command])]
    parser.add_function_arguments(FUNCTIONS[command], as_positional=True, skip={"runs"} if command == "plot" else None)
    return parser

"""`lightning-rl pull`: a checkpoint from the Hugging Face Hub."""

from __future__ import annotations

from lightning_rl.cli_errors import OneErrorParser
from lightning_rl.cli_parts import relative, say
from lightning_rl.commands import COMMANDS
from lightning_rl.hub import pull_from_hub
from lightning_rl.trained import config_of


def parser() -> OneErrorParser:
    """Return what reads the arguments."""
    made = OneErrorParser(prog="lightning-rl pull", description=COMMANDS["pull"])
    made.add_argument("repo_id", type=str, help="The repository, owner/name.")
    made.add_argument("--revision", type=str | None, default=None, help="A branch, tag or commit.")
    made.add_argument("--folder", type=str | None, default=None, help="Where to; by default the cache of the Hub.")
    return made


def run(arguments: list[str]) -> None:
    """Fetch it, and say what to do with it."""
    options = parser().parse_args(arguments)
    path = pull_from_hub(options.repo_id, revision=options.revision, folder=options.folder)
    config = config_of(path)
    say(f"Done: {relative(path)}")
    if config is not None:
        say(f"  next: lightning-rl test --config {relative(config)} --ckpt_path {relative(path)}")

"""`lightning-rl push` and `pull`: checkpoints on the Hugging Face Hub."""

from __future__ import annotations

from lightning_rl.cli.commands import CKPT_PATH_HELP, COMMANDS, TRUST_HELP
from lightning_rl.cli.errors import OneErrorParser
from lightning_rl.cli.parser import as_list, relative, say
from lightning_rl.tools.hub import pull_from_hub, push_to_hub
from lightning_rl.tools.trained import config_of, find_trained


def push_parser() -> OneErrorParser:
    """Return what reads the arguments."""
    made = OneErrorParser(prog="lightning-rl push", description=COMMANDS["push"])
    made.add_argument("repo_id", type=str, help="The repository, owner/name; made if there is none.")
    made.add_argument("--ckpt_path", type=str, required=True, help=CKPT_PATH_HELP)
    made.add_argument(
        "--config",
        type=str | None,
        default=None,
        help="Configuration of the run; by default the one in its folder.",
    )
    made.add_argument("--episodes", type=int, default=10, help="Episodes to play for the score.")
    made.add_argument("--private", type=bool, default=False, help="Whether a repository that is made is private.")
    made.add_argument("--message", type=str | None, default=None, help="Of the commit.")
    made.add_argument("--trust", type=str | list[str], default=[], help=TRUST_HELP)
    return made


def push(arguments: list[str]) -> None:
    """Upload a checkpoint and print its address."""
    options = push_parser().parse_args(arguments)
    path = find_trained(options.ckpt_path, options.config)
    address = push_to_hub(
        options.repo_id,
        path,
        config=options.config,
        episodes=options.episodes,
        private=options.private,
        message=options.message,
        trust=as_list(options.trust),
    )
    say(f"Done: {address}")
    say(f"  checkpoint: {relative(path)}")


def pull_parser() -> OneErrorParser:
    """Return what reads the arguments."""
    made = OneErrorParser(prog="lightning-rl pull", description=COMMANDS["pull"])
    made.add_argument("repo_id", type=str, help="The repository, owner/name.")
    made.add_argument("--revision", type=str | None, default=None, help="A branch, tag or commit.")
    made.add_argument("--folder", type=str | None, default=None, help="Where to; by default the cache of the Hub.")
    return made


def pull(arguments: list[str]) -> None:
    """Download a checkpoint and print how to use it."""
    options = pull_parser().parse_args(arguments)
    path = pull_from_hub(options.repo_id, revision=options.revision, folder=options.folder)
    config = config_of(path)
    say(f"Done: {relative(path)}")
    if config is not None:
        say(f"  next: lightning-rl test --config {relative(config)} --ckpt_path {relative(path)}")

"""The parser of the command line: one message for each error, with what was probably meant."""

from __future__ import annotations

import shlex
import sys
from argparse import SUPPRESS, Action
from collections.abc import Collection, Iterator, Sequence
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import yaml
from jsonargparse import ArgumentParser
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch import loggers
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.utilities.rank_zero import rank_zero_only  # type: ignore[attr-defined]

import lightning_rl
from lightning_rl.cli import TRAINER_COMMANDS
from lightning_rl.cli.errors import error_message
from lightning_rl.tools.shipped_configs import resolve

_Word = TypeVar("_Word", bound=str)
_CLASS_OPTIONS = ("model", "data", "trainer.callbacks", "trainer.logger")
"""Options whose values are classes; those of classes are options below them."""


class CommandParser(LightningArgumentParser):
    """A parser that says what is wrong, and where to look, but does not list every option.

    Attributes:
        given: The arguments of the program.
        listed: Options that `--help` lists; None: all.
    """

    given: Sequence[str] = ()
    listed: Collection[str] | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - those of Lightning
        # An option that lacks its end is misspelled, on the command line as in a file.
        super().__init__(*args, **{"prog": "lightning-rl", "allow_abbrev": False, **kwargs})

    def format_help(self, *args: Any) -> str:  # noqa: ANN401 - those of the parser
        """Return the help, with the listed options only."""
        listed = [action.dest for action in self._actions] if self.listed is None else self.listed
        hidden = {action: action.help for action in self._actions if action.dest not in listed}
        for action in hidden:
            action.help = SUPPRESS  # for now: what is hidden for good is not in configurations either
        try:
            return str(super().format_help(*args))
        finally:
            for action, text in hidden.items():
                action.help = text

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print one message and exit with status 2."""
        if not self.exit_on_error:
            super().error(message, ex)
        parser = getattr(ex, "subcommand_parser", None) or self
        program = parser.prog.replace(" [options]", "")
        text = (None if ex is None else error_message(ex)) or message
        hints, helps = suggestions(parser, self.given)
        lines = [f"lightning-rl: error: {text}", *hints, f"All options: {', '.join([f'{program} --help', *helps])}"]
        sys.stderr.write("\n".join(lines) + "\n")
        sys.exit(2)


class HelpAll(Action):
    """The option that shows the help of all options."""

    def __init__(self, **kwargs: Any) -> None:  # noqa: ANN401 - those of argparse
        super().__init__(nargs=0, default=SUPPRESS, **kwargs)

    def __call__(self, parser: Any, *_: object) -> None:  # noqa: ANN401 - a `CommandParser`
        """Show it and exit."""
        parser.listed = None
        parser.print_help()
        parser.exit()


def settings(arguments: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield the options that arguments, and configurations that they name, set: `("data.num_envs", 8)`."""
    for argument, following in pairwise([*arguments, ""]):
        option, equals, value = argument.partition("=")
        content = _content(value if equals else following)
        if option in ("-c", "--config"):
            for name, setting in _flat(content, ""):  # of a command, or of the whole program
                command, _, rest = name.partition(".")
                yield (rest if command in TRAINER_COMMANDS else name), setting
        elif option.startswith("--"):
            name = option.removeprefix("--").rstrip("+")
            yield from _flat(content, name) if name in ("model", "data", "trainer") else [(name, content)]


def _flat(content: Any, name: str) -> Iterator[tuple[str, Any]]:  # noqa: ANN401 - YAML
    if isinstance(content, dict):
        for key, value in content.items():
            yield from _flat(value, f"{name}.{key}" if name else str(key))
    elif isinstance(content, list) and name in _CLASS_OPTIONS:
        for entry in content:
            yield from _flat(entry, name)
    elif name:
        yield name, content


def _content(value: str) -> Any:  # noqa: ANN401 - whatever is in it
    """Return what a file has, or an argument itself; nothing where the parser will say what is wrong with it."""
    try:
        value = resolve(value)
        return yaml.safe_load(Path(value).read_text() if Path(value).is_file() else value)
    except (OSError, ValueError, yaml.YAMLError):
        return None


def chooses_data_class(arguments: Sequence[str]) -> bool:
    """Whether arguments, or a configuration that they name, say which class the data are of.

    Where none does, the options of `RolloutDataModule` are those of `data` itself.
    """
    chosen = ("data.class_path", "data.init_args")
    return any(
        name.startswith(chosen) or (name == "data" and isinstance(value, str)) for name, value in settings(arguments)
    )


def suggestions(parser: ArgumentParser, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return a line for each option and class that does not exist, and where the options of classes are listed.

    Args:
        parser: Of the command.
        arguments: Of the program.
    """
    options = {action.dest for action in parser._actions if not action.dest.endswith("help")}
    homes = (loggers, lightning_callbacks, lightning_rl)
    classes = {name: getattr(home, name) for home in homes for name in home.__all__}
    by_lower = {name.lower(): name for name in classes}
    lines: list[str] = []
    helps: list[str] = []
    given = [(name.replace(".init_args", "").replace(".dict_kwargs", ""), value) for name, value in settings(arguments)]
    for name, value in given:
        option = name.removesuffix(".class_path")
        if option not in _CLASS_OPTIONS or option not in options or not isinstance(value, str):
            continue
        if (cls := classes.get(value.removeprefix("lightning_rl."))) is not None:
            of_class = ArgumentParser()
            of_class.add_class_arguments(cls, option, fail_untyped=False)
            options |= {action.dest for action in of_class._actions if not action.dest.endswith("help")}
            helps += [] if (text := f"--{option}.help {value}") in helps else [text]
        elif near := get_close_matches(value.lower(), by_lower):
            lines.append(f"--{option} {value}: did you mean {' or '.join(by_lower[name] for name in near)}?")
    groups = {option.rpartition(".")[0] for option in options}
    for name, _ in given:
        is_known = name in options or any(name.startswith(f"{option}.") for option in options - groups)
        if not is_known and not name.endswith(".class_path") and (near := _near(name, sorted(options - groups))):
            lines.append(f"--{name}: did you mean {' or '.join(f'--{option}' for option in near)}?")
    if any(action.dest == "subcommand" for action in parser._actions) and "model" not in dict(given):
        lines.append("To start: lightning-rl fit --config ppo/cartpole, or --model PPO --data.env_id CartPole-v1")
    return lines, helps


def _near(name: str, options: list[str]) -> list[str]:
    """Return options that end like a name (`gamma`), have its letters as initials (`lr`), or are spelled similarly."""
    end = name.rpartition(".")[2]
    ends = {option: option.rpartition(".")[2] for option in options}
    same = [
        option for option in options if end in (ends[option], "".join(word[:1] for word in ends[option].split("_")))
    ]
    similar = get_close_matches(name, options, cutoff=0.8)
    alike = [option for option in options if get_close_matches(end, [ends[option]], cutoff=0.8)]
    return same or similar or alike or [option for option in options if option.startswith(name)]


def as_list(given: _Word | list[_Word] | None) -> list[_Word]:
    """Return a list, of one word where no list was given: `--record_as video` needs no brackets."""
    return given if isinstance(given, list) else [] if given is None else [given]


def relative(path: str | Path) -> str:
    """Return a path as it can be typed in a shell, from the current folder where it lies in it."""
    path = Path(path).absolute()
    return shlex.quote(str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path))


@rank_zero_only
def say(message: str) -> None:
    """Print a line, on the first rank only."""
    print(message, flush=True)

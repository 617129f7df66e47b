"""The parser of the command line: options of a run, short help, and one message for each mistake."""

from __future__ import annotations

import os
import shlex
import sys
from argparse import SUPPRESS, Action
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin

import yaml
from jsonargparse import ArgumentError, ArgumentParser, DefaultHelpFormatter
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only  # type: ignore[attr-defined]

import lightning_rl
from lightning_rl.callbacks.episode_recorder import RecordAs
from lightning_rl.cli import TRAINER_COMMANDS
from lightning_rl.cli.errors import error_message, missing_module
from lightning_rl.options import types_of
from lightning_rl.tools.shipped_configs import resolve
from lightning_rl.training.parameter_groups import Part
from lightning_rl.validation import ConfigurationError, did_you_mean, import_class

_Word = TypeVar("_Word", bound=str)
_BASES: dict[str, type] = {
    "model": lightning_rl.OnPolicyAlgorithm,
    "data": LightningDataModule,
    "trainer.callbacks": Callback,
    "trainer.logger": Logger,
}
"""Options whose values are classes, with the base class of these."""
_FIRST_OPTIONS = {
    *("help", "help_all", "print_config", "config", "seed_everything", "max_env_steps", "num_threads", "ckpt_path"),
    *("init_from", "record", "record_as", "model", "model.help", "data", "data.help", "subcommand"),
    *(f"data.{name}" for name in ("env_id", "num_envs", "rollout_length", "rollouts_per_epoch", "backend")),
    *("data.env.kwargs", "data.evaluation.episodes"),
}
"""Options that `--help` lists."""


def run_options(
    max_env_steps: int | float | None = None,
    num_threads: int | None = None,
    ckpt_path: str | None = None,
    init_from: str | None = None,
    init_parts: Part | list[Part] | None = None,
    resume_changes: Literal["refuse", "allow"] = "refuse",
) -> None:
    """Options of a run.

    Args:
        max_env_steps: Stop with the first rollout that reaches this number of environment steps of all ranks. Without
            a limit here or of the Trainer (max_epochs, max_steps, max_time) this is 1000000; trainer.max_epochs=-1
            trains until it is stopped.
        num_threads: Number of CPU threads of PyTorch. null: 1, the fastest, for policies of at most 100,000
            parameters, and PyTorch's default for others.
        ckpt_path: Checkpoint to resume or to evaluate: a file, 'last' for the newest one of this algorithm and
            environment, or 'best'.
        init_from: Checkpoint of any algorithm and environment whose parameters initialize a new run, as far as they
            fit; the optimizer and the step count start fresh. Ignored when resuming.
        init_parts: Parts to copy from it: policy, critic or normalizers, or several as [policy, critic]; null copies
            all parts that the checkpoint has.
        resume_changes: Whether a resumed run may change settings of model and data since its last start.
    """


def record_options(record: str | None = None, record_as: RecordAs | list[RecordAs] | None = None) -> None:
    """Options of predict.

    Args:
        record: Folder to write the episodes to.
        record_as: Format: video (one file for each), minari (a data set), or both: [video, minari]. The default is
            both, as far as their extras are installed.
    """


class ShortHelp(DefaultHelpFormatter):
    """Help on the options of a first run."""

    def add_argument(self, action: Action) -> None:
        """Add an option if it is one of these."""
        if action.dest in _FIRST_OPTIONS:
            super().add_argument(action)


class _HelpAll(Action):
    def __init__(self, **kwargs: Any) -> None:  # noqa: ANN401 - as in argparse
        super().__init__(nargs=0, default=SUPPRESS, **kwargs)

    def __call__(self, parser: Any, *_: object) -> None:  # noqa: ANN401 - a `CommandParser`
        parser.formatter_class = DefaultHelpFormatter
        parser.print_help()
        parser.exit()


class CommandParser(LightningArgumentParser):
    """A parser that answers a mistake with the option, its value and a suggestion, instead of the usage.

    Attributes:
        given: The arguments of the program.
        folder: The current folder of the program.
        sources: Name of a group of options, and the class or function whose parameters they are.
    """

    given: Sequence[str] = ()
    folder = Path()

    @classmethod
    def begin(cls, arguments: Sequence[str]) -> None:
        """Store arguments and current folder of the program, for error messages."""
        cls.given, cls.folder = arguments, Path.cwd()

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - as in Lightning
        # Abbreviated options are refused, as in a configuration.
        super().__init__(*args, **{"prog": "lightning-rl", "allow_abbrev": False, **kwargs})
        self.sources: list[tuple[str, Callable[..., Any]]] = []

    def add_function_arguments(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[str]:  # noqa: ANN401
        """Add the parameters of a function, and keep their types for error messages."""
        self.sources.append(("", function))
        return list(super().add_function_arguments(function, *args, **kwargs))

    def add_lightning_class_args(self, lightning_class: Any, nested_key: str, *args: Any, **kwargs: Any) -> list[str]:  # noqa: ANN401
        """Add the options of the Trainer, the model or the data, and keep their types for error messages."""
        self.sources.append((nested_key, lightning_class))
        return super().add_lightning_class_args(lightning_class, nested_key, *args, **kwargs)

    def add_class_arguments(self, theclass: Any, nested_key: str | None = None, *args: Any, **kwargs: Any) -> list[str]:  # noqa: ANN401
        """Add the options of a class; `--model.help` leaves out the spaces, which the data give."""
        if nested_key == "model":
            kwargs["skip"] = {"observation_space", "action_space"}
        return list(super().add_class_arguments(theclass, nested_key, *args, **kwargs))

    def add_method_arguments(self, theclass: Any, themethod: str, *args: Any, **kwargs: Any) -> list[str]:  # noqa: ANN401
        """Add the arguments of a method of the Trainer, and the options of every run."""
        kwargs["skip"] = {*kwargs["skip"], "ckpt_path"}  # documented in `run_options`
        added = list(super().add_method_arguments(theclass, themethod, *args, **kwargs))
        self.add_function_arguments(run_options)
        if themethod == "predict":
            self.add_function_arguments(record_options)
        self.add_argument("--help_all", action=_HelpAll, help="Show all options and exit.")
        return [*added, "ckpt_path"]

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print one message and exit with status 2."""
        if not self.exit_on_error:
            super().error(message, ex)
        os.chdir(self.folder)  # the parser reads a configuration in the folder of that file
        parser = getattr(ex, "subcommand_parser", None) or self
        program = parser.prog.replace(" [options]", "")
        given = [(name.replace(".init_args", "").replace(".dict_kwargs", ""), x) for name, x in settings(self.given)]
        classes, found = _chosen_classes(given)
        types = dict.fromkeys(parser.get_defaults(skip_validation=True).keys(), Any)
        for group, source in [*parser.sources, *classes]:
            types |= {f"{group}.{name}".removeprefix("."): hint for name, hint in types_of(source).items()}
        found += _mistakes(given, types)
        # The parser names the first mistake only, and knows more: the other settings may be right.
        text = (None if ex is None else error_message(ex)) or "\n".join(x for key, x in found if key in message)
        lines = [f"lightning-rl: error: {text or message}", *missing_module(ex, self.given)]
        if "subcommand" in types and "model" not in dict(given):
            lines.append("To start: lightning-rl fit --config ppo/cartpole, or --model PPO --data.env_id CartPole-v1")
        helps = [f"{program} {'--help_all' if 'trainer' in dict(parser.sources) else '--help'}"]
        helps += [f"--{option}.help {_name_of(cls)}" for option, cls in dict(classes).items()]
        sys.stderr.write("\n".join([*lines, f"All options: {', '.join(helps)}"]) + "\n")
        sys.exit(2)


def _name_of(cls: type[Any]) -> str:
    """Return the name of a class as options take it: classes of the user with their module."""
    return cls.__name__ if cls.__module__.startswith("lightning_rl.") else f"{cls.__module__}.{cls.__qualname__}"


def settings(arguments: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield the options that arguments set, in configurations too, with their values: `("data.num_envs", 8)`."""
    for argument, following in pairwise([*arguments, ""]):
        option, equals, value = argument.partition("=")
        content = _content(value if equals else following)
        if option in ("-c", "--config"):
            for name, setting in _flat(content, ""):
                command, _, rest = name.partition(".")
                yield (rest if command in TRAINER_COMMANDS else name), setting
        elif option.startswith("--"):
            name = option.removeprefix("--").rstrip("+")
            yield from _flat(content, name) if name in ("model", "data", "trainer") else [(name, content)]


def _flat(content: Any, name: str) -> Iterator[tuple[str, Any]]:  # noqa: ANN401 - YAML
    if isinstance(content, dict):
        for key, value in content.items():
            yield from _flat(value, f"{name}.{key}" if name else str(key))
    elif isinstance(content, list) and name in _BASES:
        for entry in content:
            yield from _flat(entry, name)
    elif name:
        yield name, content


def _content(value: str) -> Any:  # noqa: ANN401 - YAML
    """Return the content of a file or an argument; None if the parser will report an error in it."""
    try:
        value = resolve(value)
        return yaml.safe_load(Path(value).read_text() if Path(value).is_file() else value)
    except (OSError, ValueError, yaml.YAMLError):
        return None


def chooses_data_class(arguments: Sequence[str]) -> bool:
    """Return whether arguments, or a configuration that they name, choose the class of the data.

    If not, the options of `RolloutDataModule` are the options of `data` itself.
    """
    chosen = ("data.class_path", "data.init_args")
    return any(
        name.startswith(chosen) or (name == "data" and isinstance(value, str)) for name, value in settings(arguments)
    )


def _chosen_classes(given: Iterable[tuple[str, Any]]) -> tuple[list[tuple[str, type]], list[tuple[str, str]]]:
    """Return the option and the class of each chosen class, and the value and a message for each that is none."""
    chosen, messages = [], []
    for name, value in given:
        option = name.removesuffix(".class_path")
        if option not in _BASES or not isinstance(value, str):
            continue
        known = {cls.__name__: cls for cls in _subclasses(_BASES[option])}
        try:
            chosen.append((option, known.get(value) or import_class(option, value, _BASES[option])))
        except ConfigurationError as error:
            hint = "" if "." in value else did_you_mean(value, known)
            messages.append((value, f"{option}={value!r} is no known class{hint}" if hint else str(error)))
    return chosen, messages


def _subclasses(cls: type[Any]) -> list[type]:
    return [one for subclass in cls.__subclasses__() for one in (subclass, *_subclasses(subclass))]


def _mistakes(given: Iterable[tuple[str, Any]], types: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the last part of the name and a message for each option that does not exist or has a wrong type."""
    groups = {name.rpartition(".")[0] for name in types}
    options = {name: hint for name, hint in types.items() if name not in groups}
    for name, value in given:
        last = name.rpartition(".")[2]
        if name in options and name not in _BASES:
            if not _fits(value, options[name]):
                yield last, f"{name}={value!r} is not valid: expected {_expected(options[name])}"
        elif not (name in {*types, *groups} or last == "class_path" or any(name.startswith(f"{x}.") for x in options)):
            yield last, f"{name}={value!r} is no option{did_you_mean(name, options)}"


def _fits(value: object, hint: Any) -> bool:  # noqa: ANN401 - a type
    parser = ArgumentParser(exit_on_error=False)
    try:
        parser.add_argument("--value", type=hint)
        parser.parse_object({"value": value})
    except ArgumentError:
        return False
    except ValueError:  # not a type that the parser can check
        pass
    return True


def _expected(hint: Any) -> str:  # noqa: ANN401 - a type
    """Return a type in words: `a number or null`."""
    origin, parts = get_origin(hint) or hint, get_args(hint)
    if origin in (Union, UnionType, Literal):
        *first, last = dict.fromkeys(str(part) if origin is Literal else _expected(part) for part in parts)
        return f"{', '.join(first)} or {last}" if first else last
    if origin in (list, Sequence):
        return f"a list in brackets: [{_expected(parts[0])}, ...]"
    words = {int: "an integer", float: "a number", bool: "true or false", str: "text", dict: "a dict", NoneType: "null"}
    return words.get(origin, getattr(origin, "__name__", str(origin)))


def as_list(given: _Word | list[_Word] | None) -> list[_Word]:
    """Return a list, with one word if no list was given: `--record_as video` needs no brackets."""
    return given if isinstance(given, list) else [] if given is None else [given]


def relative(path: str | Path) -> str:
    """Return a path as it can be typed in a shell, relative to the current folder if that contains it."""
    path = Path(path).absolute()
    return shlex.quote(str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path))


@rank_zero_only
def say(message: str) -> None:
    """Print a line, on the first rank only."""
    print(message, flush=True)

"""The parser of the command line: options of a run, short help, and one message for each error."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from inspect import Parameter
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin

import yaml
from jsonargparse import (  # type: ignore[attr-defined]
    ActionConfigFile,
    ArgumentError,
    ArgumentParser,
    DefaultHelpFormatter,
    get_loader,
    set_dumper,
    set_loader,
)
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningDataModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only  # type: ignore[attr-defined]

from lightning_rl import OnPolicyAlgorithm, RolloutDataModule  # imports all classes, so that their short names work
from lightning_rl.callbacks.episode_recorder import RecordAs
from lightning_rl.cli import COMMANDS, TRAINER_COMMANDS
from lightning_rl.distributed import causes
from lightning_rl.environments import EnvironmentFailure
from lightning_rl.files import YamlLoader, print_line, read_yaml, relative
from lightning_rl.options import defaults_of, types_of
from lightning_rl.tools.trained import config_of, resolve_config, shipped_configs
from lightning_rl.training.parameter_groups import Part
from lightning_rl.validation import ConfigurationError, ExplainedError, check, did_you_mean, import_class

DEBUG = "LIGHTNING_RL_DEBUG"
"""Environment variable that shows errors with their whole traceback."""
_EXPLAINED = (ExplainedError, FloatingPointError, MisconfigurationException)
# Raised for the folder of a logger, a figure or an export. A missing file needs the traceback, which says who reads it.
_NOT_USABLE = (PermissionError, NotADirectoryError, FileExistsError)


def error_message(error: BaseException) -> str | None:
    """Return the message of an error; None if the user needs the traceback.

    The parser wraps the errors of constructors, so the causes of an error are searched too.
    """
    for cause in causes(error):
        if isinstance(cause, _EXPLAINED):
            return str(cause) + (_place(cause) if isinstance(cause, EnvironmentFailure) else "")
        if isinstance(cause, ModuleNotFoundError) and cause.name is None:  # raised by a class that names its package
            return str(cause)
    if isinstance(error, _NOT_USABLE) and error.filename is not None:
        return f"{error.strerror}: {str(error.filename)!r}"
    return None


def end_with_message(error: BaseException) -> None:
    """End the process with one message and status 1; return if the user needs the traceback, or asked for it."""
    if not os.environ.get(DEBUG) and (message := error_message(error)) is not None:
        print(f"lightning-rl: error: {message}", file=sys.stderr, flush=True)
        raise SystemExit(1) from None


def _place(failure: EnvironmentFailure) -> str:
    """Return the line in which an environment raised, in this process or in a worker process."""
    text = "" if failure.__cause__ is None else "".join(traceback.format_tb(failure.__cause__.__traceback__))
    # A worker reports the traceback of the environment first.
    text = text or "".join(getattr(failure, "__notes__", [])).partition("\nThe above exception was")[0]
    frames = [line for line in text.splitlines() if line.startswith('  File "')]
    own = str(Path(__file__).parents[1])  # a frame of this package has found that a worker is gone
    return f"\n{frames[-1]}" if frames and own not in frames[-1] else ""


_BASES: dict[str, type] = {
    "model": OnPolicyAlgorithm,
    "data": LightningDataModule,
    "trainer.callbacks": Callback,
    "trainer.logger": Logger,
}
"""Options whose values are classes, with the base class of these."""
_FILES = ("", "trainer", *_BASES)
"""Options that may be in a file of their own; the empty name stands for `--config`."""
_NO_PART = (*TRAINER_COMMANDS, "init_args", "dict_kwargs")
"""Keys of configurations that are not part of the names of options in messages."""
_FIRST_OPTIONS = {
    *("help", "help_all", "print_config", "config", "seed_everything", "max_env_steps", "num_threads", "ckpt_path"),
    *("init_from", "record", "record_as", "model", "model.help", "data", "data.help", "subcommand"),
    *(f"data.{name}" for name in ("env_id", "num_envs", "rollout_length", "rollouts_per_epoch", "backend")),
    *("data.env.kwargs", "data.evaluation.episodes"),
}
"""Options that `--help` lists."""
say = rank_zero_only(print_line)


_YAML = "yaml_with_none"


def _load_yaml(text: str) -> Any:
    """Return the content of YAML in which `None` means null: the parser writes null in nested options as None."""
    tokens = [x for x in yaml.scan(text) if isinstance(x, yaml.ScalarToken)] if "None" in text else []
    for token in reversed([x for x in tokens if x.plain and x.value == "None"]):
        text = text[: token.start_mark.index] + "null" + text[token.end_mark.index :]
    return get_loader("yaml")(text)


def _dump_yaml(settings: Any) -> str:
    # In ASCII, which every system reads alike: the parser reads files in the encoding of the system.
    return f"# lightning=={version('lightning')}\n{yaml.safe_dump(settings, sort_keys=False)}"


set_loader(_YAML, _load_yaml, (yaml.YAMLError,))
set_dumper(_YAML, _dump_yaml)


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
        num_threads: Number of CPU threads of PyTorch. null: 1, the fastest, for policies of at most 500,000
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


def search_beside(config: str | None) -> None:
    """Let Python find modules in the folder of a configuration, if it is a file."""
    if config is not None and Path(config).is_file():
        folder = str(Path(config).absolute().parent)
        if folder not in sys.path:
            sys.path.append(folder)


class ActionConfig(ActionConfigFile):
    """The option `--config`, which takes a file or the name of a shipped configuration."""

    def __call__(self, parser: Any, cfg: Any, values: Any, option_string: str | None = None) -> None:
        try:
            resolved = resolve_config(values)
            if Path(resolved).is_file():  # the parser's own errors do not name the file
                found, as_parsed = read_yaml(resolved, "config"), _content("", resolved, Path())[0]
                check(isinstance(found, dict), "config", resolved, "a file with options, such as model and data")
                expected = "UTF-8 as the encoding of this system: set the environment variable PYTHONUTF8=1"
                check(str(found) == str(as_parsed), "config", resolved, expected)
        except ConfigurationError as error:
            raise argparse.ArgumentError(None, str(error)) from error
        search_beside(resolved)
        super().__call__(parser, cfg, resolved, option_string)  # type: ignore[no-untyped-call]


class ShortHelp(DefaultHelpFormatter):
    """Help on the options of a first run; `--help_all` lists all options."""

    def add_argument(self, action: argparse.Action) -> None:
        """Add an option if it is one of these."""
        if action.dest in _FIRST_OPTIONS or "--help_all" in CommandParser.given:
            super().add_argument(action)


_RUN = (("", run_options), ("", record_options), ("trainer", Trainer), ("data", RolloutDataModule))


class CommandParser(LightningArgumentParser):
    """A parser that answers a mistake with the option, its value and a suggestion, instead of the usage.

    Attributes:
        given: The arguments of the program.
        folder: The current folder of the program.
        sources: Name of a group of options, and the class or function whose parameters they are.
    """

    given: Sequence[str] = ()
    folder = Path()
    sources: Sequence[tuple[str, Any]] = _RUN

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # as in Lightning
        # Abbreviated options are refused, as in a configuration.
        defaults = {"prog": "lightning-rl", "allow_abbrev": False, "parser_mode": _YAML}
        super().__init__(*args, **{**defaults, **kwargs})

    def add_class_arguments(self, theclass: Any, nested_key: str | None = None, *args: Any, **kwargs: Any) -> list[str]:
        """Add the options of a class; `--model.help` leaves out the spaces, which the data give."""
        self.usage = f"{self.prog} [--{nested_key}.OPTION VALUE ...]"  # instead of all options, which follow
        if nested_key == "model":
            kwargs["skip"] = {"observation_space", "action_space"}
        return list(super().add_class_arguments(theclass, nested_key, *args, **kwargs))

    def add_method_arguments(self, theclass: Any, themethod: str, *args: Any, **kwargs: Any) -> list[str]:
        """Add the arguments of a method of the Trainer, and the options of every run."""
        self.usage = f"lightning-rl {themethod} [--config NAME] [--model ALGORITHM] [--data.env_id ID] [options]"
        self.description = f"{COMMANDS[themethod]} Options of an algorithm: lightning-rl {themethod} --model.help PPO. "
        self.description += f"All options, also of Trainer and data: lightning-rl {themethod} --help_all."
        kwargs["skip"] = {*kwargs["skip"], "ckpt_path"}  # documented in `run_options`
        added = list(super().add_method_arguments(theclass, themethod, *args, **kwargs))
        self.add_function_arguments(run_options)
        if themethod == "predict":
            self.add_function_arguments(record_options)
        self.add_argument("--help_all", action="help", help="Show all options and exit.")
        return [*added, "ckpt_path"]

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:
            super().error(message, ex)
        os.chdir(self.folder)  # the parser reads a configuration in the folder of that file
        given = [*settings(self.given)]
        classes, mistakes = _chosen_classes(given)
        types: dict[str, Any] = {"seed_everything": bool | int}
        for group, source in [*self.sources, *((option, cls) for option, _, cls in classes)]:
            types |= {f"{group}.{name}".removeprefix("."): hint for name, hint in types_of(source).items()}
        # Options of a class that cannot be imported are unknown.
        mistakes = mistakes or [*_mistakes(given, {name: x for name, x in types.items() if name not in _BASES})]
        for option, _, cls in classes:
            required = [name for name in types_of(cls) if name.partition(".")[0] not in defaults_of(cls)]
            mistakes += [(f"are required: {name}", f"{option}.{name} required") for name in required]
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown in shipped_configs() or (unknown != message and Path(unknown).is_file()):
            mistakes.append((unknown, f"{unknown!r} is no option: expected --config {unknown}"))
        mistakes.append(("not accepted before subcommand", "expected a command first: lightning-rl fit --config NAME"))
        # The parser names the first mistake only, and knows more: the other settings may be right.
        # An option of the model without a value is `--model` in its message.
        lacks_value = message.endswith("expected one argument")
        found = [text for key, text in mistakes if key in message or (lacks_value and "is not valid" in text)]
        text = "\n".join(found) or message
        text = (None if ex is None else error_message(ex)) or text
        command = next(iter(self.given), "")
        helps = [f"lightning-rl {command} --help_all" if command in TRAINER_COMMANDS else f"{self.prog} --help"]
        helps += [f"--{option}.help {value}" for option, value, _ in classes]
        sys.stderr.write(f"lightning-rl: error: {text}\nAll options: {', '.join(helps)}\n")
        sys.exit(2)


def settings(arguments: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield the options that arguments set, in configurations too, with their values: `("data.num_envs", 8)`.

    An option that stands beside `class_path` instead of under `init_args` is named `model.class_path.gamma`.
    """
    for argument, following in pairwise([*arguments, ""]):
        option, equals, value = argument.partition("=")
        if option == "-c" or option.startswith("--"):
            name = "" if option in ("-c", "--config") else option.removeprefix("--").rstrip("+")
            name = ".".join(part for part in name.split(".") if part not in _NO_PART)
            yield from _flat(name, *_content(name, value if equals else following, Path()))


def unknown_settings(group: str, parameters: Iterable[Parameter]) -> list[str]:
    """Return the options of a group that were set, maybe for another class, and are not among `parameters`."""
    known = {"class_path", *(x.name for x in parameters)}
    names = [name.split(".") for name, _ in settings(CommandParser.given)]
    return sorted({".".join(x) for x in names if x[0] == group and len(x) > 1 and x[1] not in known})


def _flat(name: str, content: Any, folder: Path) -> Iterator[tuple[str, Any]]:  # YAML
    if name in _FILES and isinstance(content, str):  # a file that a configuration names, beside it
        content, folder = _content(name, content, folder)
    if isinstance(content, dict):
        for key, value in content.items():
            beside = "class_path" in content and key not in ("class_path", *_NO_PART)
            outer = f"{name}.class_path" if beside else name
            yield from _flat(outer if key in _NO_PART else f"{outer}.{key}".removeprefix("."), value, folder)
    elif isinstance(content, list) and name in _BASES:
        for entry in content:
            yield from _flat(name, entry, folder)
    elif name:
        yield name, content


def _content(name: str, value: str, folder: Path) -> tuple[Any, Path]:  # YAML
    """Return the content of a file or an argument, None if the parser will report an error in it, and its folder."""
    try:
        path = folder / (value if name else resolve_config(value))
        if name in _FILES and path.is_file():
            return yaml.load(path.read_text(), YamlLoader), path.parent
        return yaml.safe_load(value), folder
    except (OSError, ValueError, yaml.YAMLError):
        return None, folder


def chooses_data_class(arguments: Sequence[str]) -> bool:
    """Return whether arguments, or a configuration that they name, choose the class of the data.

    If not, the options of `RolloutDataModule` are the options of `data` itself.
    """
    names = ("data", "data.class_path", "data.help")
    return any(name in names and isinstance(value, str) for name, value in settings(arguments))


def _chosen_classes(given: Sequence[tuple[str, Any]]) -> tuple[list[tuple[str, str, type]], list[tuple[str, str]]]:
    """Return option, value and class for each value that names a class, and value and message for each other value."""
    chosen, messages = {}, []
    for name, value in given:
        option = name.removesuffix(".class_path").removesuffix(".help")
        if option in _BASES and isinstance(value, str):
            known = {cls.__name__: cls for cls in _subclasses(_BASES[option]) if cls.__name__[0] != "_"}
            try:
                cls = known.get(value) or import_class(option, value, _BASES[option])
                chosen[option + value if option == "trainer.callbacks" else option] = (option, value, cls)
            except ConfigurationError as error:
                other = ": expected the name of a class of lightning_rl or Lightning, or package.module.Class"
                hint = "" if "." in value else f"is no known class{did_you_mean(value, known) or other}"
                if value.endswith((".yaml", ".yml")):
                    hint = f"does not exist{other}, or a file"
                messages.append((value, f"{option}={value!r} {hint}" if hint else str(error)))
    return [*chosen.values()], messages


def _subclasses(cls: type[Any]) -> list[type]:
    return [one for subclass in cls.__subclasses__() for one in (subclass, *_subclasses(subclass))]


def _mistakes(given: Sequence[tuple[str, Any]], types: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield a part of the parser's message and a better one for each option that is unknown, wrong or missing."""
    names = {name.removesuffix(".class_path") for name, _ in given}
    if missing := [name for name in ("model", "data.env_id") if name not in names]:
        # The configuration beside a checkpoint may name any class, so the user has to name the configuration.
        beside = config_of(path) if (path := Path(str(dict(given).get("ckpt_path")))).is_file() else None
        start = "ppo/cartpole, or --model PPO --data.env_id CartPole-v1" if beside is None else relative(beside)
        yield f".{missing[-1]}", f"{' and '.join(missing)} required: expected for example --config {start}"
    for name, value in given:
        group, _, last = name.rpartition(".")
        shown = f"{name.replace('.class_path', '')}={value!r}"
        option = name.removesuffix(".class_path").removesuffix(".help")
        if group.endswith(".class_path"):
            yield last, f"{shown} is beside class_path: expected it under init_args"
        elif option in _BASES or any(name.startswith(f"{x}.") for x in types):
            continue
        elif any(x.startswith(f"{name}.") for x in types):
            hint = "".join(f"; did you mean {x}?" for x in types if x == f"{name}_id")
            yield last, f"{shown} is not valid: expected a dict of its options{hint}"
        elif name not in types:
            yield last, f"{shown} is no option{did_you_mean(option, [*types, *_BASES])}"
        elif not _fits(value, types[name]):
            yield last, f"{shown} is not valid: expected {_expected(types[name])}"
        elif all(other in types for other, _ in given if other.endswith(f".{last}")):  # the message names no group
            yield f"Option '{last}' is not accepted", f"{shown} is no option, since the class sets {last} itself"


def _fits(value: object, hint: Any) -> bool:  # a type
    parser = ArgumentParser(exit_on_error=False)
    try:
        parser.add_argument("--value", type=list[hint])  # since null fits every option whose default is null
        parser.parse_object({"value": [value]})
    except (ArgumentError, ValueError) as error:
        return isinstance(error, ValueError)  # not a type that the parser can check
    return True


def _expected(hint: Any) -> str:  # a type
    origin, parts = get_origin(hint) or hint, get_args(hint)
    if origin in (Union, UnionType, Literal):
        *first, last = dict.fromkeys(str(part) if origin is Literal else _expected(part) for part in parts)
        return f"{', '.join(first)} or {last}" if first else last
    if origin in (list, Sequence):
        return f"a list in brackets: [{_expected(parts[0])}, ...]"
    words = {int: "an integer", float: "a number", bool: "true or false", str: "text", dict: "a dict", NoneType: "null"}
    return words.get(origin, getattr(origin, "__name__", str(origin)))

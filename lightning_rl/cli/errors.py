"""Errors of the command line: one message, from one rank."""

from __future__ import annotations

import inspect
import os
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from jsonargparse import ArgumentParser
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch import loggers
from lightning.pytorch.cli import LightningArgumentParser

from lightning_rl import algorithms, callbacks
from lightning_rl.callbacks import progress_bars
from lightning_rl.checkpointing import atomic
from lightning_rl.checkpointing.atomic import CheckpointFailure, LogFailure
from lightning_rl.environments import EnvironmentFailure
from lightning_rl.tools.export import RoundTripError
from lightning_rl.training.schedules import OR_SCHEDULE
from lightning_rl.validation import ConfigurationError, did_you_mean

# Seconds that the ranks started by this one get before they are ended by force: to say what happened to them; and to
# notice on their own that this one is about to end, which those that wait for it in a collective call do not.
_TO_SAY, _TO_NOTICE = 10.0, 2.0
# Of a rank that another one started, that one.
_PARENT = os.getppid()
_CLAIM = "lightning_rl/failed"
DEBUG = "LIGHTNING_RL_DEBUG"
"""Environment variable that has errors shown with their whole traceback."""
_CONNECTION_LOST = re.compile(r"[Cc]onnection (closed|reset|refused)|Broken pipe|gloo/transport|NCCL|TCPStore")


class RankFailure(RuntimeError):
    """Another rank is gone and did not say why."""


def end_all_ranks(error: Exception, children: list[subprocess.Popen[bytes]]) -> None:
    """End this rank and those it started because of an error; return on the one rank that is to tell it.

    What fails on every rank, such as a gradient that is not finite, is told once; and that another rank is gone is
    told by no rank if that one says itself what happened to it.

    Args:
        error: What was raised on this rank.
        children: Processes of the ranks that this one started; none where something else did.

    Raises:
        SystemExit: Another rank tells what happened.
        RankFailure: Another rank is gone, and cannot tell.
    """
    # Held until the others have ended: the first rank serves it.
    store = torch.distributed.distributed_c10d._get_default_store()
    started = list(children)
    children.clear()  # or Lightning's observer would kill this process as soon as it sees one of them end
    if not _is_connection_lost(error):
        tells = _claims(store)
        _wait(started, _TO_NOTICE if tells else _TO_SAY)
        if tells:
            return
        sys.exit(1)
    codes = _wait(started, _TO_SAY)
    if _is_claimed(store, 0.0 if started else _TO_SAY):
        sys.exit(1)
    raise RankFailure(_what_happened(codes)) from error


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and those that led to it, each once: one that is raised twice may be its own cause."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        yield error
        seen.add(id(error))
        error = error.__cause__ or error.__context__


def _is_connection_lost(error: BaseException) -> bool:
    """Whether everything began with the connection to another rank."""
    *_, error = causes(error)
    known = isinstance(error, torch.distributed.DistError)
    return known or (isinstance(error, RuntimeError) and _CONNECTION_LOST.search(str(error)) is not None)


def _claims(store: Any) -> bool:  # noqa: ANN401 - torch has no type for it where it lacks distribution
    """Whether this rank is the first to fail."""
    try:
        return bool(store.add(_CLAIM, 1) == 1)
    except RuntimeError:  # the first rank, which serves the store, is gone
        return True


def _is_claimed(store: Any, seconds: float) -> bool:  # noqa: ANN401 - likewise
    """Whether some rank says what happened, now or within some seconds."""
    deadline = time.monotonic() + seconds
    while os.getppid() == _PARENT:  # asking the store of a rank that was killed prints pages
        try:
            if store.check([_CLAIM]):
                return True
        except RuntimeError:
            return False
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.1)
    return False


def _wait(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> list[int]:
    """Return the exit codes of processes once they have ended; kill those that take too long."""
    deadline = time.monotonic() + seconds
    codes = []
    for process in processes:
        try:
            codes.append(process.wait(max(0.0, deadline - time.monotonic())))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            codes.append(0)  # it did not fail, it was made to end
    return codes


def _what_happened(codes: Sequence[int]) -> str:
    """Say which rank is gone, as far as the exit codes of the further ranks tell."""
    for rank, code in enumerate(codes, start=1):
        if code < 0:
            return f"rank {rank} was killed by {signal.Signals(-code).name}"
        if code > 0:
            return f"rank {rank} ended with exit code {code}"
    return "the connection to another rank was lost: it was killed, or its own error says more"


_OURS = (
    CheckpointFailure,
    ConfigurationError,
    EnvironmentFailure,
    FloatingPointError,
    LogFailure,
    MisconfigurationException,
    RankFailure,
    RoundTripError,
)
# Of the folder of a logger, a figure, an export. Where a file is not there, the traceback says who looked for it.
_NOT_USABLE = (PermissionError, NotADirectoryError, FileExistsError)
_UNION = "Does not validate against any of the Union subtypes"
# What the parser says about each type of a union that an option could have had.
_NOISE = re.compile(
    rf"(- )?({_UNION}|Subtypes: |Errors:|Expected a <class 'NoneType'>|Given value type: |Given value: \w+\()"
)
# The options of such a class are not among those of `--help`.
_OF_CLASS = re.compile(r"(model|data|trainer\.\w+): Problem with given class_path '(?:lightning_rl\.)?([\w.]+)'")
# What the parser says of a command that there is not, or none.
_NO_COMMAND = re.compile(
    r"(?:argument subcommand: invalid choice: '(.*?)' \(choose from |expected \"subcommand\" to be one of \{)([\w', ]+)"
)
# What it says of the path of a class that leads nowhere, or to a class of another kind.
_NO_IMPORT = re.compile(
    r'Parser key "([^"]+)"(?s:.*?)Problem with given class_path '
    r"'([\w.]+)':\s+(module .* has no attribute '\w+'|No module named .*)"
)
_NO_SUBCLASS = re.compile(
    r'Parser key "([^"]+)"(?s:.*?)Import path does not correspond to (a subclass of \w+)(?s:.*?)Given value: (.*)'
)
# What it says of an option that is neither a number nor a dict, which is what schedules are for it.
_NO_SCHEDULE = re.compile(
    rf'Parser key "(\w+)":\s+{_UNION}\s+'
    r"Subtypes: \[<class 'float'>, dict\[str, typing\.Any\](?s:.*?)Given value: (.*)"
)
# What it says of options that must be there, with the command before those of a run.
_REQUIRED = re.compile(r"the following arguments are required: (.+)")
_OF_COMMAND = re.compile(r"(fit|validate|test|predict)\.")
# What to begin with.
_EXAMPLES = {"model": "PPO", "data.env_id": "CartPole-v1"}
_FRAME = re.compile(r'^  File "(.+)", line (\d+), in (.+)$', re.MULTILINE)
_UNKNOWN_OPTION = re.compile(r"(?:ccept option '|Option '|unrecognized arguments: --)([\w.]+)")


class OneErrorParser(LightningArgumentParser):
    """A parser that says what is wrong, and where to look, but does not list every option.

    Attributes:
        further_commands: Commands of the program that are none of this parser's.
    """

    further_commands: tuple[str, ...] = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - those of Lightning
        # An option that lacks its end is misspelt, on the command line as in a file.
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print one message and exit with status 2."""
        if not self.exit_on_error:
            super().error(message, ex)
        parser = getattr(ex, "subcommand_parser", None) or self
        text = (error_message(ex) if ex is not None else None) or _brief(message)
        of_class = _OF_CLASS.match(text)
        if no_command := _NO_COMMAND.match(text):
            text = _not_a_command(no_command[1], [*re.findall(r"\w+", no_command[2]), *self.further_commands])
        program = parser.prog.replace(" [options]", "")
        if (required := _REQUIRED.fullmatch(text)) is not None:
            if (command := _OF_COMMAND.match(required[1])) is not None:
                program = f"{program} {command[1]}"
            text = _missing(_OF_COMMAND.sub("", required[1]).split(", "), parser)
        sys.stderr.write(f"lightning-rl: error: {text}{_near_options(parser, text, of_class)}\n")
        which = f"--{of_class[1]}.help {of_class[2]}" if of_class else "--help"
        sys.stderr.write(f"All options: {program} {which}\n")
        sys.exit(2)


def _not_a_command(given: str | None, known: list[str]) -> str:
    """Say which commands there are, where there is none of this name, or none was given."""
    if given is None:
        return f"a command is missing: expected one of {', '.join(known)}"
    return f"{given!r} is no command: expected one of {', '.join(known)}{did_you_mean(given, known)}"


def _missing(names: list[str], parser: ArgumentParser) -> str:
    """Say which options must be there, as they are written; of a run also what to begin with."""
    places = {action.dest for action in parser._actions if not action.option_strings}
    text = f"missing: {', '.join(name if name in places else f'--{name}' for name in names)}"
    if not set(names) <= set(_EXAMPLES):
        return text
    examples = " ".join(f"--{name} {_EXAMPLES[name]}" for name in sorted(names, reverse=True))
    return f"{text}; expected such as {examples}, or a configuration: --config ppo/cartpole"


def _near_options(parser: ArgumentParser, text: str, of_class: re.Match[str] | None) -> str:
    """Say which options are called nearly like the one that there is not."""
    if (unknown := _UNKNOWN_OPTION.search(text)) is None:
        return ""
    if of_class is not None:
        module, _, name = of_class[0].split("'")[1].rpartition(".")
        if (cls := getattr(sys.modules.get(module), name, None)) is None:
            return ""
        parser = ArgumentParser()
        parser.add_class_arguments(cls, fail_untyped=False)
    options = [option.removeprefix("--") for action in parser._actions for option in action.option_strings]
    known = [option for option in options if not option.endswith(".help")]
    longer = [option for option in known if option.startswith(unknown[1])]
    return did_you_mean(unknown[1], known, 0.8) or did_you_mean(unknown[1], longer, 0.0)


def error_message(error: BaseException) -> str | None:
    """Return what to tell the user, None where only a traceback would help.

    The parser wraps what a class raises when it is made; the cause of the error says more.
    """
    for cause in causes(error):
        if isinstance(cause, _OURS):
            return str(cause) + (_place(cause) if isinstance(cause, EnvironmentFailure) else "")
    if isinstance(error, _NOT_USABLE) and error.filename is not None:
        return f"{error.strerror}: {str(error.filename)!r}"
    return _brief(str(error)) if _UNION in str(error) else None


def end_with_message(error: BaseException) -> None:
    """End the process with one message and status 1; return where only a traceback would help, or one is wanted."""
    if not os.environ.get(DEBUG) and (message := error_message(error)) is not None:
        print(f"lightning-rl: error: {message}", file=sys.stderr, flush=True)
        raise SystemExit(1) from None


def _place(failure: EnvironmentFailure) -> str:
    """Say which line of an environment raised, in this process or in a worker: the traceback is not shown."""
    cause = failure.__cause__
    frames = traceback.extract_tb(cause.__traceback__) if cause is not None else []
    places = [(frame.filename, str(frame.lineno), frame.name) for frame in frames]
    if not places:
        # The first of those that a worker reports is of what was raised there.
        trace = "".join(getattr(failure, "__notes__", [])).partition("\nThe above exception was")[0]
        places = _FRAME.findall(trace)
    if not places or Path(places[-1][0]).is_relative_to(Path(__file__).parents[1]):
        return ""  # what found out that a worker is gone
    file, line, name = places[-1]
    return f"\n  at {file}:{line} in {name}"


def _brief(message: str) -> str:
    """Take what matters out of a message of the parser: `model: Option 'x' is not accepted`."""
    if unknown := re.search(r'Parser key "([^"]+)".*Expected a dot import path string: (\w+)\b', message, re.DOTALL):
        return _no_class(*unknown.groups())
    if no_import := _NO_IMPORT.search(message):
        return _not_importable(*no_import.groups())
    if no_subclass := _NO_SUBCLASS.search(message):
        return "{0}={2} is not valid: expected {1}".format(*no_subclass.groups())
    if no_schedule := _NO_SCHEDULE.search(message):
        field, value = no_schedule.groups()
        message = f"{message[: no_schedule.start()]}{field}={value} is not valid: expected a number{OR_SCHEDULE}"
    lines = [line.strip() for line in message.splitlines()]
    told = [line.removeprefix("- ") for line in lines if line and not _NOISE.match(line)]
    # A value that may be in a list or alone has the same expectation twice, once with what was given.
    text = "; ".join(x for i, x in enumerate(told) if not any(other.startswith(x) for other in told[i + 1 :]))
    text = re.sub(r'^Parser key "([^"]+)":', r"\1:", text).replace(":;", ":").replace("Not of type EnvSteps: ", "")
    return re.sub(r"a <class '(?:[\w.]+\.)?(\w+)'>", r"\1", re.sub(r"a typing\.Literal\[(.*?)\]", r"one of \1", text))


def _not_importable(field: str, class_path: str, why: str) -> str:
    """Say what is wrong with the path of a class, and which classes of that module are called nearly so."""
    module, _, name = class_path.rpartition(".")
    names = vars(sys.modules[module]) if module in sys.modules else {}
    known = [found for found, cls in names.items() if inspect.isclass(cls)]
    return (
        f"{field}={class_path!r} cannot be imported ({why}): expected package.module.Class{did_you_mean(name, known)}"
    )


def _no_class(field: str, name: str) -> str:
    """Say that no class is called so, and which are called nearly so."""
    modules = (algorithms, callbacks, atomic, progress_bars, lightning_callbacks, loggers)
    known = {found for module in modules for found, cls in vars(module).items() if inspect.isclass(cls)}
    return (
        f"{field}={name!r} is unknown: expected the name of a class, or package.module.Class{did_you_mean(name, known)}"
    )

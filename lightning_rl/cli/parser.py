"""What the command line gives every Trainer, and how it talks."""

from __future__ import annotations

import ast
import json
import math
import os
import re
import shlex
from argparse import Action
from collections.abc import Callable, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

import jsonargparse
import yaml
from jsonargparse import Namespace
from jsonargparse.typing import register_type
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only  # type: ignore[attr-defined]

from lightning_rl.checkpointing.atomic import LastCheckpoint
from lightning_rl.checkpointing.run_folders import configurations, next_configuration
from lightning_rl.distributed import gather_ranks
from lightning_rl.rollouts.episode import Episode
from lightning_rl.tools.curves import RUN_FOLDER
from lightning_rl.tools.shipped_configs import resolve
from lightning_rl.validation import is_int

_Word = TypeVar("_Word", bound=str)
# A null that was given in place of another default must be in the file.
_RENAMED = tuple(map(int, jsonargparse.__version__.split(".")[:2])) >= (4, 49)
_KEEP_NULL = {"skip_unset" if _RENAMED else "skip_none": False}


class EnvSteps(int):
    """The type of options that are environment steps: `1e5`, as other libraries have it, is 100000."""


def _env_steps(given: object) -> int:
    try:
        steps = float(str(given))  # which a bool has none of
    except ValueError:
        steps = math.nan
    if not steps.is_integer():
        raise ValueError("expected a whole number such as 100000 or 1e5")
    return int(steps)


register_type(EnvSteps, int, _env_steps, type_check=lambda value, _: is_int(value))


class SaveConfig(SaveConfigCallback):
    """Save the configuration of a training run in its folder, such that using it again starts a run of its own."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Save it, but not when a run is evaluated."""
        if stage == "fit":
            super().setup(trainer, pl_module, stage)

    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Save it where the run keeps its files, beside those of earlier starts unless it equals the last of them.

        A log that is elsewhere gets a file with the path of the folder.
        """
        folder = Path(trainer.default_root_dir)
        folder.mkdir(parents=True, exist_ok=True)
        text, earlier = configuration(self.parser, self.config), configurations(folder)
        if not earlier or earlier[-1].read_text() != text:
            next_configuration(folder).write_text(text)
        for logger in trainer.loggers:
            if isinstance(logger, CSVLogger | TensorBoardLogger):
                logger.experiment  # noqa: B018 - makes its folder, and warns where there are files in it
                log = Path(logger.log_dir)
                if log.resolve() != folder.resolve():
                    (log / RUN_FOLDER).write_text(f"{os.path.relpath(folder, log)}\n")


def configuration(parser: LightningArgumentParser, config: Namespace) -> str:
    """Return the YAML of a run's configuration; used again, it starts a new run."""
    kept = config.clone()
    kept["ckpt_path"] = None
    kept["resume_changes"] = "refuse"
    return str(parser.dump(kept, **_KEEP_NULL))


class EpisodeLines(Callback):
    """Print what became of the episodes of `predict`, on all ranks.

    A callback, since the Trainer returns the episodes of one rank, and none at all from processes that it spawned.
    """

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin with no episode."""
        self.lines: list[str] = []

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: list[Episode],
        *args: Any,  # noqa: ANN401
    ) -> None:
        """Take in the episodes of this rank."""
        for episode in outputs:
            ending = "terminated" if episode.terminated else "truncated"
            self.lines.append(f"return {episode.episode_return:g}, {episode.length} steps, {ending}")

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print those of all ranks, in their order."""
        for number, line in enumerate(chain.from_iterable(gather_ranks(self.lines))):
            say(f"episode {number}: {line}")


def as_class_spec(argument: str, actions: Sequence[Action], namespace: Namespace | None) -> str:
    """Return an argument that sets a part of a class spec as one that sets the whole of it; others as they are.

    For the parser a class spec is a dict like any other, and it takes `init_args` for a word of its own.

    Args:
        argument: `--optimizer.class_path=…`, `--optimizer.init_args.momentum=0.9`, or of one leaf of an observation
            `--network.camera.init_args.width=64`.
        actions: Of the parser.
        namespace: What was set before; a class spec that the argument replaces is taken out of it, since the parser
            fails where one takes the place of another.
    """
    option, _, text = argument.partition("=")
    part = re.fullmatch(r"--(\w+)(?:\.(?:(.+?)\.)?(class_path|init_args\.(.+)))?", option)
    if part is None or not any(action.dest == part[1] and _takes_dict(action) for action in actions):
        return argument
    name, leaf, which, key = part.groups()
    before = _plain(namespace.get(name)) if namespace else None
    if namespace and isinstance(before, dict) and "class_path" in before:
        namespace[name] = None
    if which is None:
        return argument
    leaves = before if leaf is not None and isinstance(before, dict) and "class_path" not in before else {}
    spec = before if leaf is None else leaves.get(leaf)
    spec = {"class_path": spec} if isinstance(spec, str) else dict(spec or {})
    if key is not None:
        *outer, last = key.split(".")
        arguments = spec["init_args"] = dict(spec.get("init_args") or {})
        for one in outer:
            arguments[one] = arguments = dict(arguments.get(one) or {})
        arguments[last] = _value(text)
    elif "class_path" in spec:  # what was an argument of another class
        spec = {"class_path": text}
    else:
        spec = {"class_path": text, **spec}
    return f"--{name}={json.dumps(spec if leaf is None else {**leaves, leaf: spec})}"


def _takes_dict(action: Action) -> bool:
    """Whether an option can be a dict."""
    kind = getattr(action, "_typehint", None)
    return any((get_origin(one) or one) is dict for one in (kind, *get_args(kind)))


def _plain(value: Any) -> Any:  # noqa: ANN401 - what a parser made of an option
    """Return a class as its path, and a namespace as a dict."""
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    return value.as_dict() if isinstance(value, Namespace) else value


def _value(text: str) -> Any:  # noqa: ANN401 - of any argument
    """Return what an argument stands for; the parser has made Python of some already: `None`."""
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return yaml.safe_load(text)


def chooses_data_class(args: Sequence[str]) -> bool:
    """Whether arguments, or a configuration that they name, say by a `class_path` which class the data are of.

    Where none does, the options of `RolloutDataModule` are those of `data` itself.
    """
    for argument, following in pairwise([*args, ""]):
        name, given, value = argument.partition("=")
        value = value if given else following
        if name == "--data.class_path" or name.startswith("--data.init_args"):
            return True
        if name == "--data" and _chooses(_content(value)):
            return True
        if name in ("-c", "--config") and any(_chooses(x.get("data")) for x in _parts(_content(value, resolve))):
            return True
    return False


def _chooses(data: Any) -> bool:  # noqa: ANN401
    """Whether what is given for `data` is the name of a class, or has one."""
    return isinstance(data, str) or (isinstance(data, dict) and "class_path" in data)


def _parts(content: Any) -> list[dict[str, Any]]:  # noqa: ANN401
    """Return a configuration, of a command or of the whole program, and those of commands in it."""
    return [x for x in (content, *content.values()) if isinstance(x, dict)] if isinstance(content, dict) else []


def _content(value: str, name: Callable[[str], str] = str) -> Any:  # noqa: ANN401 - whatever is in it
    """Return what a file has, or an argument itself; nothing where the parser will say what is wrong with it."""
    try:
        value = name(value)
        return yaml.safe_load(Path(value).read_text() if Path(value).is_file() else value)
    except (OSError, ValueError, yaml.YAMLError):
        return None


def default_checkpoints(folder: Path, given: list[Callback], validates: bool) -> list[Callback]:
    """Return what saves the newest checkpoint and, unless the configuration chooses by something else, the best one.

    A `LastCheckpoint` of the configuration saves in the same folder unless it has its own: `--ckpt_path last` looks
    there, wherever the logger writes.
    """
    added: list[Callback] = []
    for callback in given:
        if isinstance(callback, LastCheckpoint) and callback.dirpath is None:
            callback.dirpath = str(folder)
    chooses = any(isinstance(callback, ModelCheckpoint) and callback.monitor is not None for callback in given)
    if validates and not chooses:
        added.append(ModelCheckpoint(folder, "best-{step}", monitor="val/episode_return", mode="max"))
    if not has(given, LastCheckpoint):
        added.append(LastCheckpoint(folder))
    return added


def as_list(given: _Word | list[_Word]) -> list[_Word]:
    """Return a list, of one word where no list was given: `--record_as video` needs no brackets."""
    return given if isinstance(given, list) else [given]


def has(callbacks: list[Callback], kind: type[Callback]) -> bool:
    """Whether one of the callbacks is of a kind."""
    return any(isinstance(callback, kind) for callback in callbacks)


def relative(path: str | Path) -> str:
    """Return a path as it can be typed in a shell, from the current folder where it lies in it."""
    path = Path(path).absolute()
    return shlex.quote(str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path))


@rank_zero_only
def say(message: str) -> None:
    """Print a line, on the first rank only."""
    print(message, flush=True)

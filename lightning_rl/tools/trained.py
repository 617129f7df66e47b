"""Uses of a checkpoint: load its algorithm and environments, play episodes, export its policy."""

from __future__ import annotations

import contextlib
import copy
import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import torch
from lightning.pytorch import LightningModule

from lightning_rl import algorithms
from lightning_rl.algorithms import OnPolicyAlgorithm
from lightning_rl.checkpointing.format import CHECKPOINT_KEY, read_checkpoint
from lightning_rl.checkpointing.run_folders import RUNS, configurations, find_checkpoint, folder_around, run_root
from lightning_rl.data.datamodule import RolloutDataModule, options_of_run
from lightning_rl.data.evaluation import Evaluator
from lightning_rl.data.recorded_episodes import RecordedEpisodes
from lightning_rl.environments.contract import TESTING
from lightning_rl.files import check_intact, read_yaml, relative
from lightning_rl.nested import Nested, map_leaves
from lightning_rl.tools.export import (
    FOLDER_PATTERN,
    PROGRAMS,
    TOLERANCE,
    ExportFormat,
    ProgramName,
    check_folder,
    check_options,
    export_policy,
)
from lightning_rl.training.checks import check_spaces
from lightning_rl.validation import ConfigurationError, as_list, check_positive_int, import_class, loading

_MAX_STEPS = 8
_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")


@dataclass(frozen=True)
class Score:
    """Returns of complete episodes.

    Attributes:
        mean: Mean of the undiscounted sums of raw rewards.
        std: Their standard deviation.
        episodes: Number of episodes.
        deterministic: Whether actions were the mode of the policy instead of samples.
        metric: Name of the mean in logs.
    """

    mean: float
    std: float
    episodes: int
    deterministic: bool
    metric: str = "test/episode_return"


def load_algorithm(path: str | Path, *, trust: Sequence[str] = (), field: str = "path") -> OnPolicyAlgorithm:
    """Return the algorithm in a checkpoint, of any class, on the CPU.

    Nothing is unpickled. A class that the checkpoint names is constructed only if it is a subclass of the class that
    its field expects. Modules are imported only from `lightning_rl`, `torch`, `gymnasium` and packages in `trust`,
    unless they are already imported.

    Args:
        path: The checkpoint.
        trust: Packages whose modules may be imported: `["my_package"]`.
        field: The option that names the checkpoint, for errors.

    Raises:
        ConfigurationError: The file is not a checkpoint of this package, its algorithm is unknown, or a class in it is
            not trusted, cannot be imported or does not fit its field.
    """
    check_intact(path, field)
    checkpoint = read_checkpoint(path, field, mapped=True)
    algorithm = OnPolicyAlgorithm
    if "_class_path" not in checkpoint["hyper_parameters"]:  # which load_from_checkpoint would import
        name = checkpoint[CHECKPOINT_KEY]["algorithm"]
        if name not in algorithms.__all__:
            raise ConfigurationError(
                f"{field}={str(path)!r} is of the class {name!r}, which is not in lightning_rl: expected a checkpoint "
                "of the command line; load this one with its own class's load_from_checkpoint"
            )
        algorithm = getattr(algorithms, name)
    return algorithm.load_from_checkpoint(path, map_location="cpu", trust=trust)


def find_trained(given: str | Path, config: str | Path | None = None) -> Path:
    """Return the path of a checkpoint that is given as a file, or as `last` or `best`.

    `last` and `best` are searched in the runs with the algorithm and environment of `config`, or else in all runs.
    """
    if given not in ("last", "best"):
        return Path(given)
    root = RUNS if config is None else _root_of(config_file(config))
    path = find_checkpoint(root, str(given), nested=config is None)
    if path is None:
        raise ConfigurationError(f"ckpt_path={given!r}: there is no {given} checkpoint under {root}")
    return path


def _root_of(config: Path) -> Path:
    content = _content(config)
    data = content["data"]
    options = (data.get("init_args") or {}) if "class_path" in data else data
    algorithm, env_id = content["model"].get("class_path"), options.get("env_id")
    if algorithm is None or env_id is None:
        raise ConfigurationError(
            f"config={str(config)!r} has no model or no env_id: expected the configuration of a run"
        )
    return run_root(content["trainer"].get("default_root_dir"), algorithm.rpartition(".")[2], env_id)


def _content(config: Path) -> dict[str, Any]:
    # With the content of files that the configuration names, as in `fit`.
    content = read_yaml(config, "config")
    content = content if isinstance(content, dict) else {}
    for name in ("model", "data", "trainer"):
        if isinstance(value := content.get(name), str):
            path = config.parent / value
            value = read_yaml(path, name) if path.is_file() else {"class_path": value}
        content[name] = value if isinstance(value, dict) else {}
    return content


def config_of(path: str | Path) -> Path | None:
    """Return the newest configuration in the run folder of a checkpoint, or beside the checkpoint, or None."""
    checkpoint = Path(path).absolute()
    places = folder_around(checkpoint), checkpoint.parent
    return next((found[-1] for place in places if place is not None and (found := configurations(place))), None)


def shipped_configs() -> dict[str, Path]:
    """Return the configurations that come with the package by name, such as `ppo/cartpole`."""
    package = Path(__file__).parents[1]
    inside = package / "configs"  # beside the package in a checkout
    folder = inside if inside.is_dir() else package.parent / "configs"
    return {path.relative_to(folder).with_suffix("").as_posix(): path for path in sorted(folder.glob("*/*.yaml"))}


def resolve_config(given: str) -> str:
    """Return the file of a shipped configuration; return files, URLs and YAML text unchanged.

    A `ConfigurationError` says that there is neither a file nor a shipped configuration of this name.
    """
    if Path(given).exists() or any(sign in given for sign in ":{\n"):
        return given
    shipped = shipped_configs()
    near = ", ".join(difflib.get_close_matches(given, shipped, cutoff=0.4) or ["ppo/cartpole"])
    expected = f"a file, or the name of a shipped configuration like {near}"
    if given not in shipped:
        raise ConfigurationError(f"config={given!r} does not exist: expected {expected}")
    return str(shipped[given])


def config_file(given: str | Path) -> Path:
    """Return the path of a configuration that is given as a file, or as the name of a shipped one."""
    path = Path(resolve_config(str(given)))
    if not path.is_file():
        raise ConfigurationError(f"config={str(given)!r} does not exist: expected the configuration of a run")
    return path


def load_trained(
    ckpt_path: str | Path, config: str | Path | None, trust: str | Sequence[str] | None
) -> tuple[Path, OnPolicyAlgorithm, RolloutDataModule]:
    """Return the path of a checkpoint (see `find_trained`), its algorithm and its environments.

    The modules of all class paths in a given `config` are trusted.
    """
    path = find_trained(ckpt_path, config)
    packages: list[str] = as_list(trust)
    content = None if config is None else _content(config_file(config))
    named = {text.rpartition(".")[0] for text in _strings(content) if _DOTTED.fullmatch(text)}
    model, data = load_algorithm(path, field="ckpt_path", trust=[*packages, *named]), load_data(path, config, packages)
    check_spaces(model, data)
    return path, model, data


def _strings(content: Any) -> Iterator[str]:  # YAML
    if isinstance(content, dict | list):
        for part in content.values() if isinstance(content, dict) else content:
            yield from _strings(part)
    elif isinstance(content, str):
        yield content


def load_data(path: str | Path, config: str | Path | None = None, trust: Sequence[str] = ()) -> RolloutDataModule:
    """Return the environments that a checkpoint was trained on.

    Everything in a given `config`, a file or the name of a shipped one, is trusted. Without it, the result of
    `config_of` is used or else the options in the checkpoint, and classes in them are trusted as in `load_algorithm`.
    Unknown environments, classes that are not trusted, and options that the checkpoint cannot hold raise a
    `ConfigurationError`.
    """
    if config is not None:
        return _environments(*_class_and_options(config_file(config)), f"config={str(config)!r}")
    with loading(trust):
        if (beside := config_of(path)) is not None:
            return _environments(*_class_and_options(beside), f"config={str(beside)!r}")
        checkpoint = read_checkpoint(path, "path")
        parts = [checkpoint.get(kind.__qualname__, {}) for kind in (RolloutDataModule, RecordedEpisodes)]
        stored: dict[str, Any] = next((part["settings"] for part in parts if "settings" in part), {})
        if "env_id" not in stored:
            raise ConfigurationError(f"config: the environment of {path} is unknown: expected the run's configuration")
        options = options_of_run(RolloutDataModule, stored, {}, "config: expected the run's configuration")
        return _environments(RolloutDataModule, options, f"path={str(path)!r}")


def _class_and_options(config: Path) -> tuple[type[RolloutDataModule], dict[str, Any]]:
    """Return the data class in a configuration and its options, without recorded episodes: playing needs none."""
    data = _content(config)["data"]
    if not data:
        raise ConfigurationError(f"config={str(config)!r} has no data: expected the configuration of a run")
    if "class_path" not in data:
        return RolloutDataModule, data
    module, _, name = str(data["class_path"]).rpartition(".")
    options = data.get("init_args") or {}
    if module.partition(".")[0] in ("", "lightning_rl") and name in ("RolloutDataModule", "RecordedEpisodes"):
        return RolloutDataModule, {option: value for option, value in options.items() if option != "episodes"}
    return import_class("data", data["class_path"], RolloutDataModule), options


def _environments(kind: type[RolloutDataModule], options: dict[str, Any], named: str) -> RolloutDataModule:
    try:
        return kind(**options)
    except (TypeError, ConfigurationError) as error:
        raise ConfigurationError(f"{named}: data: {error}") from error


def play_episodes(
    model: LightningModule, data: RolloutDataModule, episodes: int, seed: int = 0
) -> tuple[Score, list[Nested]]:
    """Play complete test episodes; return the score, and the observations of the first steps, each `[B, *shape]`."""
    check_positive_int("episodes", episodes)
    algorithm: Any = model
    policy = copy.copy(algorithm.policy)  # shares the parameters
    first_observations: list[Nested] = []

    def act(observations: Nested, *args: Any, **kwargs: Any) -> Any:  # as in `Policy.act`
        if len(first_observations) < _MAX_STEPS:
            first_observations.append(map_leaves(torch.clone, observations))
        return algorithm.policy.act(observations, *args, **kwargs)

    policy.act = act
    deterministic = data.evaluation.deterministic
    parameter = next(policy.parameters())
    with contextlib.closing(Evaluator(data.eval_spec)) as evaluator:
        played = evaluator.run_episodes(
            policy,
            range(episodes),
            (seed, TESTING, 0),
            parameter.device,
            data.num_agents,
            data.evaluation.num_envs,
            dtype=parameter.dtype,
            deterministic=deterministic,
        )
    returns = [episode.episode_return for episode in played]
    return Score(fmean(returns), pstdev(returns), len(returns), deterministic), first_observations


def export_checkpoint(
    ckpt_path: str = "last",
    format: ExportFormat = "onnx",
    output: str | None = None,
    programs: ProgramName | list[ProgramName] | None = None,
    config: str | None = None,
    episodes: int = 10,
    trust: str | list[str] | None = None,
) -> str:
    """Run the command `lightning-rl export` and return its report.

    Args:
        ckpt_path: The checkpoint: a file, or 'last' for the newest one or 'best' for the newest best one under runs;
            with --config, of its algorithm and environment.
        format: onnx for any runtime of ONNX (extra onnx), or torch_export for PyTorch.
        output: The folder; by default in `policies` in the run folder, or beside a checkpoint that is not in a run.
        programs: greedy takes the mode of the policy, sampled draws from it; by default both.
        config: Configuration of the run, for its environment; by default the one in the folder of the run.
        episodes: Episodes to play for the score in the description.
        trust: Packages, one or several as [a, b], whose classes and environments the checkpoint and the configuration
            beside it may name; lightning_rl, torch, gymnasium and the packages in --config are trusted.
    """
    names: list[ProgramName] = as_list(programs) or list(PROGRAMS)
    check_options(format, names)
    path, model, data = load_trained(ckpt_path, config, trust)
    run = folder_around(path.absolute()) or path.absolute().parent
    folder = output or run / "policies" / f"{format}-{FOLDER_PATTERN.format(model.env_steps)}"
    check_folder("output", folder, format, names)  # before episodes are played, which takes a while
    score, observations = play_episodes(model, data, episodes)
    env_id = data.spec.env_id
    written = export_policy(
        model, folder, env_id, format=format, programs=names, observations=observations, score=asdict(score)
    )
    return (
        f"{', '.join(names)} as {format} in {relative(written)}\n  policy:  {relative(path)}\n"
        f"  score:   {score.mean:g} ± {score.std:g} in {score.episodes} episodes of {env_id}\n"
        f"  checked: actions within {TOLERANCE:g} of the policy's on {len(observations)} steps of these"
    )

"""A checkpoint as what it is good for: its algorithm, the environments it was trained on, how well it does there."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import torch
import yaml
from jsonargparse import ArgumentError, ArgumentParser
from lightning.pytorch import LightningModule

from lightning_rl import algorithms
from lightning_rl.algorithms import OnPolicyAlgorithm
from lightning_rl.checkpoint_format import CHECKPOINT_KEY, read_checkpoint
from lightning_rl.datamodule import RolloutDataModule
from lightning_rl.environments.seeding import TESTING
from lightning_rl.evaluator import Evaluator
from lightning_rl.nested import Nested, map_leaves
from lightning_rl.recorded_episodes import RecordedEpisodes
from lightning_rl.runs import RUNS, find_checkpoint, run_root
from lightning_rl.shipped_configs import resolve
from lightning_rl.validation import ConfigurationError, check_positive_int, import_class

CONFIG = "config.yaml"
_MOST_STEPS = 8


@dataclass(frozen=True)
class Score:
    """What whole episodes gave.

    Attributes:
        mean: Of the returns: undiscounted sums of raw rewards.
        std: Their standard deviation.
        episodes: How many there were.
        deterministic: Whether the mode of the policy was played rather than samples.
        metric: What it is called in a log.
    """

    mean: float
    std: float
    episodes: int
    deterministic: bool
    metric: str = "test/episode_return"

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)


def load_algorithm(path: str | Path, field: str = "path") -> OnPolicyAlgorithm:
    """Return the algorithm in a checkpoint, of whichever class it is, on the CPU.

    Args:
        path: The checkpoint.
        field: The option that named it, for errors.

    Raises:
        ConfigurationError: It is no checkpoint of this package, or its class is not known.
    """
    checkpoint = read_checkpoint(path, field)
    options = checkpoint["hyper_parameters"]
    name = options.get("_class_path") or checkpoint[CHECKPOINT_KEY]["algorithm"]
    found: Any = None
    if name is not None:
        found = import_class(field, name) if "." in name else getattr(algorithms, name, None)
    if found is None:
        raise ConfigurationError(
            f"{field}={str(path)!r} is of the class {name!r}, which is none of this package: expected one that the "
            "command line trained; load it by its own class's load_from_checkpoint"
        )
    return found.load_from_checkpoint(path, map_location="cpu")  # type: ignore[no-any-return]


def find_trained(given: str | Path, config: str | Path | None = None) -> Path:
    """Return a checkpoint that was given as a file, or as `last` or `best`.

    Args:
        given: A file; or the newest checkpoint, or the newest of the best ones.
        config: A configuration, a file or the name of a shipped one, of whose algorithm and environment it has to be;
            None takes any under `runs`.

    Raises:
        ConfigurationError: There is none.
    """
    if given not in ("last", "best"):
        return Path(given)
    root = RUNS if config is None else _root_of(config_file(config))
    path = find_checkpoint(root, str(given), nested=config is None)
    if path is None:
        raise ConfigurationError(f"ckpt_path={given!r}: expected a checkpoint under {root}, there is none")
    return path


def _root_of(config: Path) -> Path:
    """Return the folder of the runs of a configuration."""
    content = yaml.safe_load(config.read_text())
    content = content if isinstance(content, dict) else {}
    model, data = content.get("model"), content.get("data")
    algorithm = model.get("class_path") if isinstance(model, dict) else model
    env_id = data.get("init_args", data).get("env_id") if isinstance(data, dict) else None
    if algorithm is None or env_id is None:
        raise ConfigurationError(f"config={str(config)!r} has no model or no env_id: expected the one of a run")
    root = (content.get("trainer") or {}).get("default_root_dir")
    return run_root(root, algorithm.rpartition(".")[2], env_id)


def config_of(path: str | Path) -> Path | None:
    """Return the configuration in the run folder of a checkpoint, or beside it; None where there is none."""
    folder = Path(path).absolute().parent
    candidates = (folder.parent / CONFIG, folder / CONFIG)
    return next((candidate for candidate in candidates if candidate.is_file()), None)


def config_file(given: str | Path) -> Path:
    """Return the file of a configuration, given as such or as the name of a shipped one.

    Raises:
        ConfigurationError: There is none.
    """
    try:
        path = Path(resolve(str(given)))
    except FileNotFoundError as error:
        raise ConfigurationError(str(error)) from error
    if not path.is_file():
        raise ConfigurationError(f"config={str(given)!r} does not exist: expected the configuration of a run")
    return path


def load_data(path: str | Path, config: str | Path | None = None) -> RolloutDataModule:
    """Return the environments that a checkpoint was trained on.

    Args:
        path: The checkpoint.
        config: Configuration of the run, a file or the name of a shipped one; None takes that of `config_of`, or
            without one what the checkpoint says.

    Raises:
        ConfigurationError: The configuration has no data, or neither says which environments these were.
    """
    config = config_of(path) if config is None else config
    if config is not None:
        return _from_config(config_file(config))
    checkpoint = read_checkpoint(path, "path")
    parts = [checkpoint.get(kind.__qualname__, {}) for kind in (RolloutDataModule, RecordedEpisodes)]
    stored: dict[str, Any] = next((part["settings"] for part in parts if "settings" in part), {})
    if "env_id" not in stored:
        raise ConfigurationError(f"config: nothing says which environment {path} is for: expected the file of its run")
    return RolloutDataModule(**stored)


def _from_config(path: Path) -> RolloutDataModule:
    content = yaml.safe_load(path.read_text())
    data = content.get("data") if isinstance(content, dict) else None
    if not isinstance(data, dict):
        raise ConfigurationError(f"config={str(path)!r} has no data: expected the configuration of a run")
    kind, data = _environments(data)
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(kind, "data", fail_untyped=False)
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes  # older releases call it so
    try:
        return instantiate(parser.parse_object({"data": data})).data  # type: ignore[no-any-return]
    except ArgumentError as error:
        raise ConfigurationError(f"config={str(path)!r}: {error}") from error


def _environments(data: dict[str, Any]) -> tuple[type[Any], dict[str, Any]]:
    """Return the class of a configuration's data, and its options; recorded episodes are not needed to play."""
    if "class_path" not in data:
        return RolloutDataModule, data
    module, _, name = data["class_path"].rpartition(".")
    options = data.get("init_args") or {}
    if module.partition(".")[0] in ("", __package__) and name in ("RolloutDataModule", "RecordedEpisodes"):
        return RolloutDataModule, {option: value for option, value in options.items() if option != "episodes"}
    return import_class("data", data["class_path"]), options


def play_episodes(
    model: LightningModule, data: RolloutDataModule, episodes: int, seed: int = 0
) -> tuple[Score, list[Nested]]:
    """Play whole test episodes.

    Args:
        model: An algorithm of this package.
        data: The environments.
        episodes: How many.
        seed: Root of the seeds of environments and actions.

    Returns:
        What they gave, and the observations of the first steps, each `[B, *shape]`.
    """
    check_positive_int("episodes", episodes)
    algorithm: Any = model
    watched = _Watched(algorithm.policy)
    evaluator = Evaluator(data.eval_spec, data.num_eval_envs)
    deterministic = data.eval_deterministic
    parameter = next(algorithm.policy.parameters())
    try:
        played = evaluator.play(
            watched,
            (data.observation_space, data.action_space),
            episodes,
            (seed, TESTING, 0),
            parameter.device,
            parameter.dtype,
            deterministic=deterministic,
            record=False,
        )
    finally:
        evaluator.close()
    returns = [episode.episode_return for episode in played]
    return Score(fmean(returns), pstdev(returns), len(returns), deterministic), watched.observations


class _Watched:
    """A policy of which the first observations are kept."""

    def __init__(self, policy: Any) -> None:  # noqa: ANN401 - of any make
        self.policy = policy
        self.observations: list[Nested] = []

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self.policy, name)

    def act(
        self,
        observations: Nested,
        generator: torch.Generator | None = None,
        deterministic: bool = False,
        **memory: Nested,
    ) -> Any:  # noqa: ANN401
        """Act as the policy does."""
        if len(self.observations) < _MOST_STEPS:
            self.observations.append(map_leaves(torch.clone, observations))
        return self.policy.act(observations, generator, deterministic, **memory)

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


def load_algorithm(path: str | Path) -> OnPolicyAlgorithm:
    """Return the algorithm in a checkpoint, of whichever class it is, on the CPU.

    Raises:
        ConfigurationError: It is no checkpoint of this package, or its class is not known.
    """
    checkpoint = read_checkpoint(path, "path")
    options = checkpoint["hyper_parameters"]
    name = options.get("_class_path") or checkpoint[CHECKPOINT_KEY]["algorithm"]
    found: Any = None
    if name is not None:
        found = import_class("path", name) if "." in name else getattr(algorithms, name, None)
    if found is None:
        raise ConfigurationError(
            f"path={str(path)!r} is of the class {name!r}, which is none of this package: expected one that the "
            "command line trained; load it by its own class's load_from_checkpoint"
        )
    return found.load_from_checkpoint(path, map_location="cpu")  # type: ignore[no-any-return]


def config_of(path: str | Path) -> Path | None:
    """Return the configuration in the run folder of a checkpoint, or beside it; None where there is none."""
    folder = Path(path).absolute().parent
    candidates = (folder.parent / CONFIG, folder / CONFIG)
    return next((candidate for candidate in candidates if candidate.is_file()), None)


def load_data(path: str | Path, config: str | Path | None = None) -> RolloutDataModule:
    """Return the environments that a checkpoint was trained on.

    Args:
        path: The checkpoint.
        config: Configuration of the run; None takes that of `config_of`, or without one what the checkpoint says.

    Raises:
        ConfigurationError: The configuration has no data, or neither says which environments these were.
    """
    config = config_of(path) if config is None else config
    if config is not None:
        return _from_config(Path(config))
    stored = read_checkpoint(path, "path").get(RolloutDataModule.__qualname__, {}).get("settings", {})
    if "env_id" not in stored:
        raise ConfigurationError(f"config: nothing says which environment {path} is for: expected the file of its run")
    return RolloutDataModule(**stored)


def _from_config(path: Path) -> RolloutDataModule:
    if not path.is_file():
        raise ConfigurationError(f"config={str(path)!r} does not exist: expected the configuration of a run")
    content = yaml.safe_load(path.read_text())
    data = content.get("data") if isinstance(content, dict) else None
    if not isinstance(data, dict):
        raise ConfigurationError(f"config={str(path)!r} has no data: expected the configuration of a run")
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(RolloutDataModule, "data", fail_untyped=False)
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes  # older releases call it so
    try:
        return instantiate(parser.parse_object({"data": data})).data  # type: ignore[no-any-return]
    except ArgumentError as error:
        raise ConfigurationError(f"config={str(path)!r}: {error}") from error


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

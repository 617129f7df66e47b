"""A checkpoint as what it is good for: its algorithm, the environments it was trained on, how well it does there."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import torch
from jsonargparse import ArgumentError, ArgumentParser
from lightning.pytorch import LightningModule

from lightning_rl import algorithms
from lightning_rl.algorithms import OnPolicyAlgorithm
from lightning_rl.checkpointing.format import CHECKPOINT_KEY, read_checkpoint
from lightning_rl.checkpointing.run_folders import RUNS, configurations, find_checkpoint, run_root
from lightning_rl.data.datamodule import RolloutDataModule
from lightning_rl.data.evaluation import Evaluator
from lightning_rl.data.recorded_episodes import RecordedEpisodes
from lightning_rl.environments.seeding import TESTING
from lightning_rl.files import check_intact, read_yaml
from lightning_rl.nested import Nested, map_leaves
from lightning_rl.options import nested
from lightning_rl.tools.shipped_configs import resolve
from lightning_rl.validation import ConfigurationError, check_positive_int, import_class, loading

_MOST_STEPS = 8
_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")


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


def load_algorithm(path: str | Path, field: str = "path", trust: Sequence[str] = ()) -> OnPolicyAlgorithm:
    """Return the algorithm in a checkpoint, of whichever class it is, on the CPU.

    A class that the checkpoint names is constructed only if it is a subclass of what its field expects, and no module
    but those of `lightning_rl`, `torch`, `gymnasium`, of packages in `trust` and already imported ones is imported.

    Args:
        path: The checkpoint.
        field: The option that named it, for errors.
        trust: Packages whose modules may be imported: `["my_package"]`.

    Raises:
        ConfigurationError: It is no checkpoint of this package, or its class is not known; or a class in it is not
            trusted, cannot be imported or is another one than its field expects.
    """
    check_intact(path, field, "an intact checkpoint")
    checkpoint = read_checkpoint(path, field, mapped=True)
    options = checkpoint["hyper_parameters"]
    name = options.get("_class_path") or checkpoint[CHECKPOINT_KEY]["algorithm"]
    found: Any = getattr(algorithms, str(name), None)
    if options.get("_class_path") is not None:
        with loading(trust):
            found = import_class("_class_path", name, OnPolicyAlgorithm)
    if not isinstance(found, type) or not issubclass(found, OnPolicyAlgorithm):
        raise ConfigurationError(
            f"{field}={str(path)!r} is of the class {name!r}, which is none of this package: expected one that the "
            "command line trained; load it by its own class's load_from_checkpoint"
        )
    return found.load_from_checkpoint(path, map_location="cpu", trust=trust)


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
    content = read_yaml(config, "config")
    content = content if isinstance(content, dict) else {}
    model, data = content.get("model"), content.get("data")
    algorithm = model.get("class_path") if isinstance(model, dict) else model
    env_id = data.get("init_args", data).get("env_id") if isinstance(data, dict) else None
    if algorithm is None or env_id is None:
        raise ConfigurationError(f"config={str(config)!r} has no model or no env_id: expected the one of a run")
    root = (content.get("trainer") or {}).get("default_root_dir")
    return run_root(root, algorithm.rpartition(".")[2], env_id)


def config_of(path: str | Path) -> Path | None:
    """Return the newest configuration in the run folder of a checkpoint, or beside it; None where there is none."""
    folder = Path(path).absolute().parent
    return next((found[-1] for place in (folder.parent, folder) if (found := configurations(place))), None)


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


def modules_named_in(config: str | Path | None) -> list[str]:
    """Return the modules of all dotted paths in a configuration that the user has named: they are trusted.

    Args:
        config: A file or the name of a shipped one; None: no modules.
    """
    content = None if config is None else read_yaml(config_file(config), "config")
    return sorted({text.rpartition(".")[0] for text in _strings(content) if _DOTTED.fullmatch(text)})


def _strings(content: Any) -> Iterator[str]:  # noqa: ANN401 - YAML
    if isinstance(content, dict | list):
        for part in content.values() if isinstance(content, dict) else content:
            yield from _strings(part)
    elif isinstance(content, str):
        yield content


def load_data(path: str | Path, config: str | Path | None = None, trust: Sequence[str] = ()) -> RolloutDataModule:
    """Return the environments that a checkpoint was trained on.

    A `config` that is given is trusted: whatever it names is imported and constructed. In the checkpoint and in a
    configuration beside it, a class is constructed only if it is a subclass of what its field expects, and no module
    but those of `lightning_rl`, `torch`, `gymnasium`, of packages in `trust` and already imported ones is imported;
    other options are plain data.

    Args:
        path: The checkpoint.
        config: Configuration of the run, a file or the name of a shipped one; None takes that of `config_of`, or
            without one what the checkpoint says.
        trust: Packages whose modules may be imported: `["my_package"]`.

    Raises:
        ConfigurationError: The configuration has no data, or neither says which environments these were; or a class is
            not trusted, cannot be imported or is another one than its field expects.
    """
    if config is not None:
        return _from_config(config_file(config))
    if (beside := config_of(path)) is not None:
        with loading(trust):
            kind, options = _environments(_data_of(beside))
            return _from_plain_data(kind, options, f"config={str(beside)!r}")
    checkpoint = read_checkpoint(path, "path")
    parts = [checkpoint.get(kind.__qualname__, {}) for kind in (RolloutDataModule, RecordedEpisodes)]
    stored: dict[str, Any] = next((part["settings"] for part in parts if "settings" in part), {})
    if "env_id" not in stored:
        raise ConfigurationError(f"config: nothing says which environment {path} is for: expected the file of its run")
    with loading(trust):
        return _from_plain_data(RolloutDataModule, nested(stored), f"path={str(path)!r}")


def _data_of(config: Path) -> dict[str, Any]:
    """Return the part of a configuration that is about the data."""
    content = read_yaml(config, "config")
    data = content.get("data") if isinstance(content, dict) else None
    if not isinstance(data, dict):
        raise ConfigurationError(f"config={str(config)!r} has no data: expected the configuration of a run")
    return data


def _from_plain_data(kind: type[RolloutDataModule], options: dict[str, Any], named: str) -> RolloutDataModule:
    """Construct environments from loaded data; the parser of configurations would construct what is nested in it."""
    try:
        return kind(**options)
    except TypeError as error:
        raise ConfigurationError(f"{named}: data: {error}") from error


def _from_config(path: Path) -> RolloutDataModule:
    kind, data = _environments(_data_of(path))
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
    module, _, name = str(data["class_path"]).rpartition(".")
    options = data.get("init_args") or {}
    if module.partition(".")[0] in ("", "lightning_rl") and name in ("RolloutDataModule", "RecordedEpisodes"):
        return RolloutDataModule, {option: value for option, value in options.items() if option != "episodes"}
    return import_class("data", data["class_path"], RolloutDataModule), options


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
    evaluator = Evaluator(data.eval_spec, data.evaluation.num_envs)
    deterministic = data.evaluation.deterministic
    parameter = next(algorithm.policy.parameters())
    try:
        played = evaluator.run_episodes(
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

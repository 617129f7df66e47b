"""Reads and writes recorded episodes as Minari data sets."""

from __future__ import annotations

import importlib.util
import os
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec

from lightning_rl.rollouts.episode import Episode
from lightning_rl.validation import ConfigurationError, how_to_install

_ROOT = "MINARI_DATASETS_PATH"


def write_minari(
    episodes: Sequence[Episode],
    folder: Path,
    name: str,
    space_pair: tuple[spaces.Space[Any], spaces.Space[Any]],
    env_id: str,
    algorithm: str,
) -> str:
    """Write recorded episodes losslessly as the first free version of a data set; return its id, `<name>-v<version>`.

    `folder` holds all data sets, as `MINARI_DATASETS_PATH`. Without Minari, or for episodes that it cannot store, a
    `ConfigurationError` is raised.
    """
    minari = check_can_write()
    from minari.data_collector import EpisodeBuffer

    folder = folder.absolute()  # Minari joins a relative path to itself
    buffers = []
    for number, episode in enumerate(episodes):
        last = np.arange(episode.length) == episode.length - 1
        assert episode.rewards is not None
        buffers.append(
            EpisodeBuffer(
                id=number,
                observations=episode.observations,
                actions=episode.actions,
                rewards=list(episode.rewards),
                terminations=list(last & episode.terminated),
                truncations=list(last & (not episode.terminated)),
            )
        )
    stem = re.sub(r"[^\w/-]", "-", name)
    dataset_id = next(name for n in count() if not (folder / (name := f"{stem}-v{n}")).exists())
    with _root(folder), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # one for each metadata field without a value
        try:
            minari.create_dataset_from_buffers(
                dataset_id,
                buffers,
                env=_plain_spec(env_id),
                observation_space=space_pair[0],
                action_space=space_pair[1],
                algorithm_name=algorithm,
                description=f"{len(episodes)} episodes of {env_id}, played by {algorithm}",
                jpeg_encoding=False,
            )
        except (ImportError, TypeError, ValueError, AssertionError) as error:
            raise ConfigurationError(f"the episodes cannot be written as a Minari data set: {error}") from error
    return dataset_id


def read_minari(source: str, field: str) -> Iterator[Episode]:
    """Yield the episodes of a data set, given by its id or folder; error messages begin with `field`.

    Without Minari or the data set, a `ConfigurationError` is raised.
    """
    minari = _import_minari(field)
    try:
        data = Path(source) / "data"
        dataset = minari.MinariDataset(data) if data.is_dir() else minari.load_dataset(source)
    except Exception as error:
        raise ConfigurationError(f"{field} cannot be loaded: {error}") from error
    for found in dataset.iterate_episodes():
        rewards = np.asarray(found.rewards)
        result = (float(rewards.sum()), len(rewards), bool(np.any(found.terminations)))
        yield Episode(*result, found.observations, found.actions, rewards)


def check_can_write() -> Any:  # noqa: ANN401 - a module
    """Return the module `minari`; without it or h5py, which it needs to write, raise a `ConfigurationError`."""
    if importlib.util.find_spec("h5py") is None:
        raise ConfigurationError(f"recording as 'minari' needs h5py: {how_to_install('minari')}")
    return _import_minari("recording as 'minari'")


def _import_minari(field: str) -> Any:  # noqa: ANN401 - a module
    try:
        import minari
    except ImportError as error:
        raise ConfigurationError(f"{field} needs Minari: {how_to_install('minari')}") from error
    return minari


def _plain_spec(env_id: str) -> EnvSpec | None:
    """Return the spec that `recover_environment` of the data set makes the environment from, if it has a JSON form."""
    spec = gymnasium.registry.get(env_id)
    try:
        return spec if spec is not None and spec.to_json() else None
    except (TypeError, ValueError):  # registered with a class or function rather than its name
        return None


@contextmanager
def _root(folder: Path) -> Iterator[None]:
    """Set the folder of Minari's data sets, which Minari reads from an environment variable only."""
    folder.mkdir(parents=True, exist_ok=True)
    before = os.environ.get(_ROOT)
    os.environ[_ROOT] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ[_ROOT]
        else:
            os.environ[_ROOT] = before

"""Recorded episodes: files, Minari data sets, and the data module for imitation."""

from __future__ import annotations

import math
import os
import re
import warnings
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from lightning.fabric.utilities.data import AttributeDict
from lightning.pytorch.utilities.rank_zero import rank_zero_warn  # type: ignore[attr-defined]
from torch import Tensor

from lightning_rl.data.datamodule import RolloutDataModule
from lightning_rl.environments.contract import TRAINING, derive_seed, find_bad
from lightning_rl.files import load_plain, save_file
from lightning_rl.masks import MaskLayout, component_names, find_masks, has_choices, num_choices
from lightning_rl.nested import Nested, leaves, map_leaves, map_space, map_stacked, part_at, space_leaves
from lightning_rl.policies.interface import from_environment
from lightning_rl.rollouts.rollout import Episode, Rollout
from lightning_rl.spaces import observation_dtype
from lightning_rl.validation import ConfigurationError, check, check_installed

_MINARI = "minari:"
_PARTS = ("observations", "actions", "rewards")


def save_episodes(episodes: Sequence[Episode], path: str | Path) -> None:
    """Write episodes to a file of tensors and numbers, or raise a `ConfigurationError` if one is not recorded."""
    content = []
    for episode in _checked(episodes):
        arrays = {part: getattr(episode, part) for part in _PARTS}
        content.append(
            {
                **map_leaves(lambda x: torch.from_numpy(np.array(x)), arrays),
                "episode_return": float(episode.episode_return),
                "length": int(episode.length),
                "terminated": bool(episode.terminated),
            }
        )
    save_file({"episodes": content}, path)


def load_episodes(source: str | Path) -> list[Episode]:
    """Return the episodes of a file of `save_episodes`, or of a Minari data set: `minari:` and its id or folder.

    Without such a file or data set, or without Minari, a `ConfigurationError` is raised.
    """
    if str(source).startswith(_MINARI):
        return list(read_minari(str(source).removeprefix(_MINARI), f"episodes={str(source)!r}"))
    expected = f"a file that save_episodes wrote, or {_MINARI!r} and the id or folder of a data set of Minari"
    content = load_plain(source, "episodes", expected)
    try:
        return [
            Episode(**fields | {part: map_leaves(np.asarray, fields[part]) for part in _PARTS})
            for fields in content["episodes"]
        ]
    except (LookupError, TypeError):
        raise ConfigurationError(f"episodes={str(source)!r} is not valid: expected {expected}") from None


def _checked(episodes: Sequence[Episode]) -> Sequence[Episode]:
    expected = "recorded episodes of at least one step, as Trainer.predict returns them"
    are_episodes = isinstance(episodes, Sequence) and all(isinstance(episode, Episode) for episode in episodes)
    check(are_episodes, "episodes", episodes, expected)
    are_recorded = all(getattr(episode, part) is not None for episode in episodes for part in _PARTS)
    have_steps = are_recorded and any(len(episode.rewards) for episode in episodes)  # type: ignore[arg-type]
    check(have_steps, "episodes", f"{len(episodes)} episodes", f"{expected}, with {', '.join(_PARTS)}")
    for number, episode in enumerate(episodes):
        rewards = np.asarray(episode.rewards)
        steps = len(rewards)
        lengths = {part: {len(x) for x in leaves(getattr(episode, part))} for part in _PARTS}
        fits = lengths == {"observations": {steps + 1}, "actions": {steps}, "rewards": {steps}}
        expected = f"{steps} actions, as many as rewards, each a number, and one more observation"
        check(fits and rewards.ndim == 1, f"episodes[{number}]: lengths", lengths, expected)
    return episodes


def _actions_of_space(space: spaces.Space[Any], taken: Nested) -> Nested:
    """Return recorded actions in the units of a space, or raise a `ConfigurationError` for values outside of it."""
    actions = from_environment(space, taken)
    for path, leaf in space_leaves(space).items():
        chosen, given = part_at(actions, path), np.asarray(part_at(taken, path))
        valid, expected = np.isfinite(chosen).all(), f"finite numbers in the shape of {leaf}, one action per step"
        if has_choices(leaf):
            valid = given.dtype.kind in "iub" and (chosen >= 0).all() and (chosen < num_choices(leaf)).all()
            expected = f"integers in {leaf}, one action per step"
        # One number may lack its dimension; other shapes would be broadcast to the policy's distribution.
        shape, size = given.shape[1:], math.prod(leaf.shape or ())
        has_shape = shape in (leaf.shape, (size,)) or math.prod(shape) == size == 1
        check(bool(has_shape and valid), f"episodes: actions {path}".rstrip(), given, expected)
    return actions


def _check_observations(space: spaces.Space[Any], seen: Nested, converted: Nested) -> None:
    """Check that observations are finite, keep their values in the dtype of the space, and are among its choices."""
    for path, leaf in space_leaves(space).items():
        given, x = part_at(seen, path), part_at(converted, path)
        name = f"episodes: observations {path}".rstrip()
        check(x.shape[1:] == leaf.shape, name, x[0], f"observations in {leaf}")
        changed = given[x != given] if x.dtype.kind != "f" else given[:0]
        check(not changed.size, name, changed[:1], f"numbers that are exact in {x.dtype}")
        if (find := find_bad(path, leaf)) is not None and (bad := find(x)) is not None:
            raise ConfigurationError(f"episodes: step {bad[0]} {bad[1]}")
        if isinstance(leaf, spaces.Box):  # no error: environments may return such observations too, with a warning
            least, most = x.min(0), x.max(0)
            if (outside := (least < leaf.low) | (most > leaf.high)).any():
                worst = float(np.where(least < leaf.low, least, most)[outside][0])
                rank_zero_warn(f"{name}={worst} lies outside of the space: expected numbers in {leaf}")


def _check_masks(
    space: spaces.Space[Any], action_space: spaces.Space[Any], observations: Nested, actions: Nested
) -> None:
    if (root := find_masks(space)) is None:
        return
    layout = MaskLayout(action_space, part_at(space, root))
    chosen: dict[str, np.ndarray[Any, Any]] = {}
    for path, leaf in space_leaves(action_space).items():
        if has_choices(leaf):
            choices = part_at(actions, path)
            columns = choices.reshape(len(choices), -1).astype(np.int64).T
            chosen.update(zip(component_names(leaf, path), columns, strict=True))
    for name, allowed in layout.allowed(part_at(observations, root)).items():
        if name in chosen:  # a mask of a floating-point Box says which components exist
            steps = np.arange(len(allowed))
            rows = allowed[steps, chosen[layout.given[name]]] if name in layout.given else allowed
            forbidden = np.count_nonzero(~rows[steps, chosen[name]])
            expected = "actions that the mask in the observation before them allows"
            check(not forbidden, f"episodes: actions {name}".rstrip(), f"forbidden in {forbidden} steps", expected)


class RecordedEpisodes(RolloutDataModule):
    """Yields random steps of recorded episodes instead of rollouts; the environment is used for evaluation only.

    A training batch has `rollout_length · num_envs` steps, drawn at random with replacement. It has observations,
    actions and rewards, but neither log-probabilities nor values. `BehaviourCloning` learns from such batches. Episodes
    that are missing or do not fit the spaces of the environment raise a `ConfigurationError`.

    Args:
        env_id: Id of the environment of the episodes.
        episodes: Episodes as `Trainer.predict` returns them, or a `source` of `load_episodes`.
        num_envs: `rollout_length · num_envs` is the number of steps of a batch on each rank.
        rollout_length: See `num_envs`.
        rollouts_per_epoch: Batches of an epoch.
        **kwargs: See `RolloutDataModule`.
    """

    has_recorded_steps = True

    def __init__(
        self,
        env_id: str,
        episodes: Sequence[Episode] | str | Path,
        num_envs: int = 8,
        rollout_length: int = 128,
        rollouts_per_epoch: int = 10,
        **kwargs: Any,  # options of the base class
    ) -> None:
        super().__init__(env_id, num_envs, rollout_length, rollouts_per_epoch, **kwargs)
        found = _checked(load_episodes(episodes) if isinstance(episodes, str | Path) else episodes)
        try:
            observations = [map_leaves(lambda x: x[:-1], episode.observations) for episode in found]
            dtypes = map_space(lambda leaf: leaf.dtype, self.observation_space)
            seen = map_stacked(np.concatenate, observations)
            observations = map_leaves(lambda dtype, x: x.astype(dtype, copy=False), dtypes, seen)
            _check_observations(self.observation_space, seen, observations)
            taken = map_stacked(np.concatenate, [episode.actions for episode in found])
            actions = _actions_of_space(self.action_space, taken)
            _check_masks(self.observation_space, self.action_space, observations, actions)
        except ConfigurationError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise ConfigurationError(
                f"episodes do not fit the spaces of {env_id} ({error}): expected {self.observation_space} and "
                f"{self.action_space}"
            ) from None
        rewards = np.concatenate([np.asarray(e.rewards, np.float64) for e in found])
        self._steps = {"observations": observations, "actions": actions, "rewards": rewards}
        self._given = str(episodes) if isinstance(episodes, str | Path) else f"{len(found)} episodes"

    @property
    def hparams_initial(self) -> AttributeDict:
        hparams = super().hparams_initial
        hparams["data"]["episodes"] = self._given  # also if a script gives the episodes themselves
        return hparams

    def collect(self) -> Rollout:
        """Draw the steps of one batch; the seed and the number of updates determine which."""
        _, version, dtype, device = self._policy()
        self._collected_version = version
        seed = derive_seed(self._fixed_seed(), TRAINING, self._rank, version)
        shape = (self.rollout_length, self.num_envs)
        drawn = torch.randint(len(self._steps["rewards"]), shape, generator=torch.Generator().manual_seed(seed))
        dtypes = map_space(lambda leaf: observation_dtype(leaf, dtype), self.observation_space)

        def rows(x: Any, dtype: Any = None) -> Tensor:
            return torch.from_numpy(np.asarray(x[drawn.numpy()], dtype))

        observations = map_leaves(lambda dtype, x: rows(x, dtype), dtypes, self._steps["observations"])
        float_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        zeros, never = torch.zeros(shape, dtype=float_dtype), torch.zeros(shape, dtype=torch.bool)
        return Rollout(
            observations=map_leaves(lambda x: torch.cat([x, x[-1:]]), observations),
            actions=map_leaves(rows, self._steps["actions"]),
            rewards=rows(self._steps["rewards"]).to(float_dtype),
            terminated=never,
            truncated=never,
            log_probs=zeros,
            values=zeros,
            next_values=zeros,
            final_indices=torch.zeros(0, 2, dtype=torch.long),
            final_observations=map_leaves(lambda x: x[0, :0], observations),
            policy_version=version,
        ).to(device)


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
    check_can_write()
    from unittest.mock import patch

    import minari
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
    # Minari reads the folder from an environment variable only.
    with patch.dict(os.environ, MINARI_DATASETS_PATH=str(folder)), warnings.catch_warnings():
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
    check_installed(field, "minari", "minari")
    import minari

    try:
        data = Path(source) / "data"
        dataset = minari.MinariDataset(data) if data.is_dir() else minari.load_dataset(source)
        for found in dataset.iterate_episodes():  # opens the file, which may be damaged
            rewards = np.asarray(found.rewards)
            yield Episode(
                episode_return=float(rewards.sum()),
                length=len(rewards),
                terminated=bool(np.any(found.terminations)),
                observations=found.observations,
                actions=found.actions,
                rewards=rewards,
            )
    except Exception as error:
        expected = "the folder of a data set, or the id of one in MINARI_DATASETS_PATH, as after 'minari download <id>'"
        raise ConfigurationError(f"{field} cannot be loaded: expected {expected}: {error}") from error


def check_can_write() -> None:
    """Raise a `ConfigurationError` without Minari or h5py, which Minari needs to write."""
    check_installed("recording as 'minari'", "minari", "minari", "h5py")


def _plain_spec(env_id: str) -> EnvSpec | None:
    """Return the spec that `recover_environment` of the data set makes the environment from, if it has a JSON form."""
    spec = gymnasium.registry.get(env_id)
    try:
        return spec if spec is not None and spec.to_json() else None
    except (TypeError, ValueError):  # registered with a class or function rather than its name
        return None

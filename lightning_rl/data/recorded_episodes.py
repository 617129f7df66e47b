"""Episodes that somebody recorded, to learn a policy from: what `predict` returns, files of these, Minari data sets."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_rl.data.datamodule import RolloutDataModule
from lightning_rl.data.minari import read_minari
from lightning_rl.environments.seeding import TRAINING, derive_seed
from lightning_rl.files import load_plain
from lightning_rl.nested import Nested, first_leaf, map_leaves, map_space, map_stacked
from lightning_rl.policies.interface import from_environment
from lightning_rl.rollouts.episode import Episode
from lightning_rl.rollouts.rollout import Rollout
from lightning_rl.spaces import observation_dtype
from lightning_rl.validation import ConfigurationError, check

MINARI = "minari:"


def save_episodes(episodes: Sequence[Episode], path: str | Path) -> None:
    """Write recorded episodes to a file of tensors and numbers.

    Raises:
        ConfigurationError: One of them has no observations and actions.
    """
    content = []
    for episode in _recorded(episodes):
        arrays = {n: _to_tensors(getattr(episode, n)) for n in ("observations", "actions", "rewards")}
        content.append(
            {
                **arrays,
                "episode_return": float(episode.episode_return),
                "length": int(episode.length),
                "terminated": bool(episode.terminated),
            }
        )
    torch.save({"episodes": content}, path)


def load_episodes(source: str | Path) -> list[Episode]:
    """Return the episodes of a file that `save_episodes` wrote, or of a Minari data set.

    Args:
        source: The file, or `minari:<id>`, or `minari:<folder of the data set>`.

    Raises:
        ConfigurationError: There is no such file or data set, or Minari is not installed.
    """
    if str(source).startswith(MINARI):
        return list(read_minari(str(source).removeprefix(MINARI), f"episodes={str(source)!r}"))
    content = load_plain(source, "episodes", "a file that save_episodes wrote")
    check(isinstance(content, dict) and "episodes" in content, "episodes", str(source), "what save_episodes wrote")
    return [_episode(**fields) for fields in content["episodes"]]


def _episode(
    observations: Nested, actions: Nested, rewards: Nested, episode_return: float, length: int, terminated: bool
) -> Episode:
    episode = Episode(episode_return, length, terminated)
    episode.observations, episode.actions = (map_leaves(np.asarray, x) for x in (observations, actions))
    episode.rewards = np.asarray(rewards)
    return episode


def _recorded(episodes: Sequence[Episode]) -> Sequence[Episode]:
    expected = "some, with observations and actions, as predict returns them"
    are_episodes = isinstance(episodes, Sequence) and all(isinstance(episode, Episode) for episode in episodes)
    check(are_episodes, "episodes", episodes, expected)
    whole = bool(episodes) and all(e.observations is not None and e.actions is not None for e in episodes)
    check(whole, "episodes", f"{len(episodes)} episodes", expected)
    return episodes


def _to_tensors(x: Nested) -> Nested:
    return map_leaves(lambda array: torch.from_numpy(np.array(array)), x)


class RecordedEpisodes(RolloutDataModule):
    """Yields steps of recorded episodes in the place of rollouts; the environment is for spaces and evaluation.

    A training batch has `rollout_length · num_envs` steps, drawn with replacement and in no order: they have
    observations, actions and rewards, and neither log-probabilities nor values. `BehaviourCloning` learns from them.

    Args:
        env_id: Of the environment that they are of.
        episodes: Episodes as `Trainer.predict` returns them, the file that `save_episodes` wrote them to, or
            `minari:` and the id of a data set or its folder.
        num_envs: With `rollout_length` the number of steps of a batch on each rank.
        rollout_length: See `num_envs`.
        rollouts_per_epoch: Batches of an epoch.
        **kwargs: Those of `RolloutDataModule`.

    Raises:
        ConfigurationError: There are no such episodes, or they are not of these spaces.
    """

    def __init__(
        self,
        env_id: str,
        episodes: Sequence[Episode] | str | Path,
        num_envs: int = 8,
        rollout_length: int = 128,
        rollouts_per_epoch: int = 10,
        **kwargs: Any,  # noqa: ANN401 - those of the base class
    ) -> None:
        super().__init__(env_id, num_envs, rollout_length, rollouts_per_epoch, **kwargs)
        found = load_episodes(episodes) if isinstance(episodes, str | Path) else _recorded(episodes)
        dtypes = map_space(lambda leaf: leaf.dtype, self.observation_space)

        def joined(x: Sequence[Nested]) -> Nested:
            return map_stacked(np.concatenate, x)

        try:
            observations = joined([map_leaves(lambda x: x[:-1], episode.observations) for episode in found])
            observations = map_leaves(lambda dtype, x: x.astype(dtype), dtypes, observations)
            actions = from_environment(self.action_space, joined([episode.actions for episode in found]))
            fits = len(first_leaf(observations)) == len(first_leaf(actions))
            rows = map_leaves(lambda x: x[0], observations)
            check(fits and self.observation_space.contains(rows), "episodes", "observations", "those of the spaces")
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            expected = f"{self.observation_space} and {self.action_space}"
            raise ConfigurationError(
                f"episodes are not of the spaces of {env_id} ({error}): expected {expected}"
            ) from None
        rewards = np.fromiter(chain.from_iterable(e.rewards for e in found if e.rewards is not None), np.float64)
        self._steps = {"observations": observations, "actions": actions, "rewards": rewards}

    def collect(self) -> Rollout:
        """Draw the steps of one batch: which, the seed and the number of updates say."""
        _, version, dtype, device = self._policy()
        self._collected_version = version
        if self.seed is None:
            self.seed = torch.initial_seed() % 2**63
        generator = torch.Generator().manual_seed(derive_seed(self.seed, TRAINING, self._rank, version))
        shape = (self.rollout_length, self.num_envs)
        drawn = torch.randint(len(self._steps["rewards"]), shape, generator=generator)
        kinds = map_space(lambda leaf: observation_dtype(leaf, dtype), self.observation_space)

        def rows(x: Any) -> Tensor:  # noqa: ANN401
            return torch.from_numpy(np.asarray(x[drawn.numpy()]))

        observations = map_leaves(lambda kind, x: rows(x.astype(kind)), kinds, self._steps["observations"])
        numbers = torch.float64 if dtype == torch.float64 else torch.float32
        nothing, never = torch.zeros(shape, dtype=numbers), torch.zeros(shape, dtype=torch.bool)
        return Rollout(
            observations=map_leaves(lambda x: torch.cat([x, x[-1:]]), observations),
            actions=map_leaves(rows, self._steps["actions"]),
            rewards=rows(self._steps["rewards"]).to(numbers),
            terminated=never,
            truncated=never,
            log_probs=nothing,
            values=nothing,
            next_values=nothing,
            final_indices=torch.zeros(0, 2, dtype=torch.long),
            final_observations=map_leaves(lambda x: x[0, :0], observations),
            policy_version=version,
        ).to(device)

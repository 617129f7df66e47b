"""Environments of their own to play evaluation episodes in: the same episodes each time."""

from __future__ import annotations

from typing import Any, cast

import torch
from gymnasium import spaces

from lightning_rl.environments import EnvironmentBatch, EnvironmentSpec, FilmMaker, cameras, make_environments
from lightning_rl.environments.seeding import derive_seed
from lightning_rl.evaluation import play
from lightning_rl.policies.interface import Policy
from lightning_rl.rollouts.episode import Episode

_MOST_ENVIRONMENTS = 8


class Evaluator:
    """Makes environments when episodes are first asked for, and keeps them for the next time.

    Args:
        spec: Of one environment.
        num_envs: How many; None takes as many as there are episodes to play, 8 at the most.
    """

    def __init__(self, spec: EnvironmentSpec, num_envs: int | None) -> None:
        self.spec = spec
        self.num_envs = num_envs
        self.environments: EnvironmentBatch | None = None
        self._made_for: tuple[tuple[int, ...], int] = ((), 0)

    def play(
        self,
        policy: Policy,
        space_pair: tuple[spaces.Space[Any], spaces.Space[Any]],
        num_episodes: int,
        path: tuple[int, ...],
        device: torch.device,
        dtype: torch.dtype,
        *,
        deterministic: bool,
        record: bool,
        films: FilmMaker | None = None,
        first_number: int = 0,
    ) -> list[Episode]:
        """Play episodes.

        Args:
            policy: Chooses the actions.
            space_pair: Observation and action space of one environment.
            num_episodes: How many.
            path: Of the node of the tree of seeds that all of them come from.
            device: Of the policy.
            dtype: Of its parameters.
            deterministic: Take the mode of the action distribution rather than a sample.
            record: Keep observations, actions and rewards.
            films: Takes the frames of each episode, by its place among those that are returned; `spec` is then filmed.
            first_number: What the first of them is counted as.
        """
        num_envs = min(num_episodes, self.num_envs or _MOST_ENVIRONMENTS)
        if not num_envs:
            return []
        if self.spec.backend == "envpool" or (path, num_envs) != self._made_for:  # EnvPool cannot be seeded again
            self.close()
        if self.environments is None:
            self._made_for = path, num_envs
            seeds = [derive_seed(*path, index) for index in range(num_envs)]
            self.environments = cast(EnvironmentBatch, make_environments(self.spec, num_envs, seeds))
        shares = [len(range(index, num_episodes, num_envs)) for index in range(num_envs)]
        if films is not None:
            number = first_number
            for camera, share in zip(cameras(self.environments.env), shares, strict=True):
                camera.begin(films, range(number, number + share))
                number += share
        return play(
            self.environments,
            policy,
            *space_pair,
            shares,
            torch.Generator(device).manual_seed(derive_seed(*path)),
            dtype=dtype,
            deterministic=deterministic,
            record=record,
        )

    def close(self) -> None:
        """Close the environments, if there are any."""
        environments, self.environments = self.environments, None
        if environments is not None:
            environments.close()

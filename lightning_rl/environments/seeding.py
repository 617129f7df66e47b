"""Seeds as a tree: run → role → rank → environment → episode."""

from __future__ import annotations

import copy
from typing import Any

import gymnasium
import numpy as np

from lightning_rl.environments.errors import EnvironmentFailure

TRAINING, EVALUATION, SAMPLING, MINIBATCHES = range(4)
"""Roles, the first branch of the tree."""


def derive_seed(*path: int) -> int:
    """Return the seed at a node of the tree: independent of every other node's, below 2^31."""
    return int(np.random.SeedSequence(path[0], spawn_key=path[1:]).generate_state(1)[0] >> 1)


def describe(index: int, episode: int, seed: int, step: int) -> str:
    """Say where an environment is, so that `reset(seed=seed)` and `step` actions lead there again."""
    return f"environment {index} (episode {episode}, seed {seed}, step {step})"


class SeededEpisodes(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Give each episode its own seed, and say where it was when the environment raises.

    `reset(seed=s)` begins the stream of episodes that `s` names; each `reset()` after it goes on to the stream's next
    episode. What an environment does therefore depends on (seed, number of the episode, actions) and not on how many
    other environments there are.

    Args:
        env: The environment.
        index: Its place among the environments of this process, for error messages.
        first_options: Options of the reset that begins a stream, where a plain one would go on with what went before.
    """

    def __init__(
        self, env: gymnasium.Env[Any, Any], index: int = 0, first_options: dict[str, Any] | None = None
    ) -> None:
        super().__init__(env)
        self.index = index
        self.first_options = first_options
        self.stream_seed = 0
        self.episode = 0
        self.step_count = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin the stream `seed`, or its next episode."""
        if seed is None:
            self.episode += 1
        else:
            self.stream_seed, self.episode = seed, 0
            options = options if self.first_options is None else {**self.first_options, **(options or {})}
        self.step_count = 0
        try:
            return self.env.reset(seed=derive_seed(self.stream_seed, self.episode), options=options)
        except Exception as error:
            raise self._failure("reset", error) from error

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:  # noqa: ANN401
        """Step; an exception is raised again with index, episode, seed and step."""
        self.step_count += 1
        try:
            observation, reward, terminated, truncated, info = self.env.step(action)
        except Exception as error:
            raise self._failure("step", error) from error
        if terminated or truncated:
            # The reset that follows must not write over it, even if the environment always returns the same array.
            observation = observation.copy() if isinstance(observation, np.ndarray) else copy.deepcopy(observation)
        return observation, reward, terminated, truncated, info

    def _failure(self, where: str, error: Exception) -> EnvironmentFailure:
        label = describe(self.index, self.episode, derive_seed(self.stream_seed, self.episode), self.step_count)
        return EnvironmentFailure(f"{label} raised in {where}: {type(error).__name__}: {error}")

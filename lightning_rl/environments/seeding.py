"""Seeds as a tree: run → role → rank → environment → episode."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

from lightning_rl.environments.errors import EnvironmentFailure

TRAINING, EVALUATION, SAMPLING, MINIBATCHES = range(4)
"""Roles, the first branch of the tree."""


def derive_seed(*path: int) -> int:
    """Return the seed at a node of the tree: independent of every other node's, below 2^31."""
    return int(np.random.SeedSequence(path[0], spawn_key=path[1:]).generate_state(1)[0] >> 1)


class SeededEpisodes(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Give each episode its own seed, and say where it was when the environment raises.

    `reset(seed=s)` begins the stream of episodes that `s` names; each `reset()` after it goes on to the stream's next
    episode. What an environment does therefore depends on (seed, number of the episode, actions) and not on how many
    other environments there are.

    Args:
        env: The environment.
        index: Its place among the environments of this process, for error messages.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], index: int = 0) -> None:
        super().__init__(env)
        self.index = index
        self.stream_seed = 0
        self.episode = 0
        self.step_count = 0

    @property
    def label(self) -> str:
        """Index, episode, seed and step, for error messages."""
        seed = derive_seed(self.stream_seed, self.episode)
        return f"environment {self.index} (episode {self.episode}, seed {seed}, step {self.step_count})"

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin the stream `seed`, or its next episode."""
        if seed is None:
            self.episode += 1
        else:
            self.stream_seed, self.episode = seed, 0
        self.step_count = 0
        try:
            return self.env.reset(seed=derive_seed(self.stream_seed, self.episode), options=options)
        except Exception as error:
            raise EnvironmentFailure(f"{self.label} raised in reset: {type(error).__name__}: {error}") from error

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:  # noqa: ANN401
        """Step; an exception is raised again with the label."""
        self.step_count += 1
        try:
            return self.env.step(action)
        except Exception as error:
            raise EnvironmentFailure(f"{self.label} raised in step: {type(error).__name__}: {error}") from error

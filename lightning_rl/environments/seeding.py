"""Seeds as a tree, run → role → rank → environment → episode, and episodes that can be played again from them.

Simulators cannot be copied in general, but the same seed and the same actions lead to the same state. Whether they did
is seen by comparing the last observation.
"""

from __future__ import annotations

import copy
from typing import Any

import gymnasium
import numpy as np

from lightning_rl.environments.errors import EnvironmentFailure

TRAINING, EVALUATION, SAMPLING, MINIBATCHES, TESTING = range(5)
"""Roles, the first branch of the tree."""

_RESET = None
"""In a log of actions: a reset that went on with what was before (a game between two lives)."""


def derive_seed(*path: int) -> int:
    """Return the seed at a node of the tree: independent of every other node's, below 2^31."""
    return int(np.random.SeedSequence(path[0], spawn_key=path[1:]).generate_state(1)[0] >> 1)


def describe(index: int, episode: int, seed: int, step: int) -> str:
    """Say where an environment is, so that `reset(seed=seed)` and `step` actions lead there again."""
    return f"environment {index} (episode {episode}, seed {seed}, step {step})"


class SeededEpisodes(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Give each episode its own seed, say where it was when the environment raises, and log it to play it again.

    `reset(seed=s)` begins the stream of episodes that `s` names; each `reset()` after it goes on to the stream's next
    episode. What an environment does therefore depends on (seed, number of the episode, actions) and not on how many
    other environments there are.

    The actions since the last true reset are logged, so that another process can go to the same place (`recorded`,
    `restore`). An environment that has `state_dict()` and `load_state_dict(state)` is asked for its state instead; what
    it returns must be tensors and plain Python values.

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
        self._log: list[Any] = []
        self._first_episode = 0
        self._observation: Any = None
        self._may_go_on = env.has_wrapper_attr("went_on")
        self._has_own_state = hasattr(env.unwrapped, "state_dict") and hasattr(env.unwrapped, "load_state_dict")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin the stream `seed`, or its next episode."""
        if seed is None:
            self.episode += 1
        else:
            self.stream_seed, self.episode = seed, 0
            options = options if self.first_options is None else {**self.first_options, **(options or {})}
        self.step_count = 0
        try:
            self._observation, info = self.env.reset(seed=derive_seed(self.stream_seed, self.episode), options=options)
        except Exception as error:
            raise self._failure("reset", error) from error
        if self._may_go_on and self.env.get_wrapper_attr("went_on"):
            self._log.append(_RESET)
        else:
            self._log, self._first_episode = [], self.episode
        return self._observation, info

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
        self._log.append(action)
        self._observation = observation
        return observation, reward, terminated, truncated, info

    def recorded(self) -> dict[str, Any]:
        """Return where the environment is, as arrays and plain values."""
        actions = [np.asarray(action) for action in self._log if action is not _RESET]
        own: Any = self.env.unwrapped
        return {
            "stream_seed": self.stream_seed,
            "first_episode": self._first_episode,
            "episode": self.episode,
            "step_count": self.step_count,
            "resets": [place for place, action in enumerate(self._log) if action is _RESET],
            "actions": np.stack(actions) if actions else np.zeros(0),
            "observation": np.array(self._observation),
            "own": own.state_dict() if self._has_own_state else None,
        }

    def restore(self, records: list[dict[str, Any]]) -> tuple[bool, Any]:
        """Go to where an environment was.

        Args:
            records: Those of all environments; this one takes the one at its own index.

        Returns:
            Whether that led to the very observation that was recorded, and the observation where the environment now
            is: if it did not, the stream's next episode has begun.
        """
        record = records[self.index]
        expected = record["observation"]
        self.stream_seed, self.episode = record["stream_seed"], record["first_episode"]
        if record["own"] is not None and self._has_own_state:
            own: Any = self.env.unwrapped
            self.env.reset(seed=derive_seed(self.stream_seed, record["episode"]), options=self.first_options)
            own.load_state_dict(record["own"])
            self._log, self._observation = [], expected
            self.episode, self.step_count = record["episode"], record["step_count"]
            return True, expected
        self._replay(record["actions"], set(record["resets"]))
        exact = np.array_equal(np.asarray(self._observation), expected)
        if not exact:
            self.episode = record["episode"]
            self.reset(options=self.first_options)
        return exact, self._observation

    def _replay(self, actions: np.ndarray[Any, Any], resets: set[int]) -> None:
        self.episode -= 1  # the reset goes on to the one that was recorded
        self.reset(options=self.first_options)
        remaining = iter(actions)
        for place in range(len(actions) + len(resets)):
            if place in resets:
                self.reset()
            else:
                self.step(next(remaining))

    def _failure(self, where: str, error: Exception) -> EnvironmentFailure:
        label = describe(self.index, self.episode, derive_seed(self.stream_seed, self.episode), self.step_count)
        return EnvironmentFailure(f"{label} raised in {where}: {type(error).__name__}: {error}")

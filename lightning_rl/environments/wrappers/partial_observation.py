"""Wrappers that hide entries of observations, or report terminations as truncations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from lightning_rl.validation import check, is_int


class PartialObservation(gymnasium.ObservationWrapper[Any, Any, Any]):
    """Shows the entries `indices` of a vector observation: `[0, 2]` hides the velocities of CartPole.

    Observations that are not vectors or lack an entry raise a `ConfigurationError`.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], indices: Sequence[int]) -> None:
        super().__init__(env)
        space = env.observation_space
        is_vector = isinstance(space, spaces.Box) and len(space.shape) == 1
        check(is_vector, "indices", indices, f"observations that are vectors, not {space}")
        assert isinstance(space, spaces.Box)
        known = len(indices) > 0 and all(is_int(i) and 0 <= i < space.shape[0] for i in indices)
        check(known, "indices", indices, f"some of the entries 0 to {space.shape[0] - 1}")
        self._indices = np.asarray(indices)
        low, high = space.low[self._indices], space.high[self._indices]
        self.observation_space = spaces.Box(low, high, dtype=space.dtype)

    def observation(self, observation: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        visible: np.ndarray[Any, Any] = observation[self._indices]
        return visible


class TerminationAsTruncation(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Reports terminations as truncations, so that values bootstrap from the final observation.

    For environments that terminate at a time limit, such as old versions of Pendulum (DI-engine's `ignore_done`).
    """

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:  # noqa: ANN401
        observation, reward, terminated, truncated, info = self.env.step(action)
        return observation, reward, False, terminated or truncated, info

"""Vector wrappers whose observations have more in them than that of one step, in every autoreset mode."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper

from lightning_rl.environments.contract import IDLE, autoreset_mode
from lightning_rl.nested import Nested, map_leaves, nested_paths

Array = np.ndarray[Any, Any]


# No type arguments: VectorWrapper takes none before Gymnasium 1.4.
class VectorHistory(VectorWrapper, ABC):
    """Keeps for each environment what its observations need of the episode so far, and forgets it at its end.

    The observation that ends an episode has the history of that episode, the one after it that of the next, whether
    they come from the same step (`SAME_STEP`), from one after the other (`NEXT_STEP`) or from a reset (`DISABLED`).

    Args:
        env: A vector environment that says in `metadata["autoreset_mode"]` how it resets.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any]) -> None:
        super().__init__(env)
        self._mode = autoreset_mode(env)
        self._inner = env.single_observation_space
        self._resets_next = np.zeros(env.num_envs, bool)

    @abstractmethod
    def start_episodes(self, which: Array, observations: Nested) -> None:
        """Forget the episodes of some environments, `which` being a mask `[B]`; `observations` are first ones there."""

    @abstractmethod
    def advance(self, observations: Nested, actions: Nested, rewards: Array) -> None:
        """Take in a step of every environment, and the observations that it led to."""

    @abstractmethod
    def show(self, observations: Nested) -> Nested:
        """Return observations `[B, ...]` with their history."""

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:  # noqa: ANN401
        """Begin episodes, everywhere or where `options["reset_mask"]` says."""
        observations, infos = self.env.reset(seed=seed, options=options)
        mask = (options or {}).get("reset_mask")
        which = np.ones(self.num_envs, bool) if mask is None else np.asarray(mask, bool)
        self._resets_next[which] = False
        self.start_episodes(which, observations)
        return self.show(observations), infos

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:  # noqa: ANN401
        """Step, and show each observation with the history of its own episode."""
        observations, rewards, terminated, truncated, infos = self.env.step(actions)
        ended = terminated | truncated
        if self._mode is AutoresetMode.SAME_STEP and ended.any():
            rows = np.flatnonzero(ended)
            reached = self._with_finals(observations, infos["final_obs"], rows)
            self.advance(reached, actions, rewards)
            infos["final_obs"] = self._rows(self.show(reached), rows)
            self.start_episodes(ended, observations)
        else:
            self.advance(observations, actions, rewards)
            if self._resets_next.any():
                self.start_episodes(self._resets_next, observations)
        if IDLE in infos:  # with the last of these steps an episode begins
            self.start_episodes(infos[IDLE], observations)
        if self._mode is AutoresetMode.NEXT_STEP:
            self._resets_next = ended
        return self.show(observations), rewards, terminated, truncated, infos

    def _with_finals(self, observations: Nested, finals: Nested, rows: Array) -> Nested:
        """Return what was really reached: finals come as one batch, or as an array of one object for each."""
        reached = map_leaves(np.copy, observations)
        like = nested_paths(self._inner)
        for index in rows.tolist():
            final = finals[index] if isinstance(finals, np.ndarray) else map_leaves(lambda x, i=index: x[i], finals)
            map_leaves(lambda _, batch, x, i=index: _put(batch, i, x), like, reached, final)
        return reached

    def _rows(self, batch: Nested, rows: Array) -> Array:
        finals = np.full(self.num_envs, None, object)
        for index in rows.tolist():
            finals[index] = map_leaves(lambda x, i=index: x[i].copy(), batch)
        return finals


def _put(batch: Array, index: int, x: Any) -> None:  # noqa: ANN401
    batch[index] = x

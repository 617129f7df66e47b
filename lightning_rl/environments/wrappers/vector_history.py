"""Vector wrappers whose observations need more than one step gives, for every backend and autoreset mode."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper
from gymnasium.vector.utils import batch_space

from lightning_rl.environments.contract import IDLE, LOST, autoreset_mode
from lightning_rl.nested import Nested, map_leaves, nested_paths

Array = np.ndarray[Any, Any]


# No type arguments: VectorWrapper takes none before Gymnasium 1.4.
class VectorHistory(VectorWrapper, ABC):
    """Keeps for each environment what its observations need of the episode so far, and forgets it at its end.

    The observation that ends an episode has the history of that episode, the one after it that of the next, whether
    they come from the same step (`SAME_STEP`), from one after the other (`NEXT_STEP`) or from a reset (`DISABLED`).

    Args:
        env: A vector environment that says in `metadata["autoreset_mode"]` how it resets.
        space: Of the observations of one environment, with their history.

    Attributes:
        memory: What is kept, arrays `[B, ...]`, nested in any way.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any], space: spaces.Space[Any]) -> None:
        super().__init__(env)
        self.memory: Nested = {}
        self.single_observation_space = space
        self.observation_space = batch_space(space, self.num_envs)
        self._mode = autoreset_mode(env)
        self._paths = nested_paths(env.single_observation_space)
        self._resets_next = np.zeros(env.num_envs, bool)

    def start_episodes(self, which: Array, observations: Nested, infos: dict[str, Any]) -> None:
        """Forget the episodes of some environments, `which` being a mask `[B]`; `observations` are first ones there."""

    def advance(
        self, observations: Nested, actions: Nested, rewards: Array, ended: Array, infos: dict[str, Any]
    ) -> None:
        """Take in a step of every environment, the observations that it led to, and where it `ended` an episode."""

    @abstractmethod
    def show(self, observations: Nested) -> Nested:
        """Return observations `[B, ...]` with their history."""

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:  # noqa: ANN401
        """Begin episodes, everywhere or where `options["reset_mask"]` says."""
        mask = (options or {}).get("reset_mask")  # environments take it out
        observations, infos = self.env.reset(seed=seed, options=options)
        which = np.ones(self.num_envs, bool) if mask is None else np.asarray(mask, bool)
        self._resets_next[which] = False
        self.start_episodes(which, observations, infos)
        return self.show(observations), infos

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:  # noqa: ANN401
        """Step, and show each observation with the history of its own episode."""
        observations, rewards, terminated, truncated, infos = self.env.step(actions)
        ended = terminated | truncated
        begins = self._resets_next
        if self._mode is AutoresetMode.SAME_STEP:
            begins = ended
        if self._mode is AutoresetMode.SAME_STEP and ended.any():
            rows = np.flatnonzero(ended)
            reached = self._with_finals(observations, infos["final_obs"], rows)
            self.advance(reached, actions, rewards, ended, infos)
            infos = {**infos, "final_obs": self._rows(self.show(reached), rows)}
        else:
            self.advance(observations, actions, rewards, ended, infos)
        for key in (IDLE, LOST):  # an episode begins with the last idle step, and where an environment was replaced
            if key in infos:
                begins = begins | infos[key]
        if begins.any():
            self.start_episodes(begins, observations, infos)
        if self._mode is AutoresetMode.NEXT_STEP:
            self._resets_next = ended
        return self.show(observations), rewards, terminated, truncated, infos

    def state_dict(self) -> dict[str, Any]:
        """Return what is kept, as tensors."""
        memory = map_leaves(lambda x: torch.from_numpy(x.copy()), self.memory)
        return {"memory": memory, "resets_next": torch.from_numpy(self._resets_next.copy())}

    def load_state_dict(self, state: dict[str, Any], exact: Array, observations: Nested) -> Nested:
        """Go on from a state, and return the observations with their history.

        Args:
            state: What `state_dict` returned, of this many environments or more or fewer.
            exact: Environments that are where they were, `[B]`; the others have begun new episodes.
            observations: Theirs, `[B, ...]`.
        """

        def load(own: Array, stored: torch.Tensor) -> None:
            own[: len(stored)] = stored.numpy()[: len(own)]

        map_leaves(load, self.memory, state["memory"])
        load(self._resets_next, state["resets_next"])
        if not exact.all():
            self._resets_next[~exact] = False
            self.start_episodes(~exact, observations, {})
        return self.show(observations)

    def _with_finals(self, observations: Nested, finals: Nested, rows: Array) -> Nested:
        """Return what was really reached: finals come as one batch, or as an array of one object for each."""
        reached = map_leaves(np.copy, observations)
        for index in rows.tolist():
            final = finals[index] if isinstance(finals, np.ndarray) else map_leaves(lambda x, i=index: x[i], finals)
            map_leaves(lambda _, batch, x, i=index: _put(batch, i, x), self._paths, reached, final)
        return reached

    def _rows(self, batch: Nested, rows: Array) -> Array:
        finals = np.full(self.num_envs, None, object)
        for index in rows.tolist():
            finals[index] = map_leaves(lambda x, i=index: x[i].copy(), batch)
        return finals


class FlatObservations(VectorHistory):
    """Makes one vector of each observation, nested or not; needs no history.

    Args:
        env: The environments.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any]) -> None:
        super().__init__(env, spaces.flatten_space(env.single_observation_space))
        self._inner = env.single_observation_space

    def show(self, observations: Nested) -> Nested:
        """Return the vectors `[B, n]`."""
        rows = (map_leaves(lambda x, i=index: x[i], observations) for index in range(self.num_envs))
        return np.stack([np.asarray(spaces.flatten(self._inner, row)) for row in rows])


def told(infos: dict[str, Any], key: str) -> Iterator[tuple[Array, Array]]:
    """Yield what steps said under a key of `info`: where they did, `[B]`, and what, `[B]`."""
    for part in (infos, infos.get("final_info", {})):
        if key in part:
            yield np.asarray(part[f"_{key}"], bool), np.asarray(part[key])


def _put(batch: Array, index: int, x: Any) -> None:  # noqa: ANN401
    batch[index] = x

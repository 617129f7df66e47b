"""Vector wrappers with a history of the episode: the base class, stacked frames and flat observations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from operator import setitem
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper
from gymnasium.vector.utils import batch_space

from lightning_rl.environments.contract import IDLE, LOST, autoreset_mode
from lightning_rl.nested import Nested, map_leaves, map_space, nested_paths, replace_leaves
from lightning_rl.spaces import image_layout, is_image

Array = np.ndarray[Any, Any]


# No type arguments: VectorWrapper takes none before Gymnasium 1.4.
class VectorHistory(VectorWrapper, ABC):
    """A vector wrapper whose observations depend on the episode so far, for every backend and autoreset mode.

    The final observation of an episode has the history of this episode, and the first observation of the next episode a
    new history. `memory` is the history of all environments: arrays `[B, ...]`, nested in any way.
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
        """Start new histories for the environments in the mask `which`, `[B]`, with their first `observations`."""

    def advance(
        self, observations: Nested, actions: Nested, rewards: Array, ended: Array, infos: dict[str, Any]
    ) -> None:
        """Add a step to the history: its action, reward, next observation, and which episodes it `ended`."""

    @abstractmethod
    def show(self, observations: Nested) -> Nested:
        """Return observations `[B, ...]` with their history."""

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:  # noqa: ANN401
        mask = (options or {}).get("reset_mask")  # before environments remove it
        observations, infos = self.env.reset(seed=seed, options=options)
        which = np.ones(self.num_envs, bool) if mask is None else np.asarray(mask, bool)
        self._resets_next[which] = False
        self.start_episodes(which, observations, infos)
        return self.show(observations), infos

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:  # noqa: ANN401
        observations, rewards, terminated, truncated, infos = self.env.step(actions)
        ended = terminated | truncated
        begins = self._resets_next
        if self._mode is AutoresetMode.SAME_STEP:
            begins = ended
        if self._mode is AutoresetMode.SAME_STEP and ended.any():
            rows = np.flatnonzero(ended).tolist()
            reached = self._with_finals(observations, infos["final_obs"], rows)
            self.advance(reached, actions, rewards, ended, infos)
            shown, finals = self.show(reached), np.full(self.num_envs, None, object)
            for index in rows:
                finals[index] = map_leaves(lambda x, i=index: x[i].copy(), shown)
            infos = {**infos, "final_obs": finals}
        else:
            self.advance(observations, actions, rewards, ended, infos)
        for key in (IDLE, LOST):  # the last idle step, and a replaced environment, begin an episode
            if key in infos:
                begins = begins | infos[key]
        if begins.any():
            self.start_episodes(begins, observations, infos)
        if self._mode is AutoresetMode.NEXT_STEP:
            self._resets_next = ended
        return self.show(observations), rewards, terminated, truncated, infos

    def state_dict(self) -> dict[str, Any]:
        memory = map_leaves(lambda x: torch.from_numpy(x.copy()), self.memory)
        return {"memory": memory, "resets_next": torch.from_numpy(self._resets_next.copy())}

    def load_state_dict(self, state: dict[str, Any], exact: Array, observations: Nested) -> Nested:
        """Restore the history, and return the current `observations` with it.

        The state may come from another number of environments. Environments that were not restored exactly, `[B]`, have
        begun new episodes.
        """

        def load(own: Array, stored: torch.Tensor) -> None:
            own[: len(stored)] = stored.numpy()[: len(own)]

        map_leaves(load, self.memory, state["memory"])
        load(self._resets_next, state["resets_next"])
        if not exact.all():
            self._resets_next[~exact] = False
            self.start_episodes(~exact, observations, {})
        return self.show(observations)

    def _with_finals(self, observations: Nested, finals: Nested, rows: list[int]) -> Nested:
        """Return a copy of `observations` with final observations in `rows`; `finals` is a batch or one object each."""
        reached = map_leaves(np.copy, observations)
        for index in rows:
            final = finals[index] if isinstance(finals, np.ndarray) else map_leaves(lambda x, i=index: x[i], finals)
            map_leaves(lambda _, batch, x, i=index: setitem(batch, i, x), self._paths, reached, final)
        return reached


class FrameStack(VectorHistory):
    """Stacks the observations of the last `size` steps, oldest first; an episode begins with copies of its first one.

    Every leaf gets a new first dimension of this size, except images, whose channels are concatenated.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any], size: int) -> None:
        inner = env.single_observation_space
        super().__init__(env, stacked_space(inner, size))
        self._leaf_spaces = map_space(lambda leaf: leaf, inner)
        self.memory = map_space(lambda leaf: np.zeros((self.num_envs, size, *(leaf.shape or ())), leaf.dtype), inner)

    def start_episodes(self, which: Array, observations: Nested, infos: dict[str, Any]) -> None:
        def fill(frames: Array, x: Array) -> None:
            frames[which] = np.asarray(x)[which][:, None]

        map_leaves(fill, self.memory, observations)

    def advance(
        self, observations: Nested, actions: Nested, rewards: Array, ended: Array, infos: dict[str, Any]
    ) -> None:
        def push(frames: Array, x: Array) -> None:
            frames[:, :-1] = frames[:, 1:]
            frames[:, -1] = x

        map_leaves(push, self.memory, observations)

    def show(self, observations: Nested) -> Nested:
        return map_leaves(_fold, self._leaf_spaces, self.memory)


def stacked_space(space: spaces.Space[Any], size: int) -> spaces.Space[Any]:
    """Return the space of `size` stacked observations."""

    def stacked(path: str, leaf: spaces.Space[Any]) -> spaces.Space[Any]:
        if isinstance(leaf, spaces.Discrete):
            return spaces.MultiDiscrete([leaf.n] * size, leaf.dtype.type, start=[leaf.start] * size)
        if isinstance(leaf, spaces.MultiDiscrete):
            nvec, start = (np.stack([x] * size) for x in (leaf.nvec, leaf.start))
            return spaces.MultiDiscrete(nvec, leaf.dtype.type, start=start)
        if isinstance(leaf, spaces.MultiBinary):
            return spaces.MultiBinary([size, *leaf.shape])
        if isinstance(leaf, spaces.Box):
            low, high = (_fold(leaf, np.stack([x] * size)) for x in (leaf.low, leaf.high))
            return spaces.Box(low, high, dtype=leaf.dtype.type)
        return leaf  # the policy rejects it by name

    return replace_leaves(stacked, space)


def _fold(space: spaces.Space[Any], frames: Array) -> Array:
    """Concatenate the channels of frames `[..., size, *shape]` of an image; return other leaves unchanged."""
    if not is_image(space):
        return frames
    size, lead = frames.shape[-4], frames.shape[:-4]
    channels_last, channels, height, width = image_layout(space.shape or ())
    if channels_last:
        return np.moveaxis(frames, -4, -2).reshape(*lead, height, width, size * channels)
    return frames.reshape(*lead, size * channels, height, width)


class FlatObservations(VectorHistory):
    """Flattens each observation, nested or not, to one vector; its history is empty."""

    def __init__(self, env: VectorEnv[Any, Any, Any]) -> None:
        super().__init__(env, spaces.flatten_space(env.single_observation_space))
        self._inner = env.single_observation_space

    def show(self, observations: Nested) -> Nested:
        rows = (map_leaves(lambda x, i=index: x[i], observations) for index in range(self.num_envs))
        return np.stack([np.asarray(spaces.flatten(self._inner, row)) for row in rows])

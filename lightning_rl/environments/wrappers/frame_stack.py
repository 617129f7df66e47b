"""Observations of the last steps put on top of each other."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import VectorEnv

from lightning_rl.environments.wrappers.vector_history import Array, VectorHistory
from lightning_rl.nested import Nested, map_leaves, map_space, replace_leaves
from lightning_rl.policies.networks import is_image
from lightning_rl.spaces import image_layout


class FrameStack(VectorHistory):
    """Observations of the last `size` steps, oldest first; an episode begins with copies of its first.

    Every leaf gets a first dimension of that size, but for images, which get more channels and stay images.

    Args:
        env: The environments.
        size: Number of steps in an observation.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any], size: int) -> None:
        inner = env.single_observation_space
        super().__init__(env, stacked_space(inner, size))
        self._leaf_spaces = map_space(lambda leaf: leaf, inner)
        self.memory = map_space(lambda leaf: np.zeros((self.num_envs, size, *(leaf.shape or ())), leaf.dtype), inner)

    def start_episodes(self, which: Array, observations: Nested, infos: dict[str, Any]) -> None:
        """Fill the stacks of new episodes with their first observation."""

        def fill(frames: Array, x: Array) -> None:
            frames[which] = np.asarray(x)[which][:, None]

        map_leaves(fill, self.memory, observations)

    def advance(
        self, observations: Nested, actions: Nested, rewards: Array, ended: Array, infos: dict[str, Any]
    ) -> None:
        """Put the observations in the place of the oldest ones."""

        def push(frames: Array, x: Array) -> None:
            frames[:, :-1] = frames[:, 1:]
            frames[:, -1] = x

        map_leaves(push, self.memory, observations)

    def show(self, observations: Nested) -> Nested:
        """Return the stacks."""
        return map_leaves(_fold, self._leaf_spaces, self.memory)


def stacked_space(space: spaces.Space[Any], size: int) -> spaces.Space[Any]:
    """Return the space of the last `size` observations of a space."""

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
        return leaf  # refused by the policy, which names it

    return replace_leaves(stacked, space)


def _fold(space: spaces.Space[Any], frames: Array) -> Array:
    """Turn frames `[..., size, *shape]` of an image into its channels; leave everything else."""
    if not is_image(space):
        return frames
    size, lead = frames.shape[-4], frames.shape[:-4]
    channels_last, channels, height, width = image_layout(space.shape or ())
    if channels_last:
        return np.moveaxis(frames, -4, -2).reshape(*lead, height, width, size * channels)
    return frames.reshape(*lead, size * channels, height, width)

"""Observations with a history of the episode: stacked frames, the previous step, and flat observations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import setitem
from typing import Any

import numpy as np
from gymnasium import spaces

from lightning_rl.environments.contract import LIFE_LOST, Array
from lightning_rl.environments.wrappers.action_repeat import as_earned_in_training
from lightning_rl.environments.wrappers.transforms import RewardTransform
from lightning_rl.masks import ActionMask, is_categorical, num_choices
from lightning_rl.nested import Nested, leaves, map_leaves, map_space, replace_leaves
from lightning_rl.spaces import image_layout, is_image, space_to_dict
from lightning_rl.validation import ConfigurationError, check


class History:
    """A part of observations that depends on the episode so far, for the environments of an `EnvironmentBatch`.

    The final observation of an episode has its history; the first observation of the next one has a new history.

    Attributes:
        space: Space of one observation with the history.
        memory: The history of all environments: arrays `[B, ...]`, nested in any way.
    """

    def __init__(self, space: spaces.Space[Any], memory: Nested) -> None:
        self.space, self.memory = space, memory

    def start_episodes(self, which: Array, observations: Nested, infos: dict[str, Any]) -> None:
        """Start new histories for the environments in the mask `which`, `[B]`, with their first `observations`."""

    def advance(
        self, observations: Nested, actions: Nested, rewards: Array, ended: Array, infos: dict[str, Any]
    ) -> None:
        """Add a step to the history: its action, reward, next observation, and which episodes it `ended`."""

    def show(self, observations: Nested) -> Nested:
        """Return observations `[B, ...]` with their history."""
        raise NotImplementedError

    def load(self, memory: Nested) -> None:
        """Restore a memory, maybe of another number of environments."""
        map_leaves(lambda own, x: setitem(own, slice(len(x)), x[: len(own)]), self.memory, memory)


def empty_memory(space: spaces.Space[Any], *leading: int) -> Nested:
    """Return zeros `[*leading, ...]` for each leaf of a space."""
    return map_space(lambda leaf: np.zeros((*leading, *(leaf.shape or ())), leaf.dtype), space)


class FrameStack(History):
    """Stacks the observations of the last `size` steps, oldest first; an episode begins with copies of its first one.

    Each leaf gets a new first dimension, except images (concatenated channels) and action masks (the newest counts).
    """

    def __init__(self, space: spaces.Space[Any], num_envs: int, size: int) -> None:
        super().__init__(stacked_space(space, size), empty_memory(space, num_envs, size))
        self._leaf_spaces = map_space(lambda leaf: leaf, space)

    def start_episodes(self, which: Array, observations: Nested, infos: dict[str, Any]) -> None:
        map_leaves(lambda frames, x: setitem(frames, which, x[which][:, None]), self.memory, observations)

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
        if isinstance(leaf, ActionMask):
            return leaf
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
    """Concatenate the channels of frames `[..., size, *shape]` of an image, and take the last one of action masks."""
    if isinstance(space, ActionMask):
        newest: Array = frames.take(-1, -1 - len(space.shape))
        return newest
    if not is_image(space):
        return frames
    size, lead = frames.shape[-4], frames.shape[:-4]
    channels_last, channels, height, width = image_layout(space.shape or ())
    if channels_last:
        return np.moveaxis(frames, -4, -2).reshape(*lead, height, width, size * channels)
    return frames.reshape(*lead, size * channels, height, width)


class FlatObservations(History):
    """Flattens each observation, nested or not, to one vector; its history is empty."""

    def __init__(self, space: spaces.Space[Any]) -> None:
        space_to_dict(space, "observation_space")  # names an unsupported part
        super().__init__(spaces.flatten_space(space), {})
        self._flatteners = map_space(_flattener, space)

    def show(self, observations: Nested) -> Nested:
        rows = leaves(map_leaves(lambda flatten, x: flatten(x), self._flatteners, observations))
        return np.concatenate(rows, 1, dtype=self.space.dtype)


# As `spaces.flatten`, but for rows `[B, ...]` of a leaf: 1,024 single calls would take 14 ms.
def _flattener(space: spaces.Space[Any]) -> Callable[[Any], Array]:
    one_hot = isinstance(space, spaces.Discrete | spaces.MultiDiscrete)
    return _encoder(space) if one_hot else partial(_flatten, space.dtype)


ACTION, REWARD, OBSERVATION = "previous_action", "previous_reward", "observation"
"""Keys of the new parts, and of observations that are no `Dict`."""


class PreviousStep(History):
    """Adds the previous action and reward to observations; both are zeros at the start of an episode.

    Discrete actions become one-hot vectors; continuous actions are clipped to their bounds. `transform` is applied to
    the shown rewards only. A part of the observation with that name, or actions without a fixed number of entries,
    raise a `ConfigurationError`.
    """

    def __init__(
        self,
        space: spaces.Space[Any],
        actions: spaces.Space[Any],
        num_envs: int,
        action: bool,
        reward: bool,
        transform: RewardTransform | None = None,
    ) -> None:
        self._is_dict = isinstance(space, spaces.Dict)
        parts = dict(space.items()) if isinstance(space, spaces.Dict) else {OBSERVATION: space}
        self._reward, self._transform = reward, transform
        added: dict[str, spaces.Space[Any]] = {}
        if action:
            added[ACTION] = replace_leaves(_encoded_space, actions)
        if reward:
            added[REWARD] = spaces.Box(-np.inf, np.inf, (1,), np.float32)
        for key in added:
            check(key not in parts, f"env.{key}", True, f"False, since observations have a part {key!r} of their own")
        self._encoders = map_space(_encoder, actions) if action else None
        super().__init__(spaces.Dict(parts | added), empty_memory(spaces.Dict(added), num_envs))

    def start_episodes(self, which: Array, observations: Nested, infos: dict[str, Any]) -> None:
        map_leaves(lambda x: setitem(x, which, 0), self.memory)

    def advance(
        self, observations: Nested, actions: Nested, rewards: Array, ended: Array, infos: dict[str, Any]
    ) -> None:
        self.memory = {}
        if self._encoders is not None:
            self.memory[ACTION] = map_leaves(lambda encode, x: encode(x), self._encoders, actions)
        if self._reward:
            earned = as_earned_in_training(infos, rewards)
            shown = earned if self._transform is None else self._transform(earned)
            self.memory[REWARD] = np.array(shown, np.float32)[..., None]
        # Evaluation joins the lives of a game into one episode; in training each life was an episode.
        for part in (infos, infos.get("final_info", {})):
            if LIFE_LOST in part:
                self.start_episodes(np.asarray(part[f"_{LIFE_LOST}"], bool), observations, infos)

    def show(self, observations: Nested) -> Nested:
        return {**(observations if self._is_dict else {OBSERVATION: observations}), **self.memory}


def _encoded_space(path: str, space: spaces.Space[Any]) -> spaces.Space[Any]:
    if is_categorical(space):
        return spaces.MultiBinary(sum(num_choices(space)))
    if isinstance(space, spaces.MultiBinary):
        return spaces.MultiBinary(int(np.prod(space.shape)))
    if isinstance(space, spaces.Box):
        low, high = (bound.astype(np.float32).ravel() for bound in (space.low, space.high))
        return spaces.Box(np.minimum(low, 0), np.maximum(high, 0), dtype=np.float32)  # contains the initial zeros
    raise ConfigurationError(
        f"env.{ACTION}=True is not valid: expected False, since actions in {space} have no fixed number of entries"
    )


def _encoder(space: spaces.Space[Any]) -> Callable[[Any], Array]:
    if not is_categorical(space):
        return partial(_flatten, np.int8 if isinstance(space, spaces.MultiBinary) else np.float32)
    choices = np.array(num_choices(space))
    start = np.ravel(space.low if isinstance(space, spaces.Box) else space.start)  # type: ignore[attr-defined]
    return partial(_one_hot, np.cumsum(choices) - choices - start.astype(np.int64), int(choices.sum()))


def _flatten(dtype: Any, actions: Any) -> Array:
    return np.reshape(actions, (len(actions), -1)).astype(dtype)


def _one_hot(offsets: Array, size: int, actions: Any) -> Array:
    places = _flatten(np.int64, actions) + offsets
    one_hot = np.zeros((len(places), size), np.int8)
    np.put_along_axis(one_hot, places, 1, axis=-1)
    return one_hot

"""Adds the action and the reward of the previous step to observations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import VectorEnv

from lightning_rl.environments.contract import LIFE_LOST
from lightning_rl.environments.wrappers.action_repeat import as_earned_in_training
from lightning_rl.environments.wrappers.history import Array, VectorHistory
from lightning_rl.environments.wrappers.rewards import RewardTransform
from lightning_rl.masks import MAX_INTEGER_CHOICES, num_choices
from lightning_rl.nested import Nested, map_leaves, map_space
from lightning_rl.validation import ConfigurationError, check

ACTION, REWARD, OBSERVATION = "previous_action", "previous_reward", "observation"
"""Keys of the new parts, and of observations that are no `Dict`."""


class PreviousStep(VectorHistory):
    """Adds the previous action and reward to observations; both are zeros at the start of an episode.

    Discrete actions become one-hot vectors; continuous actions are clipped to their bounds. `transform` is applied to
    the shown rewards only. A part of the observation with that name, or actions without a fixed number of entries,
    raise a `ConfigurationError`.
    """

    def __init__(
        self, env: VectorEnv[Any, Any, Any], action: bool, reward: bool, transform: RewardTransform | None = None
    ) -> None:
        inner, actions = env.single_observation_space, env.single_action_space
        self._is_dict = isinstance(inner, spaces.Dict)
        parts = dict(inner.items()) if isinstance(inner, spaces.Dict) else {OBSERVATION: inner}
        self._reward, self._transform = reward, transform
        added: dict[str, spaces.Space[Any]] = {}
        if action:
            added[ACTION] = _encoded_space(actions)
        if reward:
            added[REWARD] = spaces.Box(-np.inf, np.inf, (1,), np.float32)
        for key in added:
            check(key not in parts, f"env.{key}", True, f"False, since observations have a part {key!r} of their own")
        self._encoders = map_space(_encoder, actions) if action else None
        super().__init__(env, spaces.Dict(parts | added))
        self.memory = map_space(
            lambda leaf: np.zeros((self.num_envs, *(leaf.shape or ())), leaf.dtype), spaces.Dict(added)
        )

    def start_episodes(self, which: Array, observations: Nested, infos: dict[str, Any]) -> None:
        def clear(x: Array) -> None:
            x[which] = 0

        map_leaves(clear, self.memory)

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


def _encoded_space(space: spaces.Space[Any]) -> spaces.Space[Any]:
    if isinstance(space, spaces.Dict):
        return spaces.Dict({key: _encoded_space(part) for key, part in space.items()})
    if isinstance(space, spaces.Tuple):
        return spaces.Tuple([_encoded_space(part) for part in space])
    if (choices := _choices(space)) is not None:
        return spaces.MultiBinary(int(choices.sum()))
    if isinstance(space, spaces.MultiBinary):
        return spaces.MultiBinary(int(np.prod(space.shape)))
    if isinstance(space, spaces.Box):
        low, high = (bound.astype(np.float32).ravel() for bound in (space.low, space.high))
        return spaces.Box(np.minimum(low, 0), np.maximum(high, 0), dtype=np.float32)  # contains the initial zeros
    raise ConfigurationError(
        f"env.{ACTION}=True is not valid: expected False, since actions in {space} have no fixed number of entries"
    )


def _choices(space: spaces.Space[Any]) -> np.ndarray[Any, Any] | None:
    if isinstance(space, spaces.Discrete):
        return np.array([int(space.n)])
    is_integer_box = isinstance(space, spaces.Box) and not np.issubdtype(space.dtype, np.floating)
    if not (is_integer_box or isinstance(space, spaces.MultiDiscrete)):
        return None
    counts = num_choices(space)
    return np.array(counts) if max(counts) <= MAX_INTEGER_CHOICES or not is_integer_box else None


def _encoder(space: spaces.Space[Any]) -> Callable[[Any], Array]:
    if (choices := _choices(space)) is None:
        return partial(_flatten, np.int8 if isinstance(space, spaces.MultiBinary) else np.float32)
    start = np.ravel(space.low if isinstance(space, spaces.Box) else space.start)  # type: ignore[attr-defined]
    return partial(_one_hot, np.cumsum(choices) - choices - start.astype(np.int64), int(choices.sum()))


def _flatten(dtype: Any, actions: Any) -> Array:  # noqa: ANN401
    return np.reshape(actions, (len(actions), -1)).astype(dtype)


def _one_hot(offsets: Array, size: int, actions: Any) -> Array:  # noqa: ANN401
    places = _flatten(np.int64, actions) + offsets
    one_hot = np.zeros((len(places), size), np.int8)
    np.put_along_axis(one_hot, places, 1, axis=-1)
    return one_hot

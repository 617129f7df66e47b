"""Observations that also say what was done in the step before, and what that earned."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import VectorEnv

from lightning_rl.environments.contract import LIFE_LOST
from lightning_rl.environments.wrappers.action_repeat import as_earned_in_training
from lightning_rl.environments.wrappers.rewards import RewardTransform
from lightning_rl.environments.wrappers.vector_history import Array, VectorHistory, told
from lightning_rl.masks import MAX_INTEGER_CHOICES, num_choices
from lightning_rl.nested import Nested, map_leaves, map_space
from lightning_rl.validation import ConfigurationError, check

ACTION, REWARD, REST = "previous_action", "previous_reward", "observation"
"""Keys that are added to a `Dict` of observations; anything else is under the third."""


class PreviousFields:
    """What is added to observations.

    Args:
        observation_space: Of one environment, without it.
        action_space: Of one environment.
        action: Whether to add the action.
        reward: Whether to add the reward.
        transform: Applied to rewards before they are shown.

    Raises:
        ConfigurationError: Observations have a part of that name, or the action cannot be described by numbers.
    """

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        action: bool,
        reward: bool,
        transform: RewardTransform | None,
    ) -> None:
        self._is_dict = isinstance(observation_space, spaces.Dict)
        parts = dict(observation_space.items()) if isinstance(observation_space, spaces.Dict) else {}
        parts = parts or {REST: observation_space}
        self._reward, self._transform = reward, transform
        added: dict[str, Any] = {}
        if action:
            added[ACTION] = _describe(action_space)
        if reward:
            added[REWARD] = spaces.Box(-np.inf, np.inf, (1,), np.float32)
        for key in added:
            check(key not in parts, f"env.{key}", True, f"False, since observations have a part {key!r} of their own")
        self._describers = map_space(_describer, action_space) if action else None
        self.space = spaces.Dict(parts | added)
        self._zeros = map_space(lambda leaf: np.zeros(leaf.shape or (), leaf.dtype), spaces.Dict(added))

    def nothing(self, num_envs: int) -> dict[str, Nested]:
        """Return what is added at the beginning of an episode: zeros, `[B, ...]`."""
        return map_leaves(lambda x: np.zeros((num_envs, *x.shape), x.dtype), self._zeros)  # type: ignore[no-any-return]

    def of_step(self, actions: Nested, rewards: Array) -> dict[str, Nested]:
        """Return what is added after a step, `[B, ...]`."""
        added: dict[str, Nested] = {}
        if self._describers is not None:
            added[ACTION] = map_leaves(lambda describe, x: describe(x), self._describers, actions)
        if self._reward:
            rewards = rewards if self._transform is None else self._transform(rewards)
            added[REWARD] = np.array(rewards, np.float32)[..., None]
        return added

    def join(self, observations: Nested, added: dict[str, Nested]) -> dict[str, Nested]:
        """Return both in one dict."""
        return {**(observations if self._is_dict else {REST: observations}), **added}


class PreviousStep(VectorHistory):
    """Add the previous action and reward to observations: zeros where an episode has just begun.

    Discrete actions become one-hot vectors, so that zeros are no action; continuous ones are as the environment took
    them, within its bounds.

    Args:
        env: The environments.
        action: Whether to add the action.
        reward: Whether to add the reward.
        transform: Applied to rewards before they are shown; the environments' own rewards are left alone.

    Raises:
        ConfigurationError: See `PreviousFields`.
    """

    def __init__(
        self, env: VectorEnv[Any, Any, Any], action: bool, reward: bool, transform: RewardTransform | None = None
    ) -> None:
        spaces_ = env.single_observation_space, env.single_action_space
        self._fields = PreviousFields(*spaces_, action, reward, transform)
        super().__init__(env, self._fields.space)
        self.memory = self._fields.nothing(self.num_envs)

    def start_episodes(self, which: Array, observations: Nested, infos: dict[str, Any]) -> None:
        """Forget what was done."""

        def clear(x: Array) -> None:
            x[which] = 0

        map_leaves(clear, self.memory)

    def advance(
        self, observations: Nested, actions: Nested, rewards: Array, ended: Array, infos: dict[str, Any]
    ) -> None:
        """Keep what was done."""
        self.memory = self._fields.of_step(actions, as_earned_in_training(infos, rewards))
        # In evaluation the lives of a game are one episode; the policy learned from them as episodes of their own.
        for which, _ in told(infos, LIFE_LOST):
            self.start_episodes(which, observations, infos)

    def show(self, observations: Nested) -> Nested:
        """Return the observations with what was done beside them."""
        return self._fields.join(observations, self.memory)


def _describe(space: spaces.Space[Any]) -> spaces.Space[Any]:
    """Return the space of what stands for an action in observations."""
    if isinstance(space, spaces.Dict):
        return spaces.Dict({key: _describe(part) for key, part in space.items()})
    if isinstance(space, spaces.Tuple):
        return spaces.Tuple([_describe(part) for part in space])
    if (choices := _choices(space)) is not None:
        return spaces.MultiBinary(int(choices.sum()))
    if isinstance(space, spaces.MultiBinary):
        return spaces.MultiBinary(int(np.prod(space.shape)))
    if isinstance(space, spaces.Box):
        low, high = (bound.astype(np.float32).ravel() for bound in (space.low, space.high))
        return spaces.Box(np.minimum(low, 0), np.maximum(high, 0), dtype=np.float32)  # zeros are among them
    raise ConfigurationError(
        f"env.{ACTION}=True is not valid: expected False, since actions in {space} have no fixed form"
    )


def _choices(space: spaces.Space[Any]) -> np.ndarray[Any, Any] | None:
    """Return the number of choices of each entry; None where the entries are numbers to be shown as they are."""
    if isinstance(space, spaces.Discrete):
        return np.array([int(space.n)])
    is_integer_box = isinstance(space, spaces.Box) and not np.issubdtype(space.dtype, np.floating)
    if not (is_integer_box or isinstance(space, spaces.MultiDiscrete)):
        return None
    counts = num_choices(space)
    return np.array(counts) if max(counts) <= MAX_INTEGER_CHOICES or not is_integer_box else None


def _describer(space: spaces.Space[Any]) -> Callable[[Any], Array]:
    """Return what turns actions `[..., *shape]` into what stands for them, `[..., n]`."""
    event_dims = len(space.shape or ())
    if (choices := _choices(space)) is None:
        return partial(_flatten, event_dims, np.int8 if isinstance(space, spaces.MultiBinary) else np.float32)
    start = np.ravel(space.low if isinstance(space, spaces.Box) else space.start)  # type: ignore[attr-defined]
    return partial(_one_hot, event_dims, np.cumsum(choices) - choices - start.astype(np.int64), int(choices.sum()))


def _flatten(event_dims: int, dtype: Any, actions: Any) -> Array:  # noqa: ANN401
    actions = np.asarray(actions)
    flat: Array = actions.reshape(*actions.shape[: actions.ndim - event_dims], -1)
    return flat.astype(dtype)


def _one_hot(event_dims: int, offsets: Array, size: int, actions: Any) -> Array:  # noqa: ANN401
    places = _flatten(event_dims, np.int64, actions) + offsets
    one_hot = np.zeros((*places.shape[:-1], size), np.int8)
    if places.ndim == 1:
        one_hot[places] = 1
    else:
        np.put_along_axis(one_hot, places, 1, axis=-1)
    return one_hot

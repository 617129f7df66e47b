"""Transformed rewards, observations and ends of episodes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.wrappers import TransformObservation
from torch import Tensor

from lightning_rl.validation import check, check_number, is_int

RewardClip = Literal["abs_one", "soft_asymmetric"] | float
RewardTransform = Callable[[Any], Any]
"""A function of rewards `[B]`, in an array or a tensor."""
_NAMED = get_args(get_args(RewardClip)[0])


def check_reward_options(scale: float, clip: RewardClip | None, prefix: str = "") -> None:
    """Raise a `ConfigurationError` unless both options are valid; `prefix` precedes their names: `env.`."""
    check_number(f"{prefix}reward_scale", scale, above=0)
    if isinstance(clip, str):
        check(clip in _NAMED, f"{prefix}reward_clip", clip, f"{', '.join(_NAMED)}, a positive number or None")
    elif clip is not None:
        check_number(f"{prefix}reward_clip", clip, above=0)


def make_reward_transform(scale: float = 1.0, clip: RewardClip | None = None) -> RewardTransform | None:
    """Return the function of the options `env.reward_scale` and `env.reward_clip`; None if both have no effect."""
    if scale == 1 and clip is None:
        return None
    return functools.partial(_transform, scale, clip)


def _transform(scale: float, clip: RewardClip | None, rewards: Any) -> Any:
    bound = 1.0 if clip == "abs_one" else clip
    is_tensor = isinstance(rewards, Tensor)
    library: Any = torch if is_tensor else np
    scaled = (rewards if is_tensor else rewards.astype(np.float64)) * scale
    if isinstance(bound, str):
        squeezed = 5 * library.tanh(scaled / 5)
        scaled = library.where(scaled < 0, 0.3 * squeezed, squeezed)
    elif bound is not None:
        scaled = library.clip(scaled, -bound, bound)
    return scaled


class PartialObservation(TransformObservation[Any, Any, Any]):
    """Shows the entries `indices` of a vector observation: `[0, 2]` hides the velocities of CartPole.

    Observations that are not vectors or lack an entry raise a `ConfigurationError`.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], indices: Sequence[int]) -> None:
        space, at = _part("indices", env.observation_space, indices), np.asarray(indices)
        super().__init__(env, lambda observation: observation[at], space)


class SplitObservation(TransformObservation[Any, Any, Any]):
    """Groups the entries of a vector into a `Dict`, whose parts `policy.critic_only` can hide from the actor.

    Args:
        env: An environment with a `Box` of one dimension.
        parts: Indices of the entries of each part: `{"position": [0, 2], "velocity": [1, 3]}` for CartPole.

    Raises:
        ConfigurationError: Observations are not vectors, or have no such entry.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], parts: Mapping[str, Sequence[int]]) -> None:
        check(len(parts) > 0, "parts", parts, "a dict from names to indices")
        space = spaces.Dict({name: _part(f"parts.{name}", env.observation_space, at) for name, at in parts.items()})
        arrays = {name: np.asarray(at) for name, at in parts.items()}
        super().__init__(env, lambda observation: {name: observation[at] for name, at in arrays.items()}, space)


def _part(field: str, space: spaces.Space[Any], indices: Sequence[int]) -> spaces.Box:
    """Return the space of some entries of a vector; raise an error about `field` if the space has no such entries."""
    is_vector = isinstance(space, spaces.Box) and len(space.shape) == 1
    check(is_vector, field, indices, f"observations that are vectors, not {space}")
    assert isinstance(space, spaces.Box)
    known = len(indices) > 0 and all(is_int(i) and 0 <= i < space.shape[0] for i in indices)
    check(known, field, indices, f"some of the entries 0 to {space.shape[0] - 1}")
    at = np.asarray(indices)
    return spaces.Box(space.low[at], space.high[at], dtype=space.dtype)


class TerminationAsTruncation(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Reports terminations as truncations, so that values bootstrap from the final observation.

    For environments that terminate at a time limit, such as old versions of Pendulum (DI-engine's `ignore_done`).
    """

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        return observation, reward, False, terminated or truncated, info

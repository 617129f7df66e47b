"""Scaled and clipped rewards for training."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from lightning_rl.validation import check, check_number

RewardClip = Literal["abs_one", "soft_asymmetric"] | float
RewardTransform = Callable[[Any], Any]
"""A function of one reward, or of rewards `[B]`."""
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


def _transform(scale: float, clip: RewardClip | None, rewards: Any) -> Any:  # noqa: ANN401
    bound = 1.0 if clip == "abs_one" else clip
    if type(rewards) is float and not isinstance(bound, str):  # in every step, where NumPy takes ten times as long
        return rewards * scale if bound is None else float(min(max(rewards * scale, -bound), bound))
    is_tensor = isinstance(rewards, Tensor)
    library: Any = torch if is_tensor else np
    scaled = (rewards if is_tensor else np.asarray(rewards, np.float64)) * scale
    if isinstance(bound, str):
        squeezed = 5 * library.tanh(scaled / 5)
        scaled = library.where(scaled < 0, 0.3 * squeezed, squeezed)
    elif bound is not None:
        scaled = library.clip(scaled, -bound, bound)
    return scaled if is_tensor or np.ndim(rewards) else float(scaled)

"""From actions of a policy to what environments take."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from gymnasium import spaces

from lightning_rl.nested import Nested


def to_environment(space: spaces.Space[Any], action: Nested) -> Nested:
    """Turn a batch of actions `[B, ...]` into what the environments take.

    Choices are counted from the space's `start` (those of an integer `Box` from its `low`); continuous actions are
    clipped to the bounds; all get the space's shape and dtype, those of a `Dict` or `Tuple` part by part.

    Args:
        space: Of one environment.
        action: In the units of the space (`Distribution.to_space`), nested as the space is.
    """
    if isinstance(space, spaces.Discrete):
        return action + space.start if space.start else action
    if isinstance(space, spaces.Dict):
        return {key: to_environment(part, action[key]) for key, part in space.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(to_environment(part, x) for part, x in zip(space, action, strict=True))
    shaped = action.reshape(-1, *cast(tuple[int, ...], space.shape))
    if isinstance(space, spaces.MultiDiscrete):
        return (shaped + space.start).astype(space.dtype, copy=False)
    if isinstance(space, spaces.MultiBinary):
        return shaped.astype(space.dtype, copy=False)
    space = cast(spaces.Box, space)
    if not np.issubdtype(space.dtype, np.floating):
        # Where that wraps around, adding the bound wraps back.
        return shaped.astype(space.dtype) + space.low
    clipped: np.ndarray = np.clip(shaped, space.low, space.high)
    return clipped.astype(space.dtype, copy=False)

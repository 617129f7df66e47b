"""Observations as tensors: of which dtype, and some to try things with."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from lightning_rl.masks import ActionMask
from lightning_rl.nested import Nested, map_space


def observation_dtype(space: spaces.Space[Any], parameter_dtype: torch.dtype) -> np.dtype[Any]:
    """Return the dtype in which a rollout stores observations of `space`, a leaf of a nested one.

    Integers stay as they are; floating-point ones are float32, or float64 for a float64 network.
    """
    assert space.dtype is not None
    if not np.issubdtype(space.dtype, np.floating):
        return np.dtype(space.dtype)
    return np.dtype(np.float64 if parameter_dtype == torch.float64 else np.float32)


def sampled_observations(
    space: spaces.Space[Any], parameter_dtype: torch.dtype, num_rows: int, seed: int = 0
) -> Nested:
    """Return the same observation from a space several times, with masks that allow everything.

    Args:
        space: Of one environment.
        parameter_dtype: Of the policy that they are for.
        num_rows: How often.
        seed: Which one.
    """

    def rows(leaf: spaces.Space[Any]) -> Tensor:
        leaf = copy.deepcopy(leaf)  # a space has a generator
        leaf.seed(seed)
        row = np.asarray(leaf.sample()).astype(observation_dtype(leaf, parameter_dtype))
        return torch.from_numpy(np.stack([np.ones_like(row) if isinstance(leaf, ActionMask) else row] * num_rows))

    return map_space(rows, space)

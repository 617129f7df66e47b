"""Distributions of nested actions, and conversion of actions for the environment."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from lightning_rl.nested import Nested, leaves, map_leaves, map_space
from lightning_rl.policies.distributions.base import Distribution


class Joint(Distribution):
    """Independent distributions in dicts and tuples, as the parts of a `Dict` or `Tuple` space; so are its actions.

    Args:
        parts: Nested distributions.
        paths: Names of the parts, in the order of `leaves`.
    """

    def __init__(self, parts: Nested, paths: list[str]) -> None:
        self.parts = parts
        self.paths = paths

    def sample(self, generator: torch.Generator | None = None) -> Nested:
        """Draw every part."""
        return map_leaves(lambda part: part.sample(generator), self.parts)

    def mode(self) -> Nested:
        """Return the most likely action of every part."""
        return map_leaves(lambda part: part.mode(), self.parts)

    def log_prob(self, action: Nested) -> Tensor:
        """Return the log-probability of `action`, summed over parts."""
        return _sum(map_leaves(lambda part, x: part.log_prob(x), self.parts, action))

    def entropy(self) -> Tensor:
        """Return the entropy, summed over parts."""
        return _sum(map_leaves(lambda part: part.entropy(), self.parts))

    def kl(self, other: Distribution) -> Tensor:
        """Return the divergence, summed over parts."""
        return _sum(map_leaves(lambda part, another: part.kl(another), self.parts, cast(Joint, other).parts))

    def parameters(self) -> Nested:
        """Return those of every part, nested as the parts are."""
        return map_leaves(lambda part: part.parameters(), self.parts)

    def with_parameters(self, parameters: Nested) -> Joint:
        """Return distributions of the same parts with other ones."""
        parts = map_leaves(lambda part, x: part.with_parameters(x), self.parts, parameters)
        return Joint(parts, self.paths)

    def to_space(self, action: Nested) -> Nested:
        """Return every part in the units of its space."""
        return map_leaves(lambda part, x: part.to_space(x), self.parts, action)

    def entropies(self) -> dict[str, Tensor]:
        """Return the entropy of every part by its path: `{"move": …, "arm.0": …}`."""
        return {
            ".".join(filter(None, (path, inner))): entropy
            for path, part in zip(self.paths, leaves(self.parts), strict=True)
            for inner, entropy in part.entropies().items()
        }


def _sum(terms: Nested) -> Tensor:
    total: Tensor = functools.reduce(operator.add, leaves(terms))
    return total


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


def from_environment(space: spaces.Space[Any], action: Nested) -> Nested:
    """Turn actions `[B, ...]` that environments got into those of a policy: the way back of `to_environment`.

    For distributions whose actions are in the units of the space; what was clipped stays clipped.

    Args:
        space: Of one environment.
        action: Nested as the space is.
    """
    if isinstance(space, spaces.Dict):
        return {key: from_environment(part, action[key]) for key, part in space.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(from_environment(part, x) for part, x in zip(space, action, strict=True))
    if isinstance(space, spaces.Discrete):
        return np.asarray(action, np.int64).reshape(-1) - int(space.start)
    rows = np.asarray(action).reshape(len(action), *cast(tuple[int, ...], space.shape))
    if isinstance(space, spaces.MultiDiscrete):
        rows = rows.astype(np.int64) - np.asarray(space.start)
    elif isinstance(space, spaces.Box) and not np.issubdtype(space.dtype, np.floating):
        rows = rows.astype(np.int64) - space.low.astype(np.int64)
    return rows.reshape(len(rows), -1)


def tensor_conversion(space: spaces.Space[Any], device: torch.device) -> Nested:
    """Return functions that do with tensors what `to_environment` does with arrays, nested as the space is.

    Args:
        space: Of one environment.
        device: Of the environments, which the actions are brought to.
    """

    def conversion(leaf: spaces.Space[Any]) -> Callable[[Tensor], Tensor]:
        if isinstance(leaf, spaces.Discrete):
            return lambda x: x.to(device) + int(leaf.start)
        shape, dtype = cast(tuple[int, ...], leaf.shape), torch.from_numpy(np.zeros(0, leaf.dtype)).dtype
        if isinstance(leaf, spaces.MultiBinary):
            return lambda x: x.to(device, dtype).reshape(-1, *shape)
        if isinstance(leaf, spaces.MultiDiscrete):
            start = torch.from_numpy(np.asarray(leaf.start)).to(device)
            return lambda x: (x.to(device).reshape(-1, *shape) + start).to(dtype)
        box = cast(spaces.Box, leaf)
        low, high = (torch.from_numpy(bound).to(device) for bound in (box.low, box.high))
        if not np.issubdtype(box.dtype, np.floating):
            return lambda x: x.to(device).reshape(-1, *shape).to(dtype) + low
        return lambda x: x.to(device, dtype).reshape(-1, *shape).clamp(low, high)

    return map_space(conversion, space)

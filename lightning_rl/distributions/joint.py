"""Several independent actions at once."""

from __future__ import annotations

import functools
import operator
from typing import cast

import torch
from torch import Tensor

from lightning_rl.distributions.base import Distribution
from lightning_rl.nested import Nested, leaves, map_leaves


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

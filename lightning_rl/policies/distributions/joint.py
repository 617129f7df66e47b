"""Distributions of nested actions, and their head."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_rl.nested import Nested, leaves, map_leaves, part_at
from lightning_rl.policies.distributions.base import Distribution


class Joint(Distribution):
    """Independent distributions, nested as the parts of a `Dict` or `Tuple` space; `paths` in the order of `leaves`."""

    def __init__(self, parts: Nested, paths: list[str]) -> None:
        self.parts = parts
        self.paths = paths

    def sample(self, generator: torch.Generator | None = None) -> Nested:
        return map_leaves(lambda part: part.sample(generator), self.parts)

    def mode(self) -> Nested:
        return map_leaves(lambda part: part.mode(), self.parts)

    def log_prob(self, action: Nested) -> Tensor:
        return self._sum(lambda part, x: part.log_prob(x), action)

    def entropy(self) -> Tensor:
        return self._sum(lambda part: part.entropy())

    def kl(self, other: Distribution) -> Tensor:
        return self._sum(lambda part, x: part.kl(x), cast(Joint, other).parts)

    def parameters(self) -> Nested:
        return map_leaves(lambda part: part.parameters(), self.parts)

    def with_parameters(self, parameters: Nested) -> Joint:
        return Joint(map_leaves(lambda part, x: part.with_parameters(x), self.parts, parameters), self.paths)

    def to_space(self, action: Nested) -> Nested:
        return map_leaves(lambda part, x: part.to_space(x), self.parts, action)

    def entropies(self) -> dict[str, Tensor]:
        """Return the entropies of the parts by path, `arm.0.2` for a component of a part."""
        return {
            ".".join(filter(None, (path, inner))): entropy
            for path, part in zip(self.paths, leaves(self.parts), strict=True)
            for inner, entropy in part.entropies().items()
        }

    def _sum(self, term: Callable[..., Tensor], *others: Nested) -> Tensor:
        total: Tensor = functools.reduce(operator.add, leaves(map_leaves(term, self.parts, *others)))
        return total


class JointHead(nn.Module):
    """A head for every part of a `Dict` or `Tuple` space; `masked` are the paths of the parts with masks."""

    def __init__(self, heads: Nested, paths: list[str], masked: Collection[str] = ()) -> None:
        super().__init__()
        self.paths = paths
        self.masked = frozenset(masked)
        # A list, since the path of a part may be no valid name of a module.
        self.heads = nn.ModuleList(leaves(heads))
        places = iter(range(len(self.heads)))
        self.places = map_leaves(lambda _: next(places), heads)

    def forward(self, features: Tensor, mask: Nested = None) -> Joint:
        def part(place: int) -> Any:  # noqa: ANN401
            return self.heads[place](features, *self._own(mask, self.paths[place]))

        return Joint(map_leaves(part, self.places), self.paths)

    def clipped(self, actions: Nested, mask: Nested = None) -> Tensor | None:
        """Return which components of actions the environment clips, of all parts with bounds, as one vector."""
        each = zip(cast(Any, self.heads), leaves(actions), self.paths, strict=True)
        parts = [head.clipped(x, *self._own(mask, path)) for head, x, path in each if hasattr(head, "clipped")]
        flags = [part for part in parts if part is not None]
        return torch.cat(flags) if flags else None

    def _own(self, mask: Nested, path: str) -> tuple[Any, ...]:
        """Return the mask of a part; nothing if it has none."""
        return () if mask is None or path not in self.masked else (part_at(mask, path),)

"""Heads: from features to the distribution of one part of an action."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal, cast

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from lightning_rl.distributions.bernoulli import Bernoulli
from lightning_rl.distributions.beta import Beta
from lightning_rl.distributions.bounds import Bounds
from lightning_rl.distributions.categorical import Categorical, MultiCategorical
from lightning_rl.distributions.joint import Joint
from lightning_rl.layers import HeadLinear, variance_scaling
from lightning_rl.masks import num_choices
from lightning_rl.nested import Nested, leaves, map_leaves, part_at
from lightning_rl.validation import check, is_one_of

Initialization = Literal["orthogonal", "tf_agents"]

# Probability 0 in float32, and finite, so that 0 times it is 0.
IMPOSSIBLE = -1e9


def projection(in_features: int, out_features: int, initialization: str) -> HeadLinear:
    """Return the linear layer of a head.

    Args:
        in_features: Number of features.
        out_features: Number of parameters of the distribution.
        initialization: `orthogonal` with a gain of 0.01, or `tf_agents`: a truncated normal distribution of variance
            0.1 / `in_features`. Biases are zero.
    """
    choices = ("orthogonal", "tf_agents")
    check(is_one_of(initialization, choices), "action_distribution.initialization", initialization, f"one of {choices}")
    # A near-zero gain starts the policy near uniform (Andrychowicz et al. 2021, section 3.2).
    layer = HeadLinear(in_features, out_features, gain=0.01)
    return variance_scaling(layer, 0.1) if initialization == "tf_agents" else layer


def masked(logits: Tensor, mask: Tensor | None) -> Tensor:
    """Return logits without those of choices that a mask, of the same shape, leaves out; None leaves all."""
    return logits if mask is None else logits.masked_fill(mask == 0, IMPOSSIBLE)


class CategoricalHead(nn.Module):
    """Linear layer from features to the logits of a `Discrete` action space."""

    def __init__(
        self, in_features: int, space: spaces.Discrete, *, initialization: Initialization = "orthogonal"
    ) -> None:
        super().__init__()
        self.logits = projection(in_features, int(space.n), initialization)

    def forward(self, features: Tensor, mask: Tensor | None = None) -> Categorical:
        """Map features `[..., f]` to a distribution over the choices that a mask `[..., n]` allows."""
        return Categorical(masked(self.logits(features), mask))


class MultiCategoricalHead(nn.Module):
    """Linear layer to the logits of every component of a `MultiDiscrete` space, or of an integer `Box`."""

    def __init__(
        self,
        in_features: int,
        space: spaces.MultiDiscrete | spaces.Box,
        *,
        initialization: Initialization = "orthogonal",
    ) -> None:
        super().__init__()
        counts = num_choices(space)
        self.shape = (len(counts), max(counts))
        self.logits = projection(in_features, sum(counts), initialization)
        self.places: Tensor | None
        padded = None
        if len(set(counts)) > 1:  # logits of components with fewer choices are filled up
            exists = np.arange(max(counts)) < np.asarray(counts)[:, None]
            padded = torch.from_numpy(np.where(exists, exists.cumsum().reshape(exists.shape) - 1, sum(counts)).ravel())
        self.register_buffer("places", padded, persistent=False)

    def forward(self, features: Tensor, mask: Tensor | None = None) -> MultiCategorical:
        """Map features `[..., f]` to a distribution over the choices that a mask allows, `[..., sum of choices]`."""
        logits = masked(self.logits(features), mask)
        if self.places is not None:
            logits = nn.functional.pad(logits, (0, 1), value=IMPOSSIBLE).index_select(-1, self.places)
        return MultiCategorical(logits.unflatten(-1, self.shape))  # type: ignore[no-untyped-call]


class BernoulliHead(nn.Module):
    """Linear layer to the log-odds of every switch of a `MultiBinary` space."""

    def __init__(
        self, in_features: int, space: spaces.MultiBinary, *, initialization: Initialization = "orthogonal"
    ) -> None:
        super().__init__()
        self.logits = projection(in_features, int(np.prod(space.shape)), initialization)

    def forward(self, features: Tensor, mask: Tensor | None = None) -> Bernoulli:
        """Map features `[..., f]` to a distribution over what a mask `[..., *shape, 2]` allows."""
        logits = self.logits(features)
        if mask is not None:
            may_be = (mask != 0).reshape(*logits.shape, 2)
            logits = logits.masked_fill(~may_be[..., 1], IMPOSSIBLE).masked_fill(~may_be[..., 0], -IMPOSSIBLE)
        return Bernoulli(logits)


class BetaHead(nn.Module):
    """Linear layer to the concentrations of beta distributions over a bounded `Box`, each 1 + softplus: one peak."""

    def __init__(self, in_features: int, space: spaces.Box, *, initialization: Initialization = "orthogonal") -> None:
        super().__init__()
        self.bounds = Bounds(space)
        self.concentrations = projection(in_features, 2 * len(self.bounds.low), initialization)

    def forward(self, features: Tensor) -> Beta:
        """Map features `[..., f]` to a distribution."""
        alpha, beta = (1 + nn.functional.softplus(self.concentrations(features))).chunk(2, -1)
        return Beta(alpha, beta, self.bounds)


class JointHead(nn.Module):
    """A head for every part of a `Dict` or `Tuple` space.

    Args:
        heads: Nested as the space is.
        paths: Names of the parts, in the order of `leaves`.
        masked: Those that have masks.
    """

    def __init__(self, heads: Nested, paths: list[str], masked: Collection[str] = ()) -> None:
        super().__init__()
        self.paths = paths
        self.masked = frozenset(masked)
        # A list: names of parts may be such as a module cannot have.
        self.heads = nn.ModuleList(leaves(heads))
        places = iter(range(len(self.heads)))
        self.places = map_leaves(lambda _: next(places), heads)

    def forward(self, features: Tensor, mask: Nested = None) -> Joint:
        """Map features `[..., f]` to a distribution over what nested masks allow."""

        def part(place: int) -> Any:  # noqa: ANN401
            path = self.paths[place]
            if mask is None or path not in self.masked:
                return self.heads[place](features)
            return self.heads[place](features, part_at(mask, path))

        return Joint(map_leaves(part, self.places), self.paths)

    def saturation(self, actions: Nested) -> tuple[Tensor, int] | None:
        """Return how many components of actions are clipped, and of how many that may be; None if none may be."""
        pairs = [
            pair
            for head, x in zip(self.heads, leaves(actions), strict=True)
            if hasattr(head, "saturation") and (pair := cast(Any, head).saturation(x)) is not None
        ]
        return (torch.stack([count for count, _ in pairs]).sum(), sum(total for _, total in pairs)) if pairs else None

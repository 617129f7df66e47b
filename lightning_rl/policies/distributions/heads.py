"""Layers that turn features into action distributions."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, Literal, cast

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn.functional import softplus

from lightning_rl.masks import num_choices
from lightning_rl.nested import Nested, leaves, map_leaves, part_at
from lightning_rl.policies.distributions.base import at_least_float32
from lightning_rl.policies.distributions.continuous import Beta, Bounds, DiagonalGaussian, SquashedGaussian, limit
from lightning_rl.policies.distributions.discrete import Bernoulli, Categorical, MultiCategorical
from lightning_rl.policies.distributions.joint import Joint
from lightning_rl.policies.networks.layers import HeadLinear, variance_scaling
from lightning_rl.validation import check, check_number, is_one_of

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


class _GaussianParameters(nn.Module):
    """Linear mean, and a standard deviation that depends on the features or does not.

    Args:
        in_features: Number of features.
        space: The box.
        initial_log_std: Logarithm of the initial standard deviation, where `initial_std` is not given.
        std: `state_independent`: one parameter for each action dimension; `state_dependent`: a linear layer.
        std_transform: Makes it positive: `exp` or `softplus`.
        min_std: The standard deviation is never below this; None does not limit it.
        max_std: Nor above this.
        initial_std: Standard deviation to begin with; where it depends on the features, up to small weights.
        initialization: Of the linear layers, see `projection`.
    """

    def __init__(
        self,
        in_features: int,
        space: spaces.Box,
        *,
        initial_log_std: float = 0.0,
        std: Literal["state_independent", "state_dependent"] = "state_independent",
        std_transform: Literal["exp", "softplus"] = "exp",
        min_std: float | None = None,
        max_std: float | None = None,
        initial_std: float | None = None,
        initialization: Initialization = "orthogonal",
    ) -> None:
        super().__init__()
        check_number("initial_log_std", initial_log_std, at_least=-20, at_most=20)
        for name, value, choices in (
            ("std", std, ("state_independent", "state_dependent")),
            ("std_transform", std_transform, ("exp", "softplus")),
        ):
            check(is_one_of(value, choices), f"action_distribution.{name}", value, f"one of {choices}")
        initial_log_std = _check_stds(min_std, max_std, initial_std, initial_log_std)
        self.bounds = Bounds(space)
        self.log_limits = [None if x is None else math.log(x) for x in (min_std, max_std)]
        self.softplus = std_transform == "softplus"
        num_dimensions = len(self.bounds.low)
        raw = _inverse_softplus(math.exp(initial_log_std)) if self.softplus else initial_log_std
        self.mean = projection(in_features, num_dimensions, initialization)
        self.std_layer: nn.Linear | None = None
        if std == "state_dependent":
            self.std_layer = projection(in_features, num_dimensions, initialization)
            nn.init.constant_(self.std_layer.bias, raw)
        elif self.softplus:
            self.raw_std = nn.Parameter(torch.full((num_dimensions,), raw))
        else:
            self.log_std = nn.Parameter(torch.full((num_dimensions,), raw))

    def _log_std(self, features: Tensor) -> Tensor:
        if self.std_layer is not None:
            raw = self.std_layer(features)
        else:
            raw = self.raw_std if self.softplus else self.log_std
        low, high = self.log_limits
        if self.softplus:
            std = softplus(at_least_float32(raw))
            raw = std.clamp(min=torch.finfo(std.dtype).tiny).log()
        return raw if low is None and high is None else limit(raw, low, high)


def _inverse_softplus(x: float) -> float:
    return x + math.log(-math.expm1(-x))


def _check_stds(low: float | None, high: float | None, initial: float | None, initial_log_std: float) -> float:
    """Return the logarithm of the initial standard deviation.

    Raises:
        ConfigurationError: One is not positive, or they are not in order.
    """
    for name, value in (("min_std", low), ("max_std", high), ("initial_std", initial)):
        if value is not None:
            check_number(f"action_distribution.{name}", value, above=0)
    if low is not None and high is not None:
        check(low <= high, "action_distribution.min_std", low, f"at most max_std={high:g}")
    first = math.exp(initial_log_std) if initial is None else initial
    inside = (low is None or first >= low) and (high is None or first <= high)
    expected = f"initial_std within min_std={low} and max_std={high}; without it, exp(initial_log_std) is taken"
    check(inside, "action_distribution.initial_std", first, expected)
    return float(initial_log_std) if initial is None else math.log(initial)


class GaussianHead(_GaussianParameters):
    """A diagonal Gaussian for a `Box`, clipped to its bounds by the environment alone.

    Args:
        in_features: Number of features.
        space: The box.
        mean_transform: `none`, or `tanh`: the mean is squashed into the bounds, which must then be finite.
        **options: See `_GaussianParameters`.
    """

    def __init__(
        self,
        in_features: int,
        space: spaces.Box,
        *,
        mean_transform: Literal["none", "tanh"] = "none",
        **options: Any,  # noqa: ANN401 - those of the standard deviation
    ) -> None:
        super().__init__(in_features, space, **options)
        choices = ("none", "tanh")
        check(
            is_one_of(mean_transform, choices),
            "action_distribution.mean_transform",
            mean_transform,
            f"one of {choices}",
        )
        bounded = mean_transform == "none" or space.is_bounded()
        check(bounded, "action_distribution.mean_transform", mean_transform, f"none, since {space} has no bounds")
        self.squashes_mean = mean_transform == "tanh"

    def forward(self, features: Tensor) -> DiagonalGaussian:
        """Map features `[..., f]` to a distribution."""
        mean = self.mean(features)
        if self.squashes_mean:
            mean = self.bounds.from_unit(mean.tanh())
        return DiagonalGaussian(mean, self._log_std(features))

    def saturation(self, actions: Tensor) -> tuple[Tensor, int] | None:
        """Return how many components of actions `[..., a]` are clipped, and of how many; None without bounds."""
        return (self.bounds.outside(actions).sum(), actions.numel()) if self.bounds.any_finite else None


class SquashedGaussianHead(_GaussianParameters):
    """A diagonal Gaussian squashed by tanh into a bounded `Box`; mean and deviation are those before tanh."""

    def forward(self, features: Tensor) -> SquashedGaussian:
        """Map features `[..., f]` to a distribution."""
        return SquashedGaussian(self.mean(features), self._log_std(features), self.bounds)

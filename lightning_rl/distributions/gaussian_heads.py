"""Heads of diagonal Gaussians, squashed and not, and the ways to get at their standard deviations."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn.functional import softplus

from lightning_rl.distributions.base import at_least_float32
from lightning_rl.distributions.bounds import Bounds
from lightning_rl.distributions.gaussian import DiagonalGaussian
from lightning_rl.distributions.heads import Initialization, projection
from lightning_rl.distributions.limit import limit
from lightning_rl.distributions.squashed import SquashedGaussian
from lightning_rl.validation import check, check_number, is_one_of


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

"""Distributions of continuous actions, and the bounds of their parameters."""

from __future__ import annotations

import functools
import math
from typing import Any, cast

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor
from torch.nn.functional import softplus

from lightning_rl.policies.distributions.base import Distribution, at_least_float32, fill_normal


class Bounds:
    """Bounds of the components of a `Box`, flattened to `[a]`, in any dtype and on any device.

    No buffers: a module in bfloat16 would round them.

    Args:
        space: The box.

    Attributes:
        low: Lowest values, float64.
        high: Highest values, float64.
        log_volume: Logarithm of the volume of the box.
    """

    def __init__(self, space: spaces.Box) -> None:
        self.low = space.low.astype(np.float64).ravel()
        self.high = space.high.astype(np.float64).ravel()
        with np.errstate(divide="ignore"):
            self.log_volume = float(np.log(self.high - self.low).sum())
        self._tensors: dict[tuple[torch.device, torch.dtype], tuple[Tensor, ...]] = {}

    @property
    def any_finite(self) -> bool:
        """Whether some component is bounded on some side."""
        return bool(np.isfinite(self.low).any() or np.isfinite(self.high).any())

    def from_unit(self, x: Tensor) -> Tensor:
        """Map [-1, 1] to the bounds, shape `[..., a]`."""
        _, _, center, half_width = self._on(x)
        return center + half_width * x

    def outside(self, x: Tensor) -> Tensor:
        """Return where components lie outside the bounds, shape `[..., a]`."""
        low, high, _, _ = self._on(x)
        return (x < low) | (x > high)

    def _on(self, x: Tensor) -> tuple[Tensor, ...]:
        key = (x.device, x.dtype)
        if key not in self._tensors:
            # Halves first: their sum and difference may be too large for the dtype, or infinite minus infinite.
            with np.errstate(invalid="ignore"):
                arrays = (self.low, self.high, self.high / 2 + self.low / 2, self.high / 2 - self.low / 2)
            with torch.inference_mode(False):  # made while acting, used while learning
                self._tensors[key] = tuple(torch.as_tensor(array, dtype=x.dtype, device=x.device) for array in arrays)
        return self._tensors[key]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_tensors": {}}  # copies may live elsewhere


class _Limit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, low: float | None, high: float | None) -> Tensor:  # noqa: ANN401 - PyTorch's
        ctx.save_for_backward(x)
        ctx.limits = low, high
        return x.clamp(low, high)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        (x,), (low, high), gradient = ctx.saved_tensors, ctx.limits, gradients[0]
        # Descent raises x where the gradient is negative.
        if low is not None:
            gradient = torch.where((x < low) & (gradient > 0), 0, gradient)
        if high is not None:
            gradient = torch.where((x > high) & (gradient < 0), 0, gradient)
        return gradient, None, None


def limit(x: Tensor, low: float | None, high: float | None) -> Tensor:
    """Clamp `x`, but stop only those gradients that lead further out.

    `Tensor.clamp` stops all of them: what once left its limits would stay there for the rest of the run.
    """
    limited: Tensor = _Limit.apply(x, low, high)  # type: ignore[no-untyped-call]
    return limited


LOG_2PI = math.log(2 * math.pi)


class DiagonalGaussian(Distribution):
    """Independent normal distributions, one per action dimension.

    Args:
        mean: Shape `[..., a]`.
        log_std: Logarithm of the standard deviation, broadcastable to `mean`.
    """

    def __init__(self, mean: Tensor, log_std: Tensor) -> None:
        self.mean = at_least_float32(mean)
        self.log_std = at_least_float32(log_std)
        self._log_volume: Tensor | None = None

    @property
    def log_volume(self) -> Tensor:
        """Σ log std over action dimensions; one number where all rows have the same, else `[...]`."""
        if self._log_volume is None:
            self._log_volume = self.log_std.expand(*self.log_std.shape[:-1], self.mean.shape[-1]).sum(-1)
        return self._log_volume

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """Draw mean + std · ε; the action is not clipped to any bounds."""
        return self.mean + self.log_std.exp() * fill_normal(torch.empty_like(self.mean), generator)

    def mode(self) -> Tensor:
        """Return the mean."""
        return self.mean

    def log_prob(self, action: Tensor) -> Tensor:
        """Return the log-density of `action` (shape `[..., a]`), summed over action dimensions."""
        z = (action - self.mean) * (-self.log_std).exp()
        return -0.5 * z.square().sum(-1) - (self.log_volume + 0.5 * LOG_2PI * self.mean.shape[-1])

    def entropy(self) -> Tensor:
        """Return Σ (log std + ½ log 2πe)."""
        entropy = self.log_volume + 0.5 * (1 + LOG_2PI) * self.mean.shape[-1]
        return entropy.expand(self.mean.shape[:-1])

    def kl(self, other: Distribution) -> Tensor:
        """Return the closed form, summed over action dimensions."""
        other = cast(DiagonalGaussian, other)
        variance_ratio = (2 * (self.log_std - other.log_std)).exp()
        z = (self.mean - other.mean) * (-other.log_std).exp()
        per_dimension = 0.5 * (variance_ratio + z.square() - 1) + other.log_std - self.log_std
        return per_dimension.sum(-1)

    def parameters(self) -> dict[str, Tensor]:
        """Return mean and logarithm of the standard deviation, one for each row even if all rows have the same."""
        return {"mean": self.mean, "log_std": self.log_std.expand_as(self.mean)}

    def with_parameters(self, parameters: dict[str, Tensor]) -> DiagonalGaussian:
        """Return distributions with other ones."""
        return DiagonalGaussian(parameters["mean"], parameters["log_std"])


_NUM_NODES = 32


class SquashedGaussian(Distribution):
    """center + half width · tanh(u), with u from a diagonal Gaussian: actions never leave the bounds.

    An action's own form is u: from the bounded action, which rounds to the very bound, u could not be got back.
    Densities and entropies are those of the bounded action, in its units.

    Args:
        mean: Of u, shape `[..., a]`.
        log_std: Logarithm of the standard deviation of u, broadcastable to `mean`.
        bounds: Of the actions.
    """

    def __init__(self, mean: Tensor, log_std: Tensor, bounds: Bounds) -> None:
        self.before = DiagonalGaussian(mean, log_std)
        self.bounds = bounds

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """Draw u."""
        return self.before.sample(generator)

    def mode(self) -> Tensor:
        """Return the mean of u, whose image is the median; the density itself may peak at the bounds."""
        return self.before.mode()

    def log_prob(self, action: Tensor) -> Tensor:
        """Return the log-density of the bounded action that `action` (u, shape `[..., a]`) becomes."""
        return self.before.log_prob(action) - self._log_slope(action).sum(-1)

    def entropy(self) -> Tensor:
        """Return that of u plus the mean logarithm of the slope, by Gauss-Hermite quadrature.

        With 32 nodes for each dimension the error is below 1e-6 for deviations of u up to 1, below 1e-3 up to 2, and
        below 0.03 up to 5.
        """
        mean, std = self.before.mean.unsqueeze(-1), self.before.log_std.exp().unsqueeze(-1)
        nodes, weights = _quadrature(mean.device, mean.dtype)
        slope = (_log_tanh_slope(mean + std * nodes) * weights).sum(-1)
        return self.before.entropy() + slope.sum(-1) + self._log_half_volume

    def kl(self, other: Distribution) -> Tensor:
        """Return that of u: an invertible map does not change it."""
        return self.before.kl(cast(SquashedGaussian, other).before)

    def parameters(self) -> dict[str, Tensor]:
        """Return those of u."""
        return self.before.parameters()

    def with_parameters(self, parameters: dict[str, Tensor]) -> SquashedGaussian:
        """Return distributions with other ones."""
        return SquashedGaussian(parameters["mean"], parameters["log_std"], self.bounds)

    def to_space(self, action: Tensor) -> Tensor:
        """Return the bounded action."""
        return self.bounds.from_unit(action.tanh())

    def _log_slope(self, u: Tensor) -> Tensor:
        """Return the logarithm of the derivative of the bounded action, up to what is the same for all of them."""
        return _log_tanh_slope(u) + self._log_half_volume / u.shape[-1]

    @property
    def _log_half_volume(self) -> float:
        return self.bounds.log_volume - len(self.bounds.low) * math.log(2)


def _log_tanh_slope(u: Tensor) -> Tensor:
    """Return log(1 - tanh² u), which tanh itself would be too coarse for."""
    return 2 * (math.log(2) - u - softplus(-2 * u))


@functools.lru_cache
def _quadrature(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return nodes and weights of a mean over a standard normal distribution."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(_NUM_NODES)
    weights = weights / weights.sum()
    with torch.inference_mode(False):
        return torch.tensor(nodes, dtype=dtype, device=device), torch.tensor(weights, dtype=dtype, device=device)


class Beta(Distribution):
    """low + width · x, with independent x from beta distributions (Chou et al. 2017): actions never leave the bounds.

    An action's own form is the logit z = log x - log(1 - x): log x and log(1 - x), which its density is made of, are
    exact from z, also where x rounds to 0 or 1. Densities and entropies are those of the bounded action, in its units.

    Args:
        alpha: Concentration at the upper bound, at least 1, shape `[..., a]`.
        beta: Concentration at the lower bound, at least 1, shape `[..., a]`.
        bounds: Of the actions.
    """

    def __init__(self, alpha: Tensor, beta: Tensor, bounds: Bounds) -> None:
        self.alpha = at_least_float32(alpha)
        self.beta = at_least_float32(beta)
        self.bounds = bounds

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """Draw z, the difference of the logarithms of two gamma variables."""
        with torch.no_grad():
            return _log_gamma_sample(self.alpha, generator) - _log_gamma_sample(self.beta, generator)

    def mode(self) -> Tensor:
        """Return the logit of (α - 1) / (α + β - 2); the middle where both are 1 and every action is as likely."""
        tiny = torch.finfo(self.alpha.dtype).tiny
        return (self.alpha - 1).clamp(min=tiny).log() - (self.beta - 1).clamp(min=tiny).log()

    def log_prob(self, action: Tensor) -> Tensor:
        """Return the log-density of the bounded action that `action` (z, shape `[..., a]`) becomes."""
        log_x, log_rest = -softplus(-action), -softplus(action)
        per_dimension = (self.alpha - 1) * log_x + (self.beta - 1) * log_rest - _log_beta(self.alpha, self.beta)
        return per_dimension.sum(-1) - self.bounds.log_volume

    def entropy(self) -> Tensor:
        """Return the closed form, summed over action dimensions."""
        a, b = self.alpha, self.beta
        shape = _log_beta(a, b) - (a - 1) * a.digamma() - (b - 1) * b.digamma() + (a + b - 2) * (a + b).digamma()
        return shape.sum(-1) + self.bounds.log_volume

    def kl(self, other: Distribution) -> Tensor:
        """Return the closed form, summed over action dimensions."""
        other = cast(Beta, other)
        a, b, c, d = self.alpha, self.beta, other.alpha, other.beta
        moments = (a - c) * a.digamma() + (b - d) * b.digamma() + (c + d - a - b) * (a + b).digamma()
        return (_log_beta(c, d) - _log_beta(a, b) + moments).sum(-1)

    def parameters(self) -> dict[str, Tensor]:
        """Return both concentrations."""
        return {"alpha": self.alpha, "beta": self.beta}

    def with_parameters(self, parameters: dict[str, Tensor]) -> Beta:
        """Return distributions with other ones."""
        return Beta(parameters["alpha"], parameters["beta"], self.bounds)

    def to_space(self, action: Tensor) -> Tensor:
        """Return the bounded action."""
        return self.bounds.from_unit((action / 2).tanh())


def _log_gamma_sample(concentration: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return the logarithms of samples of gamma distributions with rate 1."""
    # Private to PyTorch, because `torch.distributions.Gamma` takes no generator.
    return torch._standard_gamma(concentration.contiguous(), generator=generator).log()


def _log_beta(a: Tensor, b: Tensor) -> Tensor:
    """Return the logarithm of the beta function."""
    return a.lgamma() + b.lgamma() - (a + b).lgamma()

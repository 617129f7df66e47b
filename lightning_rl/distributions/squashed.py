"""Normal distributions squashed into bounds."""

from __future__ import annotations

import functools
import math
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import softplus

from lightning_rl.distributions.base import Distribution
from lightning_rl.distributions.bounds import Bounds
from lightning_rl.distributions.gaussian import DiagonalGaussian

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

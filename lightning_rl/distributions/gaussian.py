"""Normal distributions, each action dimension by itself."""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor

from lightning_rl.distributions.base import Distribution, at_least_float32
from lightning_rl.distributions.noise import fill_normal

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

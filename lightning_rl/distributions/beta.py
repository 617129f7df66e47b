"""Beta distributions, stretched over bounds."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import softplus

from lightning_rl.distributions.base import Distribution, at_least_float32
from lightning_rl.distributions.bounds import Bounds


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
            first = torch._standard_gamma(self.alpha.contiguous(), generator=generator)
            return first.log() - torch._standard_gamma(self.beta.contiguous(), generator=generator).log()

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


def _log_beta(a: Tensor, b: Tensor) -> Tensor:
    """Return the logarithm of the beta function."""
    return a.lgamma() + b.lgamma() - (a + b).lgamma()

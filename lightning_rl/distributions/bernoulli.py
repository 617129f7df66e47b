"""Independent switches."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import softplus

from lightning_rl.distributions.base import Distribution, at_least_float32
from lightning_rl.distributions.noise import fill_uniform


class Bernoulli(Distribution):
    """Independent switches, each 0 or 1; an action has the shape `[..., k]`.

    Args:
        logits: Log-odds of 1, shape `[..., k]`.
    """

    def __init__(self, logits: Tensor) -> None:
        self.logits = at_least_float32(logits)

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """Draw every switch."""
        uniform = _uniform(self.logits, generator)
        return (uniform < self.logits.sigmoid()).to(torch.int8)

    def mode(self) -> Tensor:
        """Return 1 where that is likelier than 0."""
        return (self.logits > 0).to(torch.int8)

    def log_prob(self, action: Tensor) -> Tensor:
        """Return the log-probability of `action` (0 or 1, shape `[..., k]`), summed over switches."""
        return -softplus((1 - 2 * action.to(self.logits.dtype)) * self.logits).sum(-1)

    def entropy(self) -> Tensor:
        """Return the entropy, summed over switches."""
        return (softplus(self.logits) - self.logits * self.logits.sigmoid()).sum(-1)

    def kl(self, other: Distribution) -> Tensor:
        """Return the divergence, summed over switches."""
        p, q = self.logits, cast(Bernoulli, other).logits
        return (p.sigmoid() * (p - q) + softplus(q) - softplus(p)).sum(-1)

    def parameters(self) -> Tensor:
        """Return the logits."""
        return self.logits

    def with_parameters(self, parameters: Tensor) -> Bernoulli:
        """Return distributions with other logits."""
        return Bernoulli(parameters)


def _uniform(like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return the same numbers either way: an exported `uniform_` cannot be loaded, `rand_like` takes no generator."""
    return torch.rand_like(like) if generator is None else fill_uniform(torch.empty_like(like), generator)

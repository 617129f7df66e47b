"""Distributions of discrete actions, and the heads that make them."""

from __future__ import annotations

from typing import Self

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, pad

from lightning_rl.masks import num_choices
from lightning_rl.policies.distributions.base import Distribution, Initialization, projection
from lightning_rl.policies.networks.mlp import at_least_float32

IMPOSSIBLE = -1e30
"""Logit of a masked choice: its probability is 0 in float32. It is finite, so that 0 times it is 0."""
_MAX_NAMED_COMPONENTS = 16


class _OfLogits(Distribution):
    """Distributions that are defined by logits."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = at_least_float32(logits)

    def parameters(self) -> Tensor:
        return self.logits

    def with_parameters(self, parameters: Tensor) -> Self:
        return type(self)(parameters)


class Categorical(_OfLogits):
    """A choice between `n` actions with unnormalized log-probabilities `[..., n]`, finite: -1e30 excludes one."""

    _log_probs: Tensor | None = None

    @property
    def log_probs(self) -> Tensor:
        """Normalized log-probabilities, shape `[..., n]`."""
        if self._log_probs is not None:
            return self._log_probs
        log_probs = self.logits.log_softmax(-1)
        if log_probs.requires_grad == self.logits.requires_grad:  # not for later calls if computed in `no_grad`
            self._log_probs = log_probs
        return log_probs

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """Draw by the Gumbel-max trick: argmax(logits - log E) with E ~ Exp(1)."""
        return (self.logits - torch.empty_like(self.logits).exponential_(generator=generator).log_()).argmax(-1)

    def mode(self) -> Tensor:
        return self.logits.argmax(-1)

    def log_prob(self, action: Tensor) -> Tensor:
        """Return the log-probability of `action` (integers, shape `[...]`)."""
        return self.log_probs.gather(-1, action.unsqueeze(-1)).squeeze(-1)

    def entropy(self) -> Tensor:
        return -(self.log_probs.exp() * self.log_probs).sum(-1)

    def kl(self, other: Self) -> Tensor:
        return (self.log_probs.exp() * (self.log_probs - other.log_probs)).sum(-1)


class MultiCategorical(Categorical):
    """`k` independent choices between `n` values with unnormalized log-probabilities `[..., k, n]`; actions `[..., k]`.

    A component with fewer than `n` choices is padded with `IMPOSSIBLE`.
    """

    def log_prob(self, action: Tensor) -> Tensor:
        """Return the log-probability of `action` (integers, shape `[..., k]`), summed over components."""
        return super().log_prob(action).sum(-1)

    def entropy(self) -> Tensor:
        return super().entropy().sum(-1)

    def kl(self, other: Self) -> Tensor:
        return super().kl(other).sum(-1)

    def entropies(self) -> dict[str, Tensor]:
        """Return the entropy of every component by its index; of more than 16 components only the sum."""
        entropy = super().entropy()
        if entropy.shape[-1] > _MAX_NAMED_COMPONENTS:
            return {"": entropy.sum(-1)}
        return {str(index): component for index, component in enumerate(entropy.unbind(-1))}


class Bernoulli(_OfLogits):
    """Independent switches, each 0 or 1, with log-odds of 1 as `logits` `[..., k]`; actions are `[..., k]`."""

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        # Both draw the same numbers: an exported `uniform_` cannot be loaded, and `rand_like` takes no generator.
        if generator is None:
            uniform = torch.rand_like(self.logits)
        else:
            uniform = torch.empty_like(self.logits).uniform_(generator=generator)
        return (uniform < self.logits.sigmoid()).to(torch.int8)

    def mode(self) -> Tensor:
        return (self.logits > 0).to(torch.int8)

    def log_prob(self, action: Tensor) -> Tensor:
        """Return the log-probability of `action` (0 or 1, shape `[..., k]`), summed over switches."""
        return logsigmoid((2 * action.to(self.logits.dtype) - 1) * self.logits).sum(-1)

    def entropy(self) -> Tensor:
        x = self.logits.abs()  # of the more probable value: both summands are positive, so no digits cancel
        return (x * (-x).sigmoid() - logsigmoid(x)).sum(-1)

    def kl(self, other: Self) -> Tensor:
        likely = self.logits > 0  # as in `entropy`, no digits cancel if p is the logit of the less probable value
        p, q = (torch.where(likely, -x, x) for x in (self.logits, other.logits))
        return (p.sigmoid() * (p - q) + logsigmoid(-p) - logsigmoid(-q)).sum(-1)


def _masked(logits: Tensor, mask: Tensor | None) -> Tensor:
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
        return Categorical(_masked(self.logits(features), mask))


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
        places = None
        if len(set(counts)) > 1:  # the padding entries of shorter components point to one logit after the last
            exists = np.arange(max(counts)) < np.asarray(counts)[:, None]
            places = torch.from_numpy(np.where(exists, exists.cumsum().reshape(exists.shape) - 1, sum(counts)).ravel())
        self.register_buffer("places", places, persistent=False)

    def forward(self, features: Tensor, mask: Tensor | None = None) -> MultiCategorical:
        """Map features `[..., f]` to a distribution over the choices that a mask allows, `[..., sum of choices]`."""
        logits = _masked(self.logits(features), mask)
        if self.places is not None:
            logits = pad(logits, (0, 1), value=IMPOSSIBLE).index_select(-1, self.places)
        return MultiCategorical(logits.unflatten(-1, self.shape))  # type: ignore[no-untyped-call]


class BernoulliHead(nn.Module):
    """Linear layer to the log-odds of every switch of a `MultiBinary` space."""

    def __init__(
        self, in_features: int, space: spaces.MultiBinary, *, initialization: Initialization = "orthogonal"
    ) -> None:
        super().__init__()
        self.logits = projection(in_features, int(np.prod(space.shape)), initialization)

    def forward(self, features: Tensor, mask: Tensor | None = None) -> Bernoulli:
        """Map features `[..., f]` to a distribution over the values that a mask `[..., *shape, 2]` allows."""
        logits = self.logits(features)
        if mask is not None:
            allowed = (mask != 0).reshape(*logits.shape, 2)
            logits = logits.masked_fill(~allowed[..., 1], IMPOSSIBLE).masked_fill(~allowed[..., 0], -IMPOSSIBLE)
        return Bernoulli(logits)

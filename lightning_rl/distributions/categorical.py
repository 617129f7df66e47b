"""One of several actions, and several independent choices of that kind."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from lightning_rl.distributions.base import Distribution, at_least_float32
from lightning_rl.distributions.noise import fill_log_exponential

# More components than this are reported as one.
_MAX_NAMED_COMPONENTS = 16


class Categorical(Distribution):
    """One of `n` actions.

    Args:
        logits: Unnormalised log-probabilities, shape `[..., n]`.
    """

    def __init__(self, logits: Tensor) -> None:
        self.logits = at_least_float32(logits)
        self._log_probs: Tensor | None = None

    @property
    def log_probs(self) -> Tensor:
        """Normalised log-probabilities, shape `[..., n]`."""
        if self._log_probs is None:
            self._log_probs = self.logits.log_softmax(-1)
        return self._log_probs

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """Draw by the Gumbel-max trick: argmax(logits - log E) with E ~ Exp(1)."""
        return (self.logits - fill_log_exponential(torch.empty_like(self.logits), generator)).argmax(-1)

    def mode(self) -> Tensor:
        """Return the action with the largest logit."""
        return self.logits.argmax(-1)

    def log_prob(self, action: Tensor) -> Tensor:
        """Return the log-probability of `action` (integers, shape `[...]`)."""
        return self.log_probs.gather(-1, action.unsqueeze(-1)).squeeze(-1)

    def entropy(self) -> Tensor:
        """Return -Σ p log p."""
        return -(self.log_probs.exp() * self.log_probs).sum(-1)

    def kl(self, other: Distribution) -> Tensor:
        """Return Σ p (log p - log q)."""
        other = cast(Categorical, other)
        return (self.log_probs.exp() * (self.log_probs - other.log_probs)).sum(-1)

    def parameters(self) -> Tensor:
        """Return the logits."""
        return self.logits

    def with_parameters(self, parameters: Tensor) -> Categorical:
        """Return distributions with other logits."""
        return Categorical(parameters)


class MultiCategorical(Distribution):
    """Independent choices, one of `n` in each of `k` components; an action has the shape `[..., k]`.

    Args:
        logits: Unnormalised log-probabilities, shape `[..., k, n]`. Where components differ in their number of choices,
            those that one has not have logits so low that their probability is 0; they must be finite.
    """

    def __init__(self, logits: Tensor) -> None:
        self.components = Categorical(logits)

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """Draw every component."""
        return self.components.sample(generator)

    def mode(self) -> Tensor:
        """Return the likeliest choice in every component."""
        return self.components.mode()

    def log_prob(self, action: Tensor) -> Tensor:
        """Return the log-probability of `action` (integers, shape `[..., k]`), summed over components."""
        return self.components.log_prob(action).sum(-1)

    def entropy(self) -> Tensor:
        """Return the entropy, summed over components."""
        return self.components.entropy().sum(-1)

    def kl(self, other: Distribution) -> Tensor:
        """Return the divergence, summed over components."""
        return self.components.kl(cast(MultiCategorical, other).components).sum(-1)

    def parameters(self) -> Tensor:
        """Return the logits."""
        return self.components.logits

    def with_parameters(self, parameters: Tensor) -> MultiCategorical:
        """Return distributions with other logits."""
        return MultiCategorical(parameters)

    def entropies(self) -> dict[str, Tensor]:
        """Return the entropy of every component by its place, unless they are more than 16."""
        entropy = self.components.entropy()
        if entropy.shape[-1] > _MAX_NAMED_COMPONENTS:
            return {"": entropy.sum(-1)}
        return {str(place): component for place, component in enumerate(entropy.unbind(-1))}

"""Distributions of discrete actions."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import softplus

from lightning_rl.nested import Nested, leaves, map_leaves
from lightning_rl.policies.distributions.base import (
    Distribution,
    at_least_float32,
    fill_log_exponential,
    fill_uniform,
)

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


class Autoregressive(Distribution):
    """Components of an action of which each depends on those before it, as one choice among all combinations.

    Args:
        logits: Log-probability of each combination, shape `[..., n_1 · … · n_k]`, the last component counting fastest.
        counts: Number of choices of each component.
        names: What the components are called.
        strides: How far apart the combinations are in which a component differs by one, shape `[k]`.
        places: Nested as actions are: the place of a component, or a list of the places of the entries of a leaf.
    """

    def __init__(self, logits: Tensor, counts: list[int], names: list[str], strides: Tensor, places: Nested) -> None:
        self.combinations = Categorical(logits)
        self.counts = counts
        self.names = names
        self.strides = strides
        self.places = places

    def sample(self, generator: torch.Generator | None = None) -> Nested:
        """Draw a combination."""
        return self._action(self.combinations.sample(generator))

    def mode(self) -> Nested:
        """Return the likeliest combination, which need not begin with the likeliest first choice."""
        return self._action(self.combinations.mode())

    def log_prob(self, action: Nested) -> Tensor:
        """Return the log-probability of `action` (integers, nested as the space is)."""
        strides = self.strides

        def term(place: int | list[int], x: Tensor) -> Tensor:
            return (x * strides[place]).sum(-1) if isinstance(place, list) else x * strides[place]

        terms = list(leaves(map_leaves(term, self.places, action)))
        return self.combinations.log_prob(torch.stack(terms).sum(0))

    def entropy(self) -> Tensor:
        """Return -Σ p log p over all combinations."""
        return self.combinations.entropy()

    def kl(self, other: Distribution) -> Tensor:
        """Return Σ p (log p - log q) over all combinations."""
        return self.combinations.kl(cast(Autoregressive, other).combinations)

    def parameters(self) -> Tensor:
        """Return the log-probabilities of all combinations."""
        return self.combinations.logits

    def with_parameters(self, parameters: Tensor) -> Autoregressive:
        """Return distributions with other log-probabilities."""
        return Autoregressive(parameters, self.counts, self.names, self.strides, self.places)

    def entropies(self) -> dict[str, Tensor]:
        """Return the entropy of every component given those before it, by its name."""
        found: dict[str, Tensor] = {}
        joint, size = self.combinations.log_probs, 1
        before = joint.new_zeros(())
        for name, count in zip(self.names, self.counts, strict=True):
            size *= count
            up_to = Categorical(joint.reshape(*joint.shape[:-1], size, -1).logsumexp(-1)).entropy()
            found[name], before = up_to - before, up_to
        return found

    def _action(self, combination: Tensor) -> Nested:
        counts = self.strides.new_tensor(self.counts)
        choices = combination.unsqueeze(-1) // self.strides % counts
        return map_leaves(lambda place: choices[..., place], self.places)

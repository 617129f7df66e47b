"""Several choices, one after the other, each knowing those before it."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from lightning_rl.distributions.base import Distribution
from lightning_rl.distributions.categorical import Categorical
from lightning_rl.nested import Nested, leaves, map_leaves


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

"""The interface of action distributions, and the precision and noise that they share."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from lightning_rl.nested import Nested


def at_least_float32(x: Tensor) -> Tensor:
    """Return half-precision parameters in float32: log-probabilities need more digits than networks do."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def fill_log_exponential(x: Tensor, generator: torch.Generator | None) -> Tensor:
    """Fill `x` with log E, E ~ Exp(1): the negative of Gumbel's distribution."""
    return x.exponential_(generator=generator).log_()


def fill_normal(x: Tensor, generator: torch.Generator | None) -> Tensor:
    """Fill `x` with standard normal numbers."""
    return x.normal_(generator=generator)


def fill_uniform(x: Tensor, generator: torch.Generator | None) -> Tensor:
    """Fill `x` with numbers between 0 and 1, 1 excluded."""
    return x.uniform_(generator=generator)


class Distribution(ABC):
    """A batch of action distributions; leading dimensions are free, the action's own come last.

    Actions are in the policy's own form, in which their log-probability is exact: what a rollout stores. `to_space`
    brings them to the units of the action space, in which densities and entropies are measured.
    """

    @abstractmethod
    def sample(self, generator: torch.Generator | None = None) -> Nested:
        """Draw one action for every row, without gradient."""

    @abstractmethod
    def mode(self) -> Nested:
        """Return the most likely action of every row."""

    @abstractmethod
    def log_prob(self, action: Nested) -> Tensor:
        """Return the log-probability (or log-density) of `action`, shape `[...]`."""

    @abstractmethod
    def entropy(self) -> Tensor:
        """Return the (differential) entropy in nats, shape `[...]`."""

    @abstractmethod
    def kl(self, other: Distribution) -> Tensor:
        """Return KL(self ‖ other) in nats, shape `[...]`; `other` is of the same kind."""

    @abstractmethod
    def parameters(self) -> Nested:
        """Return the tensors that tell one distribution of this kind from another, one row `[...]` for each row.

        What a batch carries through shuffling and splitting, to measure later how far a policy has moved.
        """

    @abstractmethod
    def with_parameters(self, parameters: Nested) -> Distribution:
        """Return distributions of the same kind with the given `parameters`, of any leading dimensions."""

    def to_space(self, action: Nested) -> Nested:
        """Return `action` in the units of the action space; the same unless the distribution says otherwise."""
        return action

    def entropies(self) -> dict[str, Tensor]:
        """Return the entropies of the parts, which add up to `entropy`, by their path; an only part has the path ''."""
        return {"": self.entropy()}

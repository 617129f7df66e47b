"""Action distributions, and the heads that make them from features.

Only what a policy gradient needs, without the validation of `torch.distributions` (a third of its cost here).
Log-probabilities, entropies and divergences are computed in at least float32, whatever the network's precision.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, cast

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from lightning_rl.layers import HeadLinear
from lightning_rl.validation import ConfigurationError, check_number

_LOG_2PI = math.log(2 * math.pi)


def _at_least_float32(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


class Distribution(ABC):
    """A batch of action distributions; leading dimensions are free, the action's own come last."""

    @abstractmethod
    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """Draw one action for every row, without gradient."""

    @abstractmethod
    def mode(self) -> Tensor:
        """Return the most likely action of every row."""

    @abstractmethod
    def log_prob(self, action: Tensor) -> Tensor:
        """Return the log-probability (or log-density) of `action`, shape `[...]`."""

    @abstractmethod
    def entropy(self) -> Tensor:
        """Return the (differential) entropy in nats, shape `[...]`."""

    @abstractmethod
    def kl(self, other: Distribution) -> Tensor:
        """Return KL(self ‖ other) in nats, shape `[...]`; `other` is of the same kind."""


class Categorical(Distribution):
    """One of `n` actions.

    Args:
        logits: Unnormalised log-probabilities, shape `[..., n]`.
    """

    def __init__(self, logits: Tensor) -> None:
        self.logits = _at_least_float32(logits)
        self._log_probs: Tensor | None = None

    @property
    def log_probs(self) -> Tensor:
        """Normalised log-probabilities, shape `[..., n]`."""
        if self._log_probs is None:
            self._log_probs = self.logits.log_softmax(-1)
        return self._log_probs

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """Draw by the Gumbel-max trick: argmax(logits - log E) with E ~ Exp(1)."""
        noise = torch.empty_like(self.logits).exponential_(generator=generator)
        return (self.logits - noise.log_()).argmax(-1)

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


class DiagonalGaussian(Distribution):
    """Independent normal distributions, one per action dimension.

    Args:
        mean: Shape `[..., a]`.
        log_std: Logarithm of the standard deviation, broadcastable to `mean`.
    """

    def __init__(self, mean: Tensor, log_std: Tensor) -> None:
        self.mean = _at_least_float32(mean)
        self.log_std = _at_least_float32(log_std)

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """Draw mean + std · ε; the action is not clipped to any bounds."""
        noise = torch.empty_like(self.mean).normal_(generator=generator)
        return self.mean + self.log_std.exp() * noise

    def mode(self) -> Tensor:
        """Return the mean."""
        return self.mean

    def log_prob(self, action: Tensor) -> Tensor:
        """Return the log-density of `action` (shape `[..., a]`), summed over action dimensions."""
        z = (action - self.mean) * (-self.log_std).exp()
        log_std = self.log_std.expand_as(self.mean).sum(-1)
        return -0.5 * z.square().sum(-1) - log_std - 0.5 * _LOG_2PI * self.mean.shape[-1]

    def entropy(self) -> Tensor:
        """Return Σ (log std + ½ log 2πe)."""
        return self.log_std.expand_as(self.mean).sum(-1) + 0.5 * (1 + _LOG_2PI) * self.mean.shape[-1]

    def kl(self, other: Distribution) -> Tensor:
        """Return the closed form, summed over action dimensions."""
        other = cast(DiagonalGaussian, other)
        variance_ratio = (2 * (self.log_std - other.log_std)).exp()
        z = (self.mean - other.mean) * (-other.log_std).exp()
        per_dimension = 0.5 * (variance_ratio + z.square() - 1) + other.log_std - self.log_std
        return per_dimension.sum(-1)


class CategoricalHead(nn.Module):
    """Linear layer from features to the logits of a `Discrete` action space."""

    def __init__(self, in_features: int, num_actions: int) -> None:
        super().__init__()
        # A near-zero gain starts the policy near uniform (Andrychowicz et al. 2021, section 3.2).
        self.logits = HeadLinear(in_features, num_actions, gain=0.01)

    def forward(self, features: Tensor) -> Categorical:
        """Map features `[..., f]` to a distribution."""
        return Categorical(self.logits(features))


class GaussianHead(nn.Module):
    """Linear mean and a state-independent standard deviation for a `Box` action space."""

    def __init__(self, in_features: int, num_dimensions: int, initial_log_std: float = 0.0) -> None:
        super().__init__()
        check_number("initial_log_std", initial_log_std, at_least=-20, at_most=20)
        self.mean = HeadLinear(in_features, num_dimensions, gain=0.01)
        self.log_std = nn.Parameter(torch.full((num_dimensions,), float(initial_log_std)))

    def forward(self, features: Tensor) -> DiagonalGaussian:
        """Map features `[..., f]` to a distribution."""
        return DiagonalGaussian(self.mean(features), self.log_std)


def make_action_head(space: spaces.Space[Any], in_features: int, initial_log_std: float = 0.0) -> nn.Module:
    """Return the head for an action space.

    Raises:
        ConfigurationError: The space is neither `Discrete` nor a floating-point `Box`.
    """
    if isinstance(space, spaces.Discrete):
        return CategoricalHead(in_features, int(space.n))
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        return GaussianHead(in_features, int(np.prod(space.shape)), initial_log_std)
    raise ConfigurationError(f"action_space={space} is not supported: expected Discrete or a floating-point Box")


def to_environment(space: spaces.Space[Any], action: np.ndarray) -> np.ndarray:
    """Turn a batch of policy actions `[B, ...]` into what the environments take.

    Discrete actions are shifted by the space's `start`; continuous ones are clipped to the bounds and given the space's
    shape and dtype. The policy's own action, whose log-probability is known, is what a rollout stores.
    """
    if isinstance(space, spaces.Discrete):
        return action + space.start if space.start else action
    space = cast(spaces.Box, space)
    clipped: np.ndarray = np.clip(action.reshape(-1, *space.shape), space.low, space.high)
    return clipped.astype(space.dtype, copy=False)

"""The interface of action distributions, and the linear layer of the heads that make them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_rl.nested import Nested
from lightning_rl.policies.networks.mlp import HeadLinear, at_least_float32

Initialization = Literal["orthogonal", "tf_agents"]
"""`orthogonal` weights with a gain of 0.01, or a truncated normal distribution of variance 0.1 / `in_features`."""


class Distribution(ABC):
    """A batch of action distributions, `[...]`.

    Actions are in the policy's own form, the one that a rollout stores and whose log-probability is exact. `to_space`
    converts them to the units of the action space; densities and entropies are in these units.
    """

    @abstractmethod
    def sample(self, generator: torch.Generator | None = None) -> Nested:
        """Draw one action for every row with random numbers of `generator`, without gradient."""

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
    def kl(self, other: Any) -> Tensor:
        """Return KL(self ‖ other) in nats, shape `[...]`; `other` has the same class."""

    @abstractmethod
    def parameters(self) -> Nested:
        """Return the tensors that define the distributions, `[...]` rows each, for `with_parameters`."""

    @abstractmethod
    def with_parameters(self, parameters: Nested) -> Distribution:
        """Return distributions of the same class with other `parameters`, of any leading dimensions."""

    def to_space(self, action: Nested) -> Nested:
        """Return `action` in the units of the action space; unchanged by default."""
        return action

    def entropies(self) -> dict[str, Tensor]:
        """Return the entropies of the parts by path, `[...]` each; they add up to `entropy`."""
        return {"": self.entropy()}


def projection(in_features: int, out_features: int, initialization: Initialization) -> HeadLinear:
    """Return the linear layer from features to the parameters of a distribution."""
    # With a small gain the first policy is nearly uniform (Andrychowicz et al. 2021, section 3.2).
    layer = HeadLinear(in_features, out_features, gain=0.01)
    if initialization == "tf_agents":
        # As TensorFlow's `VarianceScaling`: the divisor is the standard deviation after truncation at ±2.
        std = math.sqrt(0.1 / in_features) / 0.87962566103423978
        with torch.no_grad():
            layer.weight.copy_(nn.init.trunc_normal_(at_least_float32(layer.weight), std=std, a=-2 * std, b=2 * std))
    return layer

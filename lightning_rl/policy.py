"""The actor-critic: observations in, action distribution and value out."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from lightning_rl.distributions import ActionDistribution, Distribution, make_action_head
from lightning_rl.layers import HeadLinear
from lightning_rl.memory import Memory
from lightning_rl.nested import Nested, part_at
from lightning_rl.networks import DiscreteEncoding, Network
from lightning_rl.policy_interface import PolicyOutput
from lightning_rl.rollouts.sequences import Sequences
from lightning_rl.trunk import Trunk
from lightning_rl.validation import check
from lightning_rl.value_normalization import ValueNormalization, make_value_normalizer


class ActorCritic(Trunk):
    """A trunk, which makes features of observations, with an action head and a value head upon it.

    Args:
        observation_space: `Box`, `Discrete`, `MultiDiscrete`, `MultiBinary`, or any nesting of these in `Dict` and
            `Tuple`. `ActionMask`s in one part of it say which actions are valid; no encoder sees them.
        action_space: `Discrete`, `MultiDiscrete`, `MultiBinary`, `Box`, or any nesting of these in `Dict` and `Tuple`.
        network: See `lightning_rl.networks.make_encoder`.
        hidden_sizes: Layers of the MLP.
        activation: Activation of the MLP.
        discrete_encoding: `one_hot` or `embedding`; see `lightning_rl.networks.make_encoder`.
        shared_encoder: One encoder for actor and critic instead of two; None shares it where there is an image and
            nothing is for the critic only.
        critic_only: Paths of parts of a `Dict` that the actor does not see: `goal`, `robot.mass`.
        memory: A recurrent core between encoder and heads: `lstm`, `gru`, or a dict with `kind` and further options of
            `lightning_rl.memory.MemoryOptions`; None: none.
        normalize_observations: Standardise every `Box` that is no image by its running moments; a dict says how, see
            `lightning_rl.observations.make_normalizer`.
        initial_log_std: Logarithm of the initial standard deviation of continuous actions.
        value_normalization: None, `running_std` or `popart`: in which units the value head predicts; see
            `lightning_rl.value_normalization`. What this class returns is in units of return all the same.
        action_distribution: Which distribution each part of the action has; None takes the default of its space. See
            `lightning_rl.distributions.make_action_head`.
    """

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        *,
        network: Network = "auto",
        hidden_sizes: Sequence[int] = (64, 64),
        activation: str = "tanh",
        discrete_encoding: DiscreteEncoding = "one_hot",
        shared_encoder: bool | None = None,
        critic_only: Sequence[str] | None = None,
        memory: Memory = None,
        value_normalization: ValueNormalization | None = None,
        normalize_observations: bool | dict[str, float] = False,
        initial_log_std: float = 0.0,
        action_distribution: ActionDistribution = None,
    ) -> None:
        super().__init__(
            observation_space,
            network=network,
            hidden_sizes=hidden_sizes,
            activation=activation,
            discrete_encoding=discrete_encoding,
            shared_encoder=shared_encoder,
            critic_only=critic_only,
            memory=memory,
            normalize_observations=normalize_observations,
        )
        mask_space = None if self._mask_path is None else part_at(observation_space, self._mask_path)
        self.action_head = make_action_head(action_space, self.width, initial_log_std, action_distribution, mask_space)
        self.value_head = HeadLinear(self.value_width, 1, gain=1.0)
        self.value_normalizer = make_value_normalizer(value_normalization)

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameters."""
        return self.value_head.weight.dtype

    def forward(self, observations: Nested, sequences: Sequences | None = None) -> tuple[Distribution, Tensor]:
        """Return the action distribution `[...]` and the value `[...]` at observations `[..., *shape]`.

        Args:
            observations: For a policy with memory rows `[N, *shape]`, those of `sequences`.
            sequences: Which rows follow one another; for a policy with memory.

        Raises:
            ValueError: A policy with memory was not given them.
        """
        features, value_features = self._features(observations, sequences)
        return self._distribution(features, observations), self._value(value_features)

    def act(
        self,
        observations: Nested,
        generator: torch.Generator | None = None,
        deterministic: bool = False,
        memory: Nested | None = None,
    ) -> PolicyOutput:
        """Choose an action for every row; see `Policy.act`. What is for the critic only may be missing.

        Args:
            observations: `[B, *shape]`.
            generator: Draws the actions.
            deterministic: Take the mode of the action distribution.
            memory: Of a policy that has one: `initial_memory` where an episode begins, then that of the last output.

        Raises:
            ValueError: A policy with memory was not given one.
        """
        features, value_features, after = self._acting_features(self.prepare_observations(observations), memory)
        distribution = self._distribution(features, observations)
        action = distribution.mode() if deterministic else distribution.sample(generator)
        output = PolicyOutput(action, environment_action=distribution.to_space(action), memory=after)
        if value_features is not None:
            output.log_prob, output.value = distribution.log_prob(action), self._value(value_features)
        return output

    def log_prob(self, observations: Nested, actions: Nested) -> Tensor:
        """Return log-probabilities of actions; see `Policy.log_prob`. With memory `act` and `forward` give them."""
        if self.memory is not None:
            raise ValueError(
                "log_prob is for policies without memory: act and forward give log-probabilities of others"
            )
        return self._distribution(self._actor_features(observations), observations).log_prob(actions)

    def value(self, observations: Nested, memory: Nested | None = None) -> Tensor:
        """Return value estimates; see `Policy.value`. With memory of observations `[B, *shape]`, one step from there.

        Raises:
            ValueError: A policy with memory was not given one.
        """
        return self._value(self._value_features(observations, memory))

    def saturation(self, actions: Nested) -> Tensor | None:
        """Return the share of components of `actions` that are clipped to the bounds; None where none may be."""
        head: Any = self.action_head
        counts = head.saturation(actions) if hasattr(head, "saturation") else None
        return None if counts is None else counts[0] / max(counts[1], 1)

    def _distribution(self, features: Tensor, observations: Nested) -> Distribution:
        if self._mask_path is None:
            return self.action_head(features)  # type: ignore[no-any-return]
        return self.action_head(features, part_at(observations, self._mask_path))  # type: ignore[no-any-return]

    @property
    def value_heads(self) -> list[HeadLinear]:
        """Every head that predicts returns."""
        return [self.value_head]

    def _value(self, features: Tensor) -> Tensor:
        return self._from_head(self.value_head, features)

    def _from_head(self, head: nn.Module, features: Tensor) -> Tensor:
        """Return what a value head predicts, in units of return."""
        values: Tensor = head(features).squeeze(-1)
        return values if self.value_normalizer is None else self.value_normalizer.denormalize(values)


def check_modes_agree(policy: nn.Module) -> None:
    """Raise if a policy acts otherwise than it learns: rollouts would not be those of the policy that is updated.

    Raises:
        ConfigurationError: It has a layer of dropout or batch normalisation; names it.
    """
    for name, module in policy.named_modules():
        differs = isinstance(module, _BatchNorm | nn.RReLU) or (isinstance(module, _DropoutNd) and module.p > 0)
        expected = "no dropout or batch normalisation, which act otherwise than they learn; LayerNorm does not"
        check(not differs, f"policy: {name}", module, expected)


def copy_to_cpu(policy: nn.Module) -> nn.Module:
    """Return a copy of a policy whose parameters and buffers are on the CPU; the policy stays where it is."""
    tensors = [*policy.parameters(), *policy.buffers()]
    # Taken for copies that were made already.
    copies: dict[int, Any] = {id(x): x.detach().to("cpu", copy=True) for x in tensors}
    copies |= {id(x): nn.Parameter(copies[id(x)]) for x in policy.parameters()}
    return copy.deepcopy(policy, copies)

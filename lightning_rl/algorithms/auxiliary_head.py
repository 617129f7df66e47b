"""An actor-critic whose policy network also predicts values, to be shaped by them in a phase of its own."""

from __future__ import annotations

from typing import Any, Literal, get_args

from gymnasium import spaces
from torch import Tensor

from lightning_rl.nested import Nested
from lightning_rl.policies.actor_critic import ActorCritic
from lightning_rl.policies.distributions import Distribution
from lightning_rl.policies.networks.layers import HeadLinear
from lightning_rl.rollouts.sequences import Sequences
from lightning_rl.validation import check, is_one_of

Architecture = Literal["dual", "shared", "detached"]


class AuxiliaryActorCritic(ActorCritic):
    """An actor-critic with an auxiliary value head on the features of the policy (Cobbe et al. 2021, section 2).

    Args:
        observation_space: Of one environment.
        action_space: Of one environment.
        architecture: `dual`: value and policy have networks of their own. `shared`: one encoder, which both shape.
            `detached`: one encoder, which the value is read from but does not shape.
        **options: Those of `ActorCritic`, but `shared_encoder`.
    """

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        *,
        architecture: Architecture = "dual",
        **options: Any,  # noqa: ANN401 - those of the base class
    ) -> None:
        super().__init__(observation_space, action_space, shared_encoder=architecture != "dual", **options)
        self.detached = architecture == "detached"
        features = self.actor_encoder.out_features if self.memory is None else self.memory.hidden_size
        self.auxiliary_head = HeadLinear(int(features), 1, gain=1.0)  # type: ignore[arg-type]
        expected = "not separate, since the value is read from what the policy remembers (architecture: detached)"
        check(not (self.detached and self.critic_core is not None), "memory", options.get("memory"), expected)

    def forward_auxiliary(
        self, observations: Nested, sequences: Sequences | None = None
    ) -> tuple[Distribution, Tensor, Tensor]:
        """Return the action distribution, the auxiliary value and the true value; see `forward`."""
        features, value_features = self._features(observations, sequences)
        auxiliary_value = self._from_head(self.auxiliary_head, features)
        return self._distribution(features, observations), auxiliary_value, self._value(value_features)

    @property
    def value_heads(self) -> list[HeadLinear]:
        """Every head that predicts returns."""
        return [self.value_head, self.auxiliary_head]

    def _value(self, features: Tensor) -> Tensor:
        return super()._value(features.detach() if self.detached else features)


def check_architecture(architecture: str, shared_encoder: bool | None, critic_only: object) -> None:
    """Raise unless an architecture exists, and is the only option that says who shares what.

    Raises:
        ConfigurationError: It does not, or another option contradicts it.
    """
    choices = get_args(Architecture)
    check(is_one_of(architecture, choices), "architecture", architecture, f"one of {', '.join(choices)}")
    check(shared_encoder is None, "shared_encoder", shared_encoder, "None: architecture says who shares the encoder")
    apart = architecture == "dual" or not critic_only
    check(apart, "architecture", architecture, "dual, since critic_only gives the critic more to see")

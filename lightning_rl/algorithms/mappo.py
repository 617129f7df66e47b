"""PPO for several agents with a centralized critic (Yu et al. 2022)."""

from __future__ import annotations

from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor, nn

from lightning_rl.algorithms.ppo import PPO
from lightning_rl.nested import Nested, without
from lightning_rl.policies.actor_critic import ActorCritic
from lightning_rl.policies.config import PolicyConfig, PolicyOptions
from lightning_rl.policies.networks import make_encoder
from lightning_rl.spaces import SpaceOrDict
from lightning_rl.training.config import NormalizationConfig, NormalizationOptions
from lightning_rl.training.schedules import Scheduled
from lightning_rl.validation import check, check_bool

_OF_ENCODERS = ("network", "hidden_sizes", "activation", "discrete_encoding")


class EncoderPerAgent(nn.Module):
    """Encoders with separate parameters for each agent, which the part `agent` of observations selects.

    The features of a row are those of its agent's encoder and a constant, at the place of this agent, and zeros
    elsewhere. So the weights of a linear layer after the encoder are separate too.

    Args:
        space: Observations of a row, with the part `agent`.
        **options: Arguments of `make_encoder`.
    """

    def __init__(self, space: spaces.Dict, **options: Any) -> None:  # noqa: ANN401
        super().__init__()
        self.num_agents = int(space["agent"].n)  # type: ignore[attr-defined]
        own = without(space, ["agent"])
        self.encoders = nn.ModuleList(make_encoder(own, **options) for _ in range(self.num_agents))
        self.out_features = self.num_agents * (int(self.encoders[0].out_features) + 1)  # type: ignore[arg-type]

    def forward(self, observations: Nested) -> Tensor:
        own = without(observations, ["agent"])
        features = torch.stack([encoder(own) for encoder in self.encoders], -2)
        is_agent = nn.functional.one_hot(observations["agent"].long(), self.num_agents).to(features.dtype).unsqueeze(-1)
        return torch.cat([features * is_agent, is_agent], -1).flatten(-2)


class MAPPO(PPO):
    """PPO for several agents with a centralized critic (Yu et al. 2022).

    The environments are `ParallelEnvVector`, with one row per agent and a `state`. Each agent acts on its own
    observation; only the critic sees the state. Steps after an agent has left do not count.

    Args:
        share_policy: All agents share actor and critic, which get the index of the agent. False: each agent has its own
            networks, and `policy.memory` must be None.
        num_epochs: Passes over each rollout.
        num_minibatches: Minibatches of each pass; the paper recommends one.
        entropy_coef: Weight of the entropy bonus. May be a schedule.
        policy: Networks and action distributions; `policy.critic_only` hides the state from the actor.
        normalization: Running normalization; by default of values by PopArt.
        **kwargs: Options of `PPO`.
    """

    def __init__(
        self,
        observation_space: SpaceOrDict,
        action_space: SpaceOrDict,
        *,
        share_policy: bool = True,
        num_epochs: int = 10,
        num_minibatches: int | None = 1,
        entropy_coef: Scheduled = 0.01,
        policy: PolicyOptions = PolicyConfig(critic_only=("state",)),
        normalization: NormalizationOptions = NormalizationConfig(values="popart"),
        **kwargs: Any,  # noqa: ANN401 - options of the base class
    ) -> None:
        super().__init__(
            observation_space,
            action_space,
            num_epochs=num_epochs,
            num_minibatches=num_minibatches,
            entropy_coef=entropy_coef,
            policy=policy,
            normalization=normalization,
            **kwargs,
        )

    def make_policy(self) -> ActorCritic:
        space, options = self.observation_space, self.policy_options()
        known = space.spaces if isinstance(space, spaces.Dict) else {}
        expected = "a Dict with agent and state, as with data.env.kwargs.state=joint"
        check({"agent", "state"} <= known.keys(), "observation_space", space, expected)
        if not check_bool("share_policy", self.options["share_policy"]):
            check(options["memory"] is None, "memory", options["memory"], "None with share_policy=False")
            arguments = {name: options.pop(name) for name in _OF_ENCODERS}
            options["network"] = {"class_path": f"{__name__}.EncoderPerAgent", "init_args": arguments}
        return ActorCritic(space, self.action_space, **options)

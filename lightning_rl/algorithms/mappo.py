"""PPO for several agents with a centralized critic (Yu et al. 2022)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor, nn

from lightning_rl.algorithms.ppo import PPO
from lightning_rl.masks import find_masks, num_choices
from lightning_rl.nested import Nested, map_stacked, part_at, without
from lightning_rl.options import OrDict
from lightning_rl.policies.actor_critic import ActorCritic, PolicyConfig
from lightning_rl.policies.distributions import Distribution, make_action_head
from lightning_rl.policies.networks.make import Network, make_encoder
from lightning_rl.policies.networks.mlp import HeadLinear
from lightning_rl.spaces import SpaceOrDict
from lightning_rl.training.config import ClippingConfig, NormalizationConfig, OptimizerConfig
from lightning_rl.training.schedules import Scheduled
from lightning_rl.validation import PositiveInt, check, check_bool

_ENCODER_OPTIONS = ("network", "hidden_sizes", "activation", "discrete_encoding")


class EncoderPerAgent(nn.Module):
    """One encoder per agent, selected by the part `agent` of an observation.

    In the features `[N, agents * (f + 1)]`, the block of the agent holds its `f` features and a 1, and all other blocks
    are zero. A linear layer after the encoder therefore has separate weights for each agent.

    Args:
        space: Observations with the part `agent`, also in stacked frames.
        whole: Observations of the critic, which may have more leaves; their images are not normalized.
        network: As in `make_encoder`, for the leaves of `whole`.
        **options: Further arguments of `make_encoder`.
    """

    def __init__(self, space: spaces.Dict, whole: spaces.Dict, network: Network, **options: Any) -> None:
        super().__init__()
        self.num_agents = num_choices(space["agent"])[-1]
        self._is_stacked = isinstance(space["agent"], spaces.MultiDiscrete)
        own = without(space, ["agent"])
        options["whole"] = without(whole, ["agent"])
        self.encoders = nn.ModuleList(make_encoder(own, network, **options) for _ in range(self.num_agents))
        self.width = int(self.encoders[0].out_features)  # type: ignore[arg-type]
        self.out_features = self.num_agents * (self.width + 1)

    def forward(self, observations: Nested) -> Tensor:
        own = without(observations, ["agent"])
        features = torch.stack([encoder(own) for encoder in self.encoders], -2)
        agents = observations["agent"][..., -1] if self._is_stacked else observations["agent"]
        is_agent = nn.functional.one_hot(agents.long(), self.num_agents).to(features.dtype).unsqueeze(-1)
        return torch.cat([features * is_agent, is_agent], -1).flatten(-2)


class HeadPerAgent(nn.Module):
    """One action head per agent, for the features of `EncoderPerAgent`."""

    def __init__(self, heads: Sequence[nn.Module]) -> None:
        super().__init__()
        self.heads = nn.ModuleList(heads)

    def forward(self, features: Tensor, *mask: Tensor) -> Distribution:
        by_agent = features.unflatten(-1, (len(self.heads), -1))  # type: ignore[no-untyped-call]
        is_agent = by_agent[..., -1] > 0
        found = [head(by_agent[..., i, :-1], *mask) for i, head in enumerate(self.heads)]

        def select(parts: list[Tensor]) -> Tensor:
            selected = parts[0]
            for i, part in enumerate(parts):
                mine = is_agent[..., i]
                selected = torch.where(mine.reshape(*mine.shape, *(1,) * (part.dim() - mine.dim())), part, selected)
            return selected

        return found[0].with_parameters(map_stacked(select, [x.parameters() for x in found]))  # type: ignore[no-any-return]

    def clipped(self, actions: Nested, *mask: Tensor) -> Tensor | None:
        head: Any = self.heads[0]
        return head.clipped(actions, *mask) if hasattr(head, "clipped") else None


class SeparateActorCritics(ActorCritic):
    """One actor-critic per agent; the agents share only the statistics of normalization."""

    def __init__(self, space: spaces.Dict, action_space: spaces.Space[Any], **options: Any) -> None:
        check(options["memory"] is None, "policy.memory", options["memory"], "None with share_policy=False")
        arguments = {name: options.pop(name) for name in _ENCODER_OPTIONS}
        mask_path = find_masks(space)
        arguments["whole"] = space if mask_path is None else without(space, [mask_path])
        network: Any = {"class_path": f"{__name__}.EncoderPerAgent", "init_args": arguments}
        super().__init__(space, action_space, network=network, **options)
        encoder: Any = self.actor_encoder
        head_options = (options["initial_log_std"], options["action_distribution"])
        mask_space = None if mask_path is None else part_at(space, mask_path)
        heads = [make_action_head(action_space, encoder.width, *head_options, mask_space) for _ in encoder.encoders]
        self.action_head = HeadPerAgent(heads)
        self.value_head.bias.requires_grad_(False)  # shared by all agents; the 1 in the features takes its place
        with torch.no_grad():
            for weights in self.value_head.weight.view(encoder.num_agents, -1):  # initialized as the head of one agent
                weights.copy_(torch.cat([HeadLinear(len(weights) - 1, 1, gain=1.0).weight[0], weights.new_zeros(1)]))


class MAPPO(PPO):
    """PPO for several agents with a centralized critic (Yu et al. 2022).

    The environments are copies of a PettingZoo parallel environment with a `state`, with one row for each agent. An
    agent acts on its own observation; only the critic sees the state. Steps after an agent has left are not used.

    Args:
        share_policy: One actor and one critic for all agents, with the index of the agent as input. False: separate
            networks for each agent, without memory.
        num_epochs: Passes over each rollout.
        num_minibatches: Minibatches of each pass; the paper recommends one.
        entropy_coef: Weight of the entropy bonus. May be a schedule.
        policy: Networks and action distributions; `policy.critic_only` hides the state from the actor.
        optimizer: Optimizer and gradient clipping.
        normalization: Running normalization; of values by default.
        clipping: Further limits of the change of policy and values; by default, a Huber loss of values.
        **kwargs: Options of `PPO`.
    """

    def __init__(
        self,
        observation_space: SpaceOrDict,
        action_space: SpaceOrDict,
        *,
        share_policy: bool = True,
        num_epochs: PositiveInt = 10,
        num_minibatches: PositiveInt | None = 1,
        entropy_coef: Scheduled = 0.01,
        policy: OrDict[PolicyConfig] = PolicyConfig(activation="relu", critic_only=("state",)),
        optimizer: OrDict[OptimizerConfig] = OptimizerConfig(max_grad_norm=10.0),
        normalization: OrDict[NormalizationConfig] = NormalizationConfig(values="popart"),
        clipping: OrDict[ClippingConfig] = ClippingConfig(value_huber_delta=10.0),
        **kwargs: Any,  # options of the base class
    ) -> None:
        super().__init__(
            observation_space,
            action_space,
            num_epochs=num_epochs,
            num_minibatches=num_minibatches,
            entropy_coef=entropy_coef,
            policy=policy,
            optimizer=optimizer,
            normalization=normalization,
            clipping=clipping,
            **kwargs,
        )

    def make_policy(self) -> ActorCritic:
        space: Any = self.observation_space
        is_known = isinstance(space, spaces.Dict) and {"agent", "state"} <= set(space)
        check(is_known, "observation_space", space, "a Dict with agent and state, as from data.env.kwargs.state=joint")
        shares, hidden = check_bool("share_policy", self.options["share_policy"]), self.options["policy.critic_only"]
        expected = "['state']: the actor must not get the state" + ("" if shares else ", and needs the part agent")
        check("state" in (hidden or ()) and (shares or "agent" not in hidden), "policy.critic_only", hidden, expected)
        return (ActorCritic if shares else SeparateActorCritics)(space, self.action_space, **self.policy_options())

"""Random network distillation beside PPO (Burda et al. 2019)."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from operator import itemgetter
from typing import Annotated, Any, ClassVar

import torch
from gymnasium import spaces
from torch import Tensor, nn

from lightning_rl import functional as rl
from lightning_rl.algorithms.ppo import PPO
from lightning_rl.nested import Nested, map_leaves, replace_leaves, space_leaves, without
from lightning_rl.policies.actor_critic import ActorCritic
from lightning_rl.policies.distributions import Distribution
from lightning_rl.policies.networks.make import make_encoder, name_image_networks
from lightning_rl.policies.networks.mlp import HeadLinear, orthogonal
from lightning_rl.policies.normalization import NestedNormalizer
from lightning_rl.policies.values import in_chunks, with_recomputed_values
from lightning_rl.rollouts.batch import Batch
from lightning_rl.rollouts.rollout import Rollout
from lightning_rl.rollouts.sequences import Sequences
from lightning_rl.spaces import SpaceOrDict
from lightning_rl.training.loss import Loss
from lightning_rl.training.normalizers import RewardNormalizer
from lightning_rl.training.schedules import Scheduled
from lightning_rl.validation import Range, UnitFloat

_WIDTH = 256  # of the features that the predictor predicts


class CuriousActorCritic(ActorCritic):
    """An actor-critic with a head for intrinsic values, a fixed random target network and its predictor."""

    values_are_intrinsic = False

    def __init__(self, space: spaces.Space[Any], action_space: spaces.Space[Any], **options: Any) -> None:
        super().__init__(space, action_space, **options)
        self.value_intrinsic_head = HeadLinear(self.value_head.in_features, 1, gain=1.0)
        leaves = space_leaves(without(space, self._masks))
        whitened = {path: spaces.Box(-5, 5, x.shape) for path, x in leaves.items() if isinstance(x, spaces.Box)}
        self.novelty_normalizer = NestedNormalizer({path: x.shape for path, x in whitened.items()}, clip=5.0)
        network = name_image_networks(without(space, self._masks))
        space = replace_leaves(lambda path, x: whitened.get(path, x), without(space, self._masks))
        encoders = [make_encoder(space, network, (_WIDTH,), "relu") for _ in range(2)]
        width = int(encoders[0].out_features)  # type: ignore[arg-type]
        # Names with `critic_`: target and predictor belong to the critic's half of the loss.
        self.critic_target = nn.Sequential(encoders[0], HeadLinear(width, _WIDTH, 1.0)).requires_grad_(False)
        hidden = (orthogonal(nn.Linear(width, _WIDTH)), nn.ReLU(), orthogonal(nn.Linear(_WIDTH, _WIDTH)), nn.ReLU())
        self.critic_predictor = nn.Sequential(encoders[1], *hidden, HeadLinear(_WIDTH, _WIDTH, 1.0))

    def forward_auxiliary(self, x: Nested, sequences: Sequences | None = None) -> tuple[Distribution, Tensor, Tensor]:
        """Return action distribution, intrinsic value and extrinsic value at observations `[N, *shape]`."""
        features, value_features = self._features(x, sequences)
        intrinsic_values = self._from_head(self.value_intrinsic_head, value_features)
        return self._distribution(features, x), intrinsic_values, self.value_of(value_features)

    def with_intrinsic_value(self) -> CuriousActorCritic:
        """Return a policy on the same parameters whose value is the intrinsic one."""
        view = copy.copy(self)
        view.values_are_intrinsic = True
        return view

    def value_of(self, features: Tensor) -> Tensor:
        """Return the extrinsic value, or the intrinsic one of `with_intrinsic_value`."""
        if self.values_are_intrinsic:
            return self._from_head(self.value_intrinsic_head, features)
        return super().value_of(features)

    def novelty(self, observations: Nested) -> Tensor:
        """Return the mean squared error of the predictor, `[N]`, for observations `[N, *shape]`."""
        whitened = self.novelty_normalizer(observations)
        x = map_leaves(lambda x: x.to(self.dtype) if x.is_floating_point() else x, whitened)
        error: Tensor = self.critic_predictor(x) - self.critic_target(x).detach()  # fixed, even after `unfreeze`
        return error.square().mean(dim=-1)


class RND(PPO):
    """PPO with an intrinsic reward for new observations: random network distillation (Burda et al. 2019).

    A predictor learns the output of a fixed random network. Its error at the observation that a step leads to is the
    intrinsic reward, divided by the running standard deviation of its discounted return. Intrinsic returns continue
    over the ends of episodes, and have their own value head. The policy loss has the advantages

        extrinsic_coef · extrinsic advantage + intrinsic_coef · intrinsic advantage

    Args:
        intrinsic_coef: Weight of the intrinsic advantages. May be a schedule.
        extrinsic_coef: Weight of the advantages of the environment's rewards. May be a schedule.
        intrinsic_gamma: Discount factor of the intrinsic rewards.
        predictor_fraction: Share of minibatches that trains the predictor. With less, observations stay new for longer.
        gamma: Discount factor of the environment's rewards.
        **kwargs: Options of `PPO`.
    """

    without_effect: ClassVar[Mapping[str, str]] = dict.fromkeys(
        (f"advantages.{x}" for x in ("estimator", "value_target", "recompute_values", "recompute_advantages")),
        "intrinsic advantages are GAE with the values of the policy that acted",
    ) | {"normalization.values": "it would scale extrinsic and intrinsic values by the same number"}
    policy: CuriousActorCritic

    def __init__(
        self,
        observation_space: SpaceOrDict,
        action_space: SpaceOrDict,
        *,
        intrinsic_coef: Scheduled = 1.0,
        extrinsic_coef: Scheduled = 2.0,
        intrinsic_gamma: UnitFloat = 0.99,
        predictor_fraction: Annotated[float, Range(above=0, at_most=1)] = 0.25,
        gamma: float = 0.999,
        **kwargs: Any,  # options of the base class
    ) -> None:
        super().__init__(observation_space, action_space, gamma=gamma, **kwargs)
        self.intrinsic_coef = self.scheduled("intrinsic_coef", intrinsic_coef, at_least=0)
        self.extrinsic_coef = self.scheduled("extrinsic_coef", extrinsic_coef, at_least=0)
        self.intrinsic_gamma = intrinsic_gamma
        self.predictor_fraction = predictor_fraction
        self.intrinsic_normalizer = RewardNormalizer(self.intrinsic_gamma, clip=None)
        self.stream: Any = None

    def make_policy(self) -> CuriousActorCritic:
        return CuriousActorCritic(self.observation_space, self.action_space, **self.policy_options())

    def update(self, rollout: Rollout) -> None:
        """Learn from a rollout as PPO does; the first rollout also gives the first statistics of observations."""
        for policy in (self.policy, *self.acting_copies) if self.policy_version == 0 else ():
            policy.novelty_normalizer.update(rollout.flatten().observations)  # type: ignore[union-attr, operator]
        super().update(rollout)

    def record_loss(self, rollout: Rollout | Batch) -> None:
        learned = self.stream  # of a rollout that is being learned from
        super().record_loss(rollout)
        self.stream = learned

    def batch(self, rollout: Rollout, **per_step: Nested) -> Batch:
        stream = self.intrinsic_stream(rollout)
        valid = torch.ones_like(rollout.dones) if rollout.valid is None else rollout.valid
        # Rows that are not valid pass the return of the next row on unchanged.
        rewards = self.intrinsic_normalizer(stream.rewards).where(valid, 0)
        next_values = stream.next_values.where(valid, stream.values)
        discounts = stream.discounts(self.intrinsic_gamma).where(valid, 1)
        traces = torch.full_like(rewards, self.estimator.gae_lambda).where(valid, 1)
        advantages = rl.gae(rewards, stream.values, next_values, discounts, traces)
        per_step |= {"intrinsic_rewards": stream.rewards, "intrinsic_values": stream.values}
        per_step |= {"intrinsic_advantages": advantages, "intrinsic_returns": advantages + stream.values}
        batch, self.stream = super().batch(rollout, **per_step), stream
        advantages = self.extrinsic_coef * batch.advantages + self.intrinsic_coef * batch.intrinsic_advantages
        return batch.replace(advantages=advantages)  # type: ignore[no-any-return]

    @torch.no_grad()
    def intrinsic_stream(self, rollout: Rollout) -> Rollout:
        """Return a copy of a rollout with intrinsic rewards and values, `[T, B]`, without terminal states."""
        stream = copy.copy(rollout)
        stream.terminated, stream.truncated = torch.zeros_like(rollout.dones), rollout.dones
        stream.final_indices = rollout.final_indices[:0]  # the observation after an episode is the next one's first
        policy: Any = self.acting_copies[0] if self.acting_copies else self.policy  # with whole parameters
        stream = with_recomputed_values(policy.with_intrinsic_value(), stream)
        reached = map_leaves(itemgetter(slice(1, None)), rollout.observations)
        novelty = in_chunks(lambda x: policy.novelty(map_leaves(lambda y: y.flatten(0, 1), x)), reached, lead=2)
        stream.rewards = novelty.view(rollout.shape).to(rollout.rewards.dtype)
        if rollout.valid is not None:  # a step before a reset reaches the observation after the reset
            for t in reversed(range(len(rollout.valid) - 1)):
                for x in (stream.rewards, stream.next_values):
                    x[t] = x[t].where(rollout.valid[t + 1], x[t + 1])
        return stream

    def loss(self, batch: Batch) -> Loss:
        """Return the loss of PPO, with a value loss of the intrinsic values and the loss of the predictor."""
        distribution, intrinsic_values, values = self.policy.forward_auxiliary(batch.observations, batch.sequences)
        loss = self.new_loss(batch)
        self.add_policy_terms(loss, distribution)
        intrinsic = batch.replace(values=batch.intrinsic_values, returns=batch.intrinsic_returns)
        both = (("value_loss", values, batch), ("intrinsic_value_loss", intrinsic_values, intrinsic))
        for name, x, rows in both:
            clip_range, delta = self.clip_range_value, self.value_huber_delta
            loss.add_value(x, self.value_coef, name=name, clip_range=clip_range, huber_delta=delta, batch=rows)
        loss.observe(intrinsic_reward=batch.intrinsic_rewards)
        if loss.part != "actor":
            # Minibatches are in random order, so the first rows are a random part.
            size, count = len(batch), math.ceil(self.predictor_fraction * len(batch))
            errors = self.policy.novelty(map_leaves(lambda x: x[:count], batch.observations))
            padded = nn.functional.pad(errors * (size / max(count, 1)), (0, size - count))
            loss.add_penalty("predictor_loss", batch.mean(padded))
        return loss

    def after_update(self, means: dict[str, float]) -> None:
        super().after_update(means)
        stream, starts = self.stream, None if self.stream.starts is None else self.stream.starts[0]
        self.policy.novelty_normalizer.update(stream.flatten().observations)
        self.intrinsic_normalizer.update(
            stream.rewards, stream.dones, stream.valid, starts=starts, repeats=stream.repeats
        )

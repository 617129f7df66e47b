"""Train the critic of a policy that does not change, before reinforcement learning starts."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn

from lightning_rl import functional as rl
from lightning_rl.algorithms.base import OnPolicyAlgorithm
from lightning_rl.environments.wrappers.transforms import RewardClip
from lightning_rl.policies.values import on_rows, with_recomputed_values
from lightning_rl.rollouts.batch import Batch
from lightning_rl.rollouts.replay import UnrollMemory, layout_of_unrolls
from lightning_rl.rollouts.rollout import Rollout
from lightning_rl.spaces import SpaceOrDict
from lightning_rl.training.advantages import AdvantageEstimator
from lightning_rl.training.checks import check_memory
from lightning_rl.training.config import OPTIONS_OF_PASSES
from lightning_rl.training.loss import Loss
from lightning_rl.training.minibatches import Reduction, reduction_scale, unroll
from lightning_rl.training.parameter_groups import (
    ActorOrCritic,
    check_critic,
    parameters_of_other_half,
    parameters_of_policy,
)
from lightning_rl.training.schedules import Scheduled
from lightning_rl.validation import NonNegativeFloat, PositiveFloat, PositiveInt, check


class ReturnEstimator(AdvantageEstimator):
    """Computes value targets by `target` and `vtrace_lambda` of `CriticPretraining`."""

    target = "discounted_return"
    vtrace_lambda = 1.0

    @torch.no_grad()
    def advantages_and_returns(self, rollout: Rollout) -> tuple[Tensor, Tensor]:
        """Return target minus value, and the value targets, `[T, B]`."""
        if self.target == "discounted_return":
            rewards, discounts = self.normalizers.rewards(rollout), rollout.discounts(self.gamma, self.on_truncation)
            returns = rl.td_lambda_returns(rewards, rollout.next_values, discounts, rollout.traces(1.0))
        else:
            steps = unroll(rollout)
            log_probs = on_rows(self.policy, steps.batch)[0].log_prob(steps.batch.actions)
            log_rhos = steps.grid(log_probs - steps.batch.log_probs, torch.zeros_like(rollout.values))
            returns, _ = self.vtrace(rollout, log_rhos, self.vtrace_lambda)
        return returns - rollout.values, returns


class CriticPretraining(OnPolicyAlgorithm):
    """Learn the value of a policy that does not change, usually one loaded by `init_from`.

    Any algorithm can start from the resulting checkpoint by `init_from`.

    Args:
        target: `discounted_return`: discounted rewards to the end of the episode or rollout plus the value of the last
            observation, without off-policy correction. `vtrace`: V-trace targets, corrected for the acting policy.
        vtrace_lambda: λ of V-trace, 0 to 1. May be a schedule.
        trains: `critic` trains parameters of the critic alone, at least one; the policy changes only by the statistics
            of `normalization.observations`. `network` also trains an encoder that actor and critic share.
        replay_ratio: Number of replayed unrolls per new unroll, as in `CLEAR`. Only `vtrace` corrects for the policies
            that collected these unrolls. 0 disables replay.
        replay_memory_gib: Maximum memory of stored unrolls, in GiB on each rank; a full memory drops random unrolls.
        num_epochs: Passes over each rollout.
        num_minibatches: Minibatches of each pass.
        reduction: Take the `mean` of losses over steps, or their `sum`.
        reward_scale: Multiplier of the rewards.
        reward_clip: Clipping of the scaled rewards: `abs_one`, `soft_asymmetric` or a number, see `EnvConfig`.
        **kwargs: Options of `OnPolicyAlgorithm`.
    """

    without_effect: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            (*OPTIONS_OF_PASSES, "optimizer.l2.policy", "optimizer.l2.shared"), "only the value is learned"
        ),
        **dict.fromkeys(("advantages.estimator", "advantages.value_target"), "target decides what is learned"),
        "advantages.normalize": "advantages are not used",
    }
    estimator: ReturnEstimator

    def __init__(
        self,
        observation_space: SpaceOrDict,
        action_space: SpaceOrDict,
        *,
        target: Literal["discounted_return", "vtrace"] = "discounted_return",
        vtrace_lambda: Scheduled = 1.0,
        trains: Literal["critic", "network"] = "critic",
        replay_ratio: NonNegativeFloat = 0.0,
        replay_memory_gib: PositiveFloat = 1.0,
        num_epochs: PositiveInt = 4,
        num_minibatches: PositiveInt = 4,
        learning_rate: Scheduled = 1e-3,
        reduction: Reduction = "mean",
        reward_scale: float = 1.0,
        reward_clip: RewardClip | None = None,
        **kwargs: Any,  # options of the base class
    ) -> None:
        super().__init__(observation_space, action_space, learning_rate=learning_rate, **kwargs)
        self.normalizers.transform_rewards(reward_scale, reward_clip, self.options["normalization.rewards"])
        if target != "vtrace":
            check(vtrace_lambda == 1, "vtrace_lambda", vtrace_lambda, "1 unless target is vtrace")
        self.trains = trains
        if trains == "critic":
            check_critic(self.policy, "model", type(self).__name__)
        self.replay_ratio = replay_ratio
        self.kept = UnrollMemory(int(replay_memory_gib * 2**30))
        if replay_ratio:
            self.replays["unrolls"] = self.kept
        else:
            check(replay_memory_gib == 1, "replay_memory_gib", replay_memory_gib, "1.0 unless replay_ratio is above 0")
        self.metrics.prefix = "critic_pretraining"
        self.reduction = reduction
        self.estimator.target = target
        self.estimator.vtrace_lambda = self.scheduled(
            "vtrace_lambda", vtrace_lambda, at_least=0, at_most=1, owner=self.estimator
        )
        self.num_epochs = num_epochs
        self.num_minibatches = num_minibatches

    def frozen_parameters(self, part: ActorOrCritic | None) -> list[nn.Parameter]:
        own = self.trains == "network"
        return parameters_of_other_half(self.policy, "critic") if own else parameters_of_policy(self.policy)

    def check_run(self, trainer: Trainer, rollout_shape: tuple[int, int] | None) -> None:
        super().check_run(trainer, rollout_shape)
        if self.replay_ratio and rollout_shape is not None:
            check_memory(self, "replay_memory_gib", rollout_shape[0])

    def make_estimator(self, **options: Any) -> ReturnEstimator:  # options of the estimator
        return ReturnEstimator(self.policy, self.normalizers, **options)

    def update(self, rollout: Rollout) -> None:
        batch = self.batch(rollout)
        if self.replay_ratio:
            rollout = copy.copy(rollout)
            rollout.weights = self.checked_weights(rollout)  # replayed steps keep these weights
            batch = self.with_replay(rollout, batch)
        for minibatch in self.minibatches(batch, self.num_epochs, self.num_minibatches):
            self.descend(self.loss, minibatch)
        if self.replay_ratio:
            self.kept.append(rollout, self.generator)

    def with_replay(self, rollout: Rollout, batch: Batch) -> Batch:
        """Return a batch of the steps of a rollout and of stored unrolls, or `batch` while none are stored."""
        self.kept.begin_layout(layout_of_unrolls(rollout))
        if not len(self.kept):
            return batch
        num_new = rollout.shape[1]
        both = self.kept.beside(rollout, self.kept.draw(self.replay_ratio * num_new, self.generator))
        both = with_recomputed_values(self.policy, both.to(self.device))
        is_new = (torch.arange(both.shape[1], device=self.device) < num_new).expand(both.shape)
        return self.estimator.batch(both, both.weights, is_new=is_new)

    def loss(self, batch: Batch) -> Loss:
        distribution, values = self.actor_critic(batch)
        loss = self.new_loss(batch)
        loss.scale = reduction_scale(self.reduction, batch)
        log_ratios = distribution.log_prob(batch.actions) - batch.log_probs
        loss.watch_ratios(log_ratios.where(batch.is_new, 0) if "is_new" in batch.fields else log_ratios)
        loss.add_value(values)
        return loss

"""Train the critic of a policy that does not change, before reinforcement learning starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from lightning_rl import functional as rl
from lightning_rl.algorithms.base import OnPolicyAlgorithm
from lightning_rl.environments.wrappers.rewards import RewardClip
from lightning_rl.policies.values import on_rows
from lightning_rl.rollouts.batch import Batch
from lightning_rl.rollouts.rollout import Rollout
from lightning_rl.spaces import SpaceOrDict
from lightning_rl.training.advantages import AdvantageEstimator
from lightning_rl.training.config import OPTIONS_OF_PASSES
from lightning_rl.training.loss import Loss
from lightning_rl.training.minibatches import Reduction, reduction_scale, unroll
from lightning_rl.training.parameter_groups import ActorOrCritic, check_critic, parameters_of_policy
from lightning_rl.training.schedules import Scheduled
from lightning_rl.validation import check, check_positive_int, is_one_of


class ReturnEstimator(AdvantageEstimator):
    """Computes value targets by `target` and `vtrace_lambda` of `CriticPretraining`."""

    target = "discounted_return"
    vtrace_lambda = 1.0

    def advantages_and_returns(self, rollout: Rollout) -> tuple[Tensor, Tensor]:
        """Return target minus value, and the value targets, `[T, B]`."""
        rewards, discounts = self.normalizers.rewards(rollout), rollout.discounts(self.gamma, self.on_truncation)
        if self.target == "discounted_return":
            returns = rl.td_lambda_returns(rewards, rollout.next_values, discounts, rollout.traces(1.0))
        else:
            traces = rollout.traces(self.vtrace_lambda)
            log_rhos = self._log_rhos(rollout)
            returns, _ = rl.vtrace(log_rhos, rewards, rollout.values, rollout.next_values, discounts, traces)
        return returns - rollout.values, returns

    @torch.no_grad()
    def _log_rhos(self, rollout: Rollout) -> Tensor:
        steps = unroll(rollout)
        batch = steps.batch
        log_rhos = on_rows(self.policy, batch)[0].log_prob(batch.actions) - batch.log_probs
        return steps.grid(log_rhos, torch.zeros_like(rollout.values))


class CriticPretraining(OnPolicyAlgorithm):
    """Learn the value of a policy that does not change, usually one loaded by `init_from`.

    Any algorithm can start from its checkpoint by `init_from`. The policy must have parameters of the critic alone.

    Args:
        target: `discounted_return`: discounted rewards to the end of the episode or rollout plus the value of the
            observation reached there, without off-policy correction. `vtrace`: V-trace targets, which correct for
            another acting policy.
        vtrace_lambda: λ of V-trace, 0 to 1. May be a schedule.
        num_epochs: Passes over each rollout.
        num_minibatches: Minibatches of each pass.
        reduction: Take the `mean` of losses over steps, or their `sum`.
        reward_scale: Multiplier of the rewards.
        reward_clip: Clipping of the scaled rewards: `abs_one`, `soft_asymmetric` or a number, see `EnvConfig`.
        **kwargs: Options of `OnPolicyAlgorithm`.
    """

    without_effect: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(OPTIONS_OF_PASSES, "only the value is learned"),
        **dict.fromkeys(("optimizer.l2.policy", "optimizer.l2.shared"), "only the critic's own parameters are learned"),
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
        num_epochs: int = 4,
        num_minibatches: int = 4,
        learning_rate: Scheduled = 1e-3,
        reduction: Reduction = "mean",
        reward_scale: float = 1.0,
        reward_clip: RewardClip | None = None,
        **kwargs: Any,  # noqa: ANN401 - options of the base class
    ) -> None:
        super().__init__(observation_space, action_space, learning_rate=learning_rate, **kwargs)
        check(is_one_of(reduction, ("mean", "sum")), "reduction", reduction, "mean or sum")
        self.normalizers.transform_rewards(reward_scale, reward_clip, self.options["normalization.rewards"])
        check(is_one_of(target, ("discounted_return", "vtrace")), "target", target, "discounted_return or vtrace")
        if target != "vtrace":
            check(vtrace_lambda == 1, "vtrace_lambda", vtrace_lambda, "1 unless target is vtrace")
        check_critic(self.policy, "model", type(self).__name__)
        self.metrics.prefix = "critic_pretraining"
        self.reduction = reduction
        self.estimator.target = target
        self.estimator.vtrace_lambda = self.scheduled(
            "vtrace_lambda", vtrace_lambda, at_least=0, at_most=1, owner=self.estimator
        )
        self.num_epochs = check_positive_int("num_epochs", num_epochs)
        self.num_minibatches = check_positive_int("num_minibatches", num_minibatches)

    def frozen_parameters(self, part: ActorOrCritic | None) -> list[nn.Parameter]:
        return parameters_of_policy(self.policy)

    def make_estimator(self, **options: Any) -> ReturnEstimator:  # noqa: ANN401 - options of the estimator
        return ReturnEstimator(self.policy, self.normalizers, **options)

    def update(self, rollout: Rollout) -> None:
        for minibatch in self.minibatches(self.batch(rollout), self.num_epochs, self.num_minibatches):
            self.descend(self.loss, minibatch)

    def loss(self, batch: Batch) -> Loss:
        distribution, values = self.actor_critic(batch)
        loss = self.new_loss(batch)
        loss.scale = reduction_scale(self.reduction, batch)
        loss.watch_ratios(distribution.log_prob(batch.actions) - batch.log_probs)
        loss.add_value(values)
        return loss

"""PPO on rollouts of earlier policies, such as the rollouts of asynchronous actors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_rl.algorithms.ppo import PPO
from lightning_rl.distributed import all_reduce
from lightning_rl.nested import Nested
from lightning_rl.policies.distributions import Distribution
from lightning_rl.policies.values import log_probs_of, with_recomputed_values
from lightning_rl.rollouts.batch import Batch
from lightning_rl.rollouts.rollout import Rollout
from lightning_rl.training.advantages import AdvantageEstimator
from lightning_rl.training.config import OPTIONS_OF_TARGETS
from lightning_rl.training.loss import Loss
from lightning_rl.training.minibatches import unroll


class VTraceEstimator(AdvantageEstimator):
    """Computes advantages and value targets by V-trace (Espeholt et al. 2018) with importance ratios clipped at 1."""

    def advantages_and_returns(self, rollout: Rollout) -> tuple[Tensor, Tensor]:
        assert rollout.log_rhos is not None
        targets, advantages = self.vtrace(rollout, rollout.log_rhos, self.gae_lambda)
        return advantages, targets


class OverlappedPPO(PPO):
    """PPO that also learns from rollouts of earlier policy versions, such as the rollouts of asynchronous actors.

    The clipped importance ratio and `target_kl` compare the current policy with the policy at the start of the updates,
    as in the decoupled objective of Hilton et al. 2021. V-trace (Espeholt et al. 2018) corrects for the difference
    between that policy and the one that acted, by ratios clipped at 1 in value targets, traces and advantages.

    Args:
        **kwargs: Options of `PPO`, without `advantages.estimator`, `advantages.value_target`,
            `advantages.recompute_values` and `normalization.update`.
    """

    learns_off_policy = True
    without_effect: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(OPTIONS_OF_TARGETS, "V-trace computes advantages and value targets from the current values"),
        "normalization.update": "V-trace needs the policy as it was",
    }

    def make_estimator(self, **options: Any) -> VTraceEstimator:  # options of the estimator
        return VTraceEstimator(self.policy, self.normalizers, **options)

    def batch(self, rollout: Rollout, **per_step: Nested) -> Batch:
        rollout = self.reevaluated(rollout)
        assert rollout.log_rhos is not None
        weights = rollout.log_rhos.exp() if rollout.valid is None else rollout.log_rhos.exp()[rollout.valid]
        count, total = all_reduce(torch.stack([weights.new_tensor(weights.numel()), weights.sum()]))
        self.steps.observe(importance_weight=total / count.clamp(min=1))
        return super().batch(rollout, **per_step)  # type: ignore[no-any-return]

    def add_policy_terms(self, loss: Loss, distribution: Distribution) -> None:
        """Add the terms of `PPO`, without `first_ratio_error`, which would be 0 for every rollout."""
        super().add_policy_terms(loss, distribution)
        loss.first_log_ratios = None

    @torch.no_grad()
    def reevaluated(self, rollout: Rollout) -> Rollout:
        """Return a copy with log-probabilities and values of the current policy, and its `log_rhos`, `[T, B]`."""
        if rollout.memory is None:
            now, values = log_probs_of(self.policy, rollout.observations, rollout.actions), None
        else:
            steps = unroll(rollout)
            distribution, rows = self.actor_critic(steps.batch)
            now = steps.grid(distribution.log_prob(steps.batch.actions), rollout.log_probs)
            values = steps.grid(rows, rollout.values)
        result = with_recomputed_values(self.policy, rollout, values)
        result.log_probs = now.to(rollout.log_probs.dtype)
        log_rhos = result.log_probs - rollout.log_probs
        result.log_rhos = log_rhos if rollout.valid is None else log_rhos.where(rollout.valid, 0)
        return result

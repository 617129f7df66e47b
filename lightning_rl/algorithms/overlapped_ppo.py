"""PPO from rollouts of earlier policies, as asynchronous actors collect them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from operator import itemgetter
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_rl import functional as rl
from lightning_rl.algorithms.ppo import PPO
from lightning_rl.distributed import all_reduce
from lightning_rl.nested import Nested, map_leaves
from lightning_rl.policies.distributions import Distribution
from lightning_rl.policies.values import in_chunks, values_reached, with_recomputed_values
from lightning_rl.rollouts.batch import Batch
from lightning_rl.rollouts.rollout import Rollout
from lightning_rl.training.advantages import AdvantageEstimator
from lightning_rl.training.config import OPTIONS_OF_TARGETS
from lightning_rl.training.loss import Loss
from lightning_rl.training.minibatches import unroll

# Bounds of the importance weights of temporal differences, traces and advantages.
_CLIP = 1.0


class VTraceEstimator(AdvantageEstimator):
    """Advantages and value targets by V-trace (Espeholt et al. 2018) of a rollout that `reevaluated` returned."""

    def advantages_and_returns(self, rollout: Rollout) -> tuple[Tensor, Tensor]:
        """Return them, `[T, B]`; with importance weights of 1 they are generalized advantage estimates."""
        assert rollout.log_rhos is not None
        targets, advantages = rl.vtrace(
            rollout.log_rhos,
            self.normalizers.rewards(rollout),
            rollout.values,
            rollout.next_values,
            rollout.discounts(self.gamma, self.on_truncation),
            rollout.traces(self.gae_lambda),
            *(_CLIP, _CLIP, _CLIP),
        )
        return advantages, targets


class OverlappedPPO(PPO):
    """PPO that learns from rollouts of earlier versions of the policy too, as those of asynchronous actors are.

    The clipped surrogate objective goes out from the policy at the beginning of the updates. Where another one has
    acted, that is made up for by importance weights between those two, which V-trace (Espeholt et al. 2018) bounds by
    1: in the targets of the values, along the trajectory, and as a factor of the advantages. The ratio that is clipped
    then still says how far the updates themselves have gone, as in the decoupled objective of Hilton et al. 2021.

    Args:
        observation_space: Of one environment: a Gymnasium space, or its description by `space_to_dict`.
        action_space: Of one environment, likewise.
        **kwargs: Options of `PPO`, without `advantages.estimator`, `advantages.value_target`,
            `advantages.recompute_values` and `normalization.update`.

    Raises:
        ConfigurationError: A value is out of range; names field, value and what was expected.
    """

    learns_off_policy = True
    without_effect: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(OPTIONS_OF_TARGETS, "V-trace computes advantages and value targets from the current values"),
        "normalization.update": "V-trace needs the policy as it was",
    }

    def make_estimator(self, **options: Any) -> VTraceEstimator:  # noqa: ANN401 - those of the estimator
        """Return what makes advantages and returns by V-trace."""
        return VTraceEstimator(self.policy, self.normalizers, **options)

    def batch(self, rollout: Rollout, **per_step: Nested) -> Batch:
        """Return a rollout's steps as the current policy sees them, with what to learn."""
        rollout = self.reevaluated(rollout)
        assert rollout.log_rhos is not None
        weights = rollout.log_rhos.exp() if rollout.valid is None else rollout.log_rhos.exp()[rollout.valid]
        count, total = all_reduce(torch.stack([weights.new_tensor(weights.numel()), weights.sum()]))
        self.steps.observe(importance_weight=total / count.clamp(min=1))
        batch: Batch = super().batch(rollout, **per_step)
        return batch

    def add_policy_terms(self, loss: Loss, distribution: Distribution) -> None:
        """Add those of `PPO`; importance ratios begin with 1 by themselves, which says nothing."""
        super().add_policy_terms(loss, distribution)
        loss.first_log_ratios = None

    @torch.no_grad()
    def reevaluated(self, rollout: Rollout) -> Rollout:
        """Return a rollout of the same steps with the log-probabilities and values of the current policy.

        Its `log_rhos` say how much likelier the actions are now than when they were taken.

        Args:
            rollout: Of this policy or an earlier one; stays as it is.
        """
        if rollout.memory is None:
            acted = map_leaves(itemgetter(slice(rollout.shape[0])), rollout.observations)
            now = in_chunks(lambda pair: self.policy.log_prob(*pair), (acted, rollout.actions), lead=2)
            result = with_recomputed_values(self.policy, rollout)
        else:
            steps = unroll(rollout)
            distribution, values = self.actor_critic(steps.batch)
            now = steps.grid(distribution.log_prob(steps.batch.actions), rollout.log_probs)
            result = copy.copy(rollout)
            result.values = steps.grid(values, rollout.values)
            result.next_values = values_reached(self.policy, rollout, result.values)
        result.log_probs = now.to(rollout.log_probs.dtype)
        log_rhos = result.log_probs - rollout.log_probs
        result.log_rhos = log_rhos if rollout.valid is None else log_rhos.where(rollout.valid, 0)
        return result

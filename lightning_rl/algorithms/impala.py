"""The learner of the importance-weighted actor-learner architecture, IMPALA (Espeholt et al. 2018)."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_rl import functional as rl
from lightning_rl.algorithms.base import OnPolicyAlgorithm
from lightning_rl.distributed import all_reduce
from lightning_rl.environments.wrappers.transforms import RewardClip
from lightning_rl.nested import Nested
from lightning_rl.policies.distributions import Distribution
from lightning_rl.policies.values import with_recomputed_values
from lightning_rl.rollouts.batch import Batch, set_common_weight
from lightning_rl.rollouts.rollout import Rollout
from lightning_rl.spaces import SpaceOrDict
from lightning_rl.training.advantages import explained_variance
from lightning_rl.training.config import OPTIONS_OF_PASSES, OPTIONS_OF_TARGETS
from lightning_rl.training.loss import Loss
from lightning_rl.training.minibatches import Reduction, Unroll, VTraceEstimates, reduction_scale, unroll
from lightning_rl.training.schedules import Scheduled
from lightning_rl.validation import ClassSpec, NonNegativeFloat, PositiveFloat, UnitFloat


class IMPALA(OnPolicyAlgorithm):
    """Actor-critic with V-trace targets, which correct for rollouts of earlier policies (Espeholt et al. 2018).

    One gradient step per rollout on

        policy-gradient loss + value_coef · value loss - entropy_coef · entropy      (section 4.2)

    Args:
        vtrace_lambda: λ of the trace coefficients, 0 to 1. May be a schedule.
        clip_rho: ρ̄, maximum importance ratio in temporal differences; determines the values learned. None: no limit.
        clip_c: c̄, maximum importance ratio in traces; affects only the speed of learning. None does not clip.
        clip_pg_rho: Maximum importance ratio in advantages. None does not clip.
        vtrace_leak: Weight of the unclipped ratio: 0 is V-trace, above 0 leaky V-trace (Zahavy et al. 2020).
        clip_advantage: Replace negative advantages by 0.
        value_coef: Weight of the value loss ½(V - V-trace target)².
        entropy_coef: Weight of the entropy bonus. May be a schedule.
        reduction: Take the `mean` of losses over steps, or their `sum`.
        reward_scale: Multiplier of the rewards.
        reward_clip: Clipping of the scaled rewards: `abs_one`, `soft_asymmetric` or a number, see `EnvConfig`.
        **kwargs: Options of `OnPolicyAlgorithm`. The default optimizer is RMSprop, as in the paper.
    """

    learns_off_policy = True
    without_effect: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(OPTIONS_OF_PASSES, "IMPALA makes one gradient step per rollout"),
        **dict.fromkeys(OPTIONS_OF_TARGETS, "V-trace computes advantages and value targets from the learner's values"),
        "advantages.normalize": "V-trace advantages are not normalized",
    }

    def __init__(
        self,
        observation_space: SpaceOrDict,
        action_space: SpaceOrDict,
        *,
        learning_rate: Scheduled = 6e-4,
        vtrace_lambda: Scheduled = 1.0,
        clip_rho: PositiveFloat | None = 1.0,
        clip_c: PositiveFloat | None = 1.0,
        clip_pg_rho: PositiveFloat | None = 1.0,
        vtrace_leak: UnitFloat = 0.0,
        clip_advantage: bool = False,
        value_coef: NonNegativeFloat = 0.5,
        entropy_coef: Scheduled = 0.01,
        reduction: Reduction = "mean",
        reward_scale: float = 1.0,
        reward_clip: RewardClip | None = None,
        **kwargs: Any,  # options of the base class
    ) -> None:
        super().__init__(observation_space, action_space, learning_rate=learning_rate, **kwargs)
        self.reduction = reduction
        self.normalizers.transform_rewards(reward_scale, reward_clip, self.options["normalization.rewards"])
        self.clip_rho, self.clip_c, self.clip_pg_rho = clip_rho, clip_c, clip_pg_rho
        self.vtrace_lambda = self.scheduled("vtrace_lambda", vtrace_lambda, at_least=0, at_most=1)
        self.vtrace_leak = vtrace_leak
        self.clip_advantage = clip_advantage
        self.value_coef = value_coef
        self.entropy_coef = self.scheduled("entropy_coef", entropy_coef, at_least=0)

    def default_optimizer(self) -> ClassSpec:
        return {"class_path": "torch.optim.RMSprop", "init_args": {"alpha": 0.99, "eps": 0.01}}

    def update(self, rollout: Rollout) -> None:
        self.learn(self.batch(rollout))

    def batch(self, rollout: Rollout, **per_step: Nested) -> Unroll:
        """Return a rollout in time order, with its real steps as rows of a batch."""
        self.normalizers.begin(rollout)
        steps = unroll(rollout, self.checked_weights(rollout), **per_step)
        # Not with asynchronous actors: some ranks may have an on-policy rollout while others have none.
        is_current = rollout.actor is None and rollout.policy_version == self.policy_version
        steps.is_on_policy = is_current and self.normalizers.when == "after"
        set_common_weight([steps.batch])
        return steps

    def learn(self, steps: Unroll) -> None:
        """Take one gradient step on an unroll, unless it has no row that counts."""
        if steps.batch.weight:
            self.descend(self.loss, steps)
            self.steps.record.end_minibatches()  # log what follows, even if 16-mixed skipped the step
            self.observe_targets(steps)
            assert steps.estimates is not None
            self.on_pass_end(steps.batch.replace(advantages=steps.estimates.advantages), "update")

    def loss(self, batch: Unroll) -> Loss:
        loss = self.new_loss(batch.batch)
        self.add_terms(loss, batch)
        return loss

    def add_terms(self, loss: Loss, steps: Unroll) -> tuple[Distribution, Tensor]:
        """Add the terms of section 4.2, and return action distributions and values of the rows."""
        batch = steps.batch
        distribution, values = self.actor_critic(batch)
        log_probs = distribution.log_prob(batch.actions)
        log_rhos = log_probs.detach() - batch.log_probs
        returns, advantages = map(steps.rows, self.vtrace(steps, log_rhos, values.detach()))
        if self.clip_advantage:
            advantages = advantages.clamp(min=0)
        loss.add("policy_loss", rl.policy_gradient_loss(log_probs, advantages), batch=batch)
        loss.add_value(values, self.value_coef, returns=returns, batch=batch)
        loss.add_entropy(distribution.entropies(), self.entropy_coef, batch=batch)
        if steps.is_on_policy:
            loss.watch_ratios(log_rhos)
        steps.estimates = VTraceEstimates(values.detach(), log_rhos, advantages, returns)
        return distribution, values

    def new_loss(self, batch: Batch) -> Loss:
        loss = super().new_loss(batch)
        loss.scale = reduction_scale(self.reduction, batch)
        return loss

    def vtrace(self, steps: Unroll, log_rhos: Tensor, values: Tensor) -> rl.VTraceReturns:
        """Return V-trace targets and advantages, `[T, B]`, from log ratios and the learner's values, `[N]`."""
        rollout = copy.copy(steps.rollout)
        rollout.values = steps.grid(values, rollout.values)
        if not steps.is_on_policy:
            rollout = with_recomputed_values(self.policy, rollout, rollout.values)
        log_rhos = steps.grid(log_rhos, torch.zeros_like(rollout.values))
        clips = self.clip_rho, self.clip_c, self.clip_pg_rho, self.vtrace_leak
        return self.estimator.vtrace(rollout, log_rhos, self.vtrace_lambda, *clips)

    def observe_targets(self, steps: Unroll) -> None:
        """Pass the value targets to the value normalizer, and log statistics of the new rollout; NaN without rows."""
        parts = [(part.batch, part.estimates) for part in steps.parts if part.estimates is not None]
        self.normalizers.value_targets = torch.cat([batch.counted(made.returns) for batch, made in parts])
        new, made = parts[0]
        returns, ratios = new.counted(made.returns), new.counted(made.log_rhos).exp()
        count, weights = all_reduce(torch.stack([ratios.new_tensor(len(ratios)), ratios.sum()]))
        self.steps.observe(
            explained_variance=explained_variance(new.counted(made.values).to(returns.dtype), returns),
            importance_weight=weights / count,
        )

    def record_loss(self, rollout: Rollout | Batch) -> None:
        """Record the terms for `compute_loss`, without replay; V-trace needs a `Rollout` in time order."""
        if not isinstance(rollout, Rollout):
            raise TypeError(f"compute_loss of {type(self).__name__} takes a Rollout, not a {type(rollout).__name__}")
        steps = self.batch(rollout)
        steps.is_on_policy &= not self.updating  # a step of the update may have changed the values
        self.steps.record_loss(self.loss(steps))
        self.observe_targets(steps)

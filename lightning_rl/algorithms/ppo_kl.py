"""Proximal policy optimization with KL penalties (Schulman et al. 2017, section 4)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_rl import functional as rl
from lightning_rl.algorithms.ppo import PPO
from lightning_rl.checkpointing.format import CHECKPOINT_KEY
from lightning_rl.distributed import mean_of_all_ranks
from lightning_rl.nested import Nested
from lightning_rl.policies.distributions import Distribution
from lightning_rl.policies.values import in_chunks
from lightning_rl.rollouts.batch import Batch, set_global_weights
from lightning_rl.rollouts.rollout import Rollout
from lightning_rl.spaces import SpaceOrDict
from lightning_rl.training.advantages import divergence, with_acting_distributions
from lightning_rl.training.loss import Loss
from lightning_rl.training.schedules import Scheduled
from lightning_rl.validation import NonNegativeFloat


class PPOKLPenalty(PPO):
    """Proximal policy optimization that penalizes the KL divergence instead of clipping the importance ratio.

    The loss of `PPO`, without clipping unless `clip_range` is given, plus

        β · KL + kl_cutoff_coef · max(KL - kl_cutoff_factor · adaptive_kl_target, 0)²

    with KL the mean exact divergence KL(old ‖ new) of the current policy from the one that acted. After the updates
    from a rollout, `lightning_rl.functional.adapted_kl_coef` adapts β, the buffer `kl_coef`.

    Args:
        initial_kl_coef: Initial β; 0 disables the adaptive penalty.
        adaptive_kl_target: Target of the KL divergence, in nats. May be a schedule.
        adaptive_kl_tolerance: Relative distance of KL from the target within which β does not change.
        kl_cutoff_factor: Multiple of the target above which the second penalty acts.
        kl_cutoff_coef: Coefficient of the second penalty; 0 disables it.
        clip_range: As in `PPO`.
        **kwargs: Options of `PPO`.
    """

    kl_coef: Tensor

    def __init__(
        self,
        observation_space: SpaceOrDict,
        action_space: SpaceOrDict,
        *,
        initial_kl_coef: NonNegativeFloat = 1.0,
        adaptive_kl_target: Scheduled = 0.01,
        adaptive_kl_tolerance: NonNegativeFloat = 0.3,
        kl_cutoff_factor: NonNegativeFloat = 2.0,
        kl_cutoff_coef: NonNegativeFloat = 0.0,
        clip_range: Scheduled | None = None,
        **kwargs: Any,  # options of the base class
    ) -> None:
        super().__init__(observation_space, action_space, clip_range=clip_range, **kwargs)
        self.adaptive = initial_kl_coef > 0
        self.adaptive_kl_target = self.scheduled("adaptive_kl_target", adaptive_kl_target, above=0)
        self.adaptive_kl_tolerance = adaptive_kl_tolerance
        self.kl_cutoff_factor = kl_cutoff_factor
        self.kl_cutoff_coef = kl_cutoff_coef
        self.register_buffer("kl_coef", torch.tensor(float(initial_kl_coef)))
        self._kl: Tensor | None = None

    def batch(self, rollout: Rollout, **per_step: Nested) -> Batch:
        return with_acting_distributions(self.policy, rollout, super().batch, per_step)

    def update(self, rollout: Rollout) -> None:
        self.steps.observe(kl_coef=self.kl_coef.clone())
        batch = self.batch(rollout)
        for minibatch in self.minibatches(batch, self.num_epochs, self.num_minibatches_of(rollout.shape)):
            self.descend(self.loss, minibatch)
        # While only the critic learns, the policy does not move, which is no reason to lower β.
        adapts = self.adaptive and not self.steps.is_warming_up
        self._kl = self.mean_kl(batch) if adapts else None

    def after_update(self, means: dict[str, float]) -> None:
        if self._kl is not None:
            target, tolerance = self.adaptive_kl_target, self.adaptive_kl_tolerance
            self.kl_coef.copy_(rl.adapted_kl_coef(self.kl_coef, self._kl, target, tolerance))

    def add_policy_terms(self, loss: Loss, distribution: Distribution) -> None:
        super().add_policy_terms(loss, distribution)
        kl = self.penalized_kl(loss.batch, distribution)
        loss.observe(kl=kl)
        if self.kl_cutoff_coef:
            cutoff = self.kl_cutoff_factor * self.adaptive_kl_target
            penalty = rl.kl_cutoff_penalty(kl, cutoff, self.kl_cutoff_coef)
            loss.add_scalar("kl_penalty", penalty, self.penalty_weight)
        if self.adaptive:
            loss.add_scalar("kl_penalty", self.kl_coef * kl, self.penalty_weight)

    @property
    def penalty_weight(self) -> float:
        """Weight of the penalties in the loss of this rank, whose gradient is averaged over ranks."""
        return 1.0

    def penalized_kl(self, batch: Batch, distribution: Distribution) -> Tensor:
        """Return the mean KL(old ‖ new) over the rows of a minibatch on all ranks, for the penalties."""
        return mean_of_all_ranks(batch.mean(divergence(batch, distribution), "kl"))

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take over the state; β starts with `initial_kl_coef` if either run has no adaptive penalty."""
        super().on_load_checkpoint(checkpoint)
        if 0 in (checkpoint[CHECKPOINT_KEY]["options"].get("initial_kl_coef"), self.options["initial_kl_coef"]):
            # `ModelParallelStrategy` has already loaded and removed the parameters.
            checkpoint.get("state_dict", self.state_dict())["kl_coef"].fill_(self.options["initial_kl_coef"])

    @torch.no_grad()
    def mean_kl(self, batch: Batch) -> Tensor:
        """Return the mean KL(old ‖ new) over the rows of all ranks by the current parameters; NaN without rows."""
        set_global_weights([batch])
        if not batch.weight:
            return self.kl_coef.new_tensor(torch.nan)
        if batch.sequences is None:
            rows = in_chunks(lambda x: divergence(Batch(x), self.policy(x["observations"])[0]), batch.fields, lead=1)
        else:
            rows = divergence(batch, self.actor_critic(batch)[0])
        return mean_of_all_ranks(batch.mean(rows, "kl"))

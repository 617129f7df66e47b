"""Proximal policy optimisation with KL penalties (Schulman et al. 2017, section 4)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_rl import functional as rl
from lightning_rl.algorithms.ppo import PPO
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
from lightning_rl.validation import check_number


class PPOKLPenalty(PPO):
    """Proximal policy optimisation whose updates are held back by the KL divergence instead of by clipping.

    The loss is that of `PPO`, without clipping unless `clip_range` is given, plus

        β · KL + kl_cutoff_coef · max(KL - kl_cutoff_factor · adaptive_kl_target, 0)²

    with KL the mean divergence KL(old ‖ new) between the policies that acted and that learn, exact for every action
    distribution. After the updates from a rollout β grows by half where KL has come out above the target, and shrinks
    by a third where below (see `lightning_rl.functional.adapted_kl_coef`).

    Args:
        observation_space: Of one environment: a Gymnasium space, or its description by `space_to_dict`.
        action_space: Of one environment, likewise.
        initial_kl_coef: β to begin with; 0 leaves the adaptive penalty out.
        adaptive_kl_target: The KL that β is adapted to, in nats. May be a schedule.
        adaptive_kl_tolerance: How far from it, as a share, leaves β as it is.
        kl_cutoff_factor: From how many times the target on the second penalty acts.
        kl_cutoff_coef: Its factor; 0 leaves it out.
        clip_range: As in `PPO`; None does not clip. May be a schedule.
        **kwargs: Those of `PPO`.

    Attributes:
        kl_coef: β, a buffer: it is in the checkpoint.

    Raises:
        ConfigurationError: A value is out of range; names field, value and what was expected.
    """

    kl_coef: Tensor

    def __init__(
        self,
        observation_space: SpaceOrDict,
        action_space: SpaceOrDict,
        *,
        initial_kl_coef: float = 1.0,
        adaptive_kl_target: Scheduled = 0.01,
        adaptive_kl_tolerance: float = 0.3,
        kl_cutoff_factor: float = 2.0,
        kl_cutoff_coef: float = 0.0,
        clip_range: Scheduled | None = None,
        **kwargs: Any,  # noqa: ANN401 - those of the base class
    ) -> None:
        super().__init__(observation_space, action_space, clip_range=clip_range, **kwargs)
        check_number("initial_kl_coef", initial_kl_coef, at_least=0)
        check_number("adaptive_kl_tolerance", adaptive_kl_tolerance, at_least=0)
        check_number("kl_cutoff_factor", kl_cutoff_factor, at_least=0)
        check_number("kl_cutoff_coef", kl_cutoff_coef, at_least=0)
        self.adaptive = initial_kl_coef > 0
        self.adaptive_kl_target = self.scheduled("adaptive_kl_target", adaptive_kl_target, above=0)
        self.adaptive_kl_tolerance = adaptive_kl_tolerance
        self.kl_cutoff_factor = kl_cutoff_factor
        self.kl_cutoff_coef = kl_cutoff_coef
        self.register_buffer("kl_coef", torch.tensor(float(initial_kl_coef)))
        self._adapts, self._kl = False, self.kl_coef

    def batch(self, rollout: Rollout, **per_step: Nested) -> Batch:
        """Return a rollout's steps with what to learn, and the distributions that acted."""
        return with_acting_distributions(self.policy, rollout, super().batch, per_step)

    def update(self, rollout: Rollout) -> None:
        """PPO's passes over one rollout; then see how far they have moved the policy."""
        self.steps.observe(kl_coef=self.kl_coef.clone())
        # A policy that stays where it is says nothing about how much holds it back.
        self._adapts = self.adaptive and not self.steps.is_warming_up
        batch = self.batch(rollout)
        for minibatch in self.minibatches(batch, self.num_epochs, self.num_minibatches_of(rollout.shape)):
            self.descend(self.loss, minibatch)
        self._kl = self.mean_kl(batch)

    def after_update(self, means: dict[str, float]) -> None:
        """Adapt β to how far the updates have moved the policy."""
        if self._adapts:
            target, tolerance = self.adaptive_kl_target, self.adaptive_kl_tolerance
            self.kl_coef.copy_(rl.adapted_kl_coef(self.kl_coef, self._kl, target, tolerance))

    def add_policy_terms(self, loss: Loss, distribution: Distribution) -> None:
        """Add those of `PPO`, and the penalties on the divergence that are wanted."""
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
        """Factor of the penalties in the loss."""
        return 1.0

    def penalized_kl(self, batch: Batch, distribution: Distribution) -> Tensor:
        """Return the mean KL(old ‖ new) over the rows of a minibatch of all ranks, which penalties are on."""
        return mean_of_all_ranks(batch.mean(divergence(batch, distribution)))

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take state back; where the run had no adaptive penalty, β begins now."""
        super().on_load_checkpoint(checkpoint)
        if checkpoint["hyper_parameters"].get("initial_kl_coef") == 0:
            checkpoint["state_dict"]["kl_coef"] = self.kl_coef.clone()

    @torch.no_grad()
    def mean_kl(self, batch: Batch) -> Tensor:
        """Return the mean KL(old ‖ new) over the rows of all ranks, by the current parameters; NaN of none."""
        set_global_weights([batch])
        if not batch.weight:
            return self.kl_coef.new_tensor(torch.nan)
        if batch.sequences is not None:
            return mean_of_all_ranks(batch.mean(divergence(batch, self.actor_critic(batch)[0])))

        def of_rows(fields: dict[str, Nested]) -> Tensor:
            part = Batch(fields)
            return divergence(part, self.policy(part.observations)[0])

        return mean_of_all_ranks(batch.mean(in_chunks(of_rows, batch.fields, lead=1)))

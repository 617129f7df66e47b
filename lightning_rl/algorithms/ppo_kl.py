"""Proximal policy optimisation with KL penalties (Schulman et al. 2017, section 4)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor

from lightning_rl import functional as rl
from lightning_rl.algorithms.base import ActingDistribution
from lightning_rl.algorithms.ppo import PPO
from lightning_rl.nested import Nested
from lightning_rl.policies.distributions import Distribution
from lightning_rl.policies.values import in_chunks
from lightning_rl.rollouts.batch import Batch
from lightning_rl.rollouts.rollout import Rollout
from lightning_rl.spaces import SpaceDict
from lightning_rl.training.optimization import StepOutput
from lightning_rl.training.schedules import Scheduled
from lightning_rl.validation import check_number


class PPOKLPenalty(ActingDistribution, PPO):
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
        observation_space: spaces.Space[Any] | SpaceDict,
        action_space: spaces.Space[Any] | SpaceDict,
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

    def training_step(self, rollout: Rollout, batch_idx: int) -> StepOutput:
        """Learn from one rollout, adapt β to how far that has moved the policy, and return the losses."""
        kl = self.kl_coef.new_tensor(torch.nan)  # leaves β as it is
        # A policy that stays where it is says nothing about how much holds it back.
        adapts = self.adaptive and not self.is_warming_up
        with self.learning(rollout):
            self.diagnostics.observe(kl_coef=self.kl_coef.clone())
            rollout = self.reevaluate(rollout)
            batch = self.targets(rollout)
            self.update(rollout, batch)
            kl = self.mean_kl(batch)
        if adapts and not self.skipped_updates:
            target, tolerance = self.adaptive_kl_target, self.adaptive_kl_tolerance
            self.kl_coef.copy_(rl.adapted_kl_coef(self.kl_coef, kl, target, tolerance))
        return {"losses": self.losses}

    def penalties(self, batch: Batch, distribution: Distribution) -> Sequence[Tensor]:
        """Return the penalties on the divergence over a minibatch that are wanted."""
        kl = self.over_ranks(batch.mean(self.divergence(batch, distribution)))
        self.diagnostics.observe(kl=kl)
        terms = []
        if self.kl_cutoff_coef:
            cutoff = self.kl_cutoff_factor * self.adaptive_kl_target
            terms.append(rl.kl_cutoff_penalty(kl, cutoff, self.kl_cutoff_coef))
        if self.adaptive:
            terms.append(self.kl_coef * kl)
        if terms:
            self.diagnostics.add(kl_penalty=torch.stack(terms).sum())
        return terms

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take state back; where the run had no adaptive penalty, β begins now."""
        super().on_load_checkpoint(checkpoint)
        if checkpoint["hyper_parameters"].get("initial_kl_coef") == 0:
            checkpoint["state_dict"]["kl_coef"] = self.kl_coef.clone()

    @torch.no_grad()
    def mean_kl(self, batch: Batch) -> Tensor:
        """Return the mean KL(old ‖ new) over the rows of all ranks, by the current parameters; NaN of none."""
        self.set_global_weights([batch])
        if not self.has_rows(batch):
            return self.kl_coef.new_tensor(torch.nan)
        if batch.sequences is not None:
            return self.over_ranks(batch.mean(self.divergence(batch, self.evaluate(batch)[0])))

        def divergence(fields: dict[str, Nested]) -> Tensor:
            part = Batch(fields)
            return self.divergence(part, self.policy(part.observations)[0])

        return self.over_ranks(batch.mean(in_chunks(divergence, batch.fields, lead=1)))

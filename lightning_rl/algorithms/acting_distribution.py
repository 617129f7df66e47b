"""Batches that know which distributions their actions were drawn from."""

from __future__ import annotations

from operator import itemgetter

import torch
from torch import Tensor

from lightning_rl.algorithms.base import OnPolicyAlgorithm
from lightning_rl.nested import Nested, map_leaves
from lightning_rl.policies.distributions import Distribution
from lightning_rl.policies.values import in_chunks
from lightning_rl.rollouts.batch import Batch
from lightning_rl.rollouts.rollout import Rollout


class ActingDistribution(OnPolicyAlgorithm):
    """Learns with the divergence from the policy that acted, exact for every action distribution."""

    @torch.no_grad()
    def acting_distribution(self, rollout: Rollout) -> Nested:
        """Return the parameters of the distributions that a rollout's actions were drawn from, `[T, B, ...]`.

        Called before anything is updated: the current policy is the one that acted.
        """
        observations = map_leaves(itemgetter(slice(rollout.shape[0])), rollout.observations)
        return in_chunks(lambda x: self.policy(x)[0].parameters(), observations, lead=2)

    def targets(self, rollout: Rollout, **per_step: Nested) -> Batch:
        """Return a rollout's steps with what to learn, the distributions of its actions among it."""
        if rollout.memory is None:
            return super().targets(rollout, acting_distribution=self.acting_distribution(rollout), **per_step)
        with torch.no_grad():  # before the normalisers may take the rollout in
            # Copies: what is the same for all observations is a view of a parameter, which the updates change.
            acting = map_leaves(torch.clone, self.evaluate(rollout.flatten())[0].parameters())
        return super().targets(rollout, **per_step).replace(acting_distribution=acting)

    def divergence(self, batch: Batch, distribution: Distribution) -> Tensor:
        """Return KL(old ‖ new) of each row, `[N]`, in nats.

        Args:
            batch: That `targets` made, all of it or a part.
            distribution: Of its actions, by the current parameters.
        """
        return distribution.with_parameters(batch.acting_distribution).kl(distribution)

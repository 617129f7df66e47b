"""Continual learning with experience and replay (Rolnick et al. 2019)."""

from __future__ import annotations

import copy
from typing import Any

from lightning.pytorch import Trainer
from torch import Tensor

from lightning_rl import functional as rl
from lightning_rl.algorithms.impala import IMPALA
from lightning_rl.nested import map_leaves
from lightning_rl.policies.distributions import Distribution
from lightning_rl.rollouts.batch import on_grid, set_common_weight
from lightning_rl.rollouts.replay import ReplayPolicy, UnrollMemory, layout_of_unrolls
from lightning_rl.rollouts.rollout import Rollout
from lightning_rl.spaces import SpaceOrDict
from lightning_rl.training.checks import check_memory
from lightning_rl.training.loss import Loss
from lightning_rl.training.minibatches import Unroll, unroll
from lightning_rl.validation import NonNegativeFloat, PositiveFloat


class CLEAR(IMPALA):
    """IMPALA with replay of old unrolls against forgetting (Rolnick et al. 2019).

    Each gradient step is on new and replayed unrolls, with V-trace for both. For the replayed unrolls, the loss adds

        policy_cloning_coef · KL(old policy ‖ policy) + value_cloning_coef · (V - old V)²      (section 3)

    The old policy and value are the learner's before its first update from the unroll. Means are over all steps.

    Args:
        replay_ratio: Replayed unrolls per new unroll, rounded, at least 1 in all; drawn uniformly with replacement.
        replay_memory_gib: Maximum memory of stored unrolls, in GiB on each rank.
        replay_policy: Which unrolls leave a full memory: `reservoir`: random ones, so that every unroll ever seen is
            equally likely to be stored; `fifo`: the oldest.
        replay_in_checkpoint: Save the stored unrolls in checkpoints; otherwise a resumed run starts without any.
        policy_cloning_coef: Weight of the divergence from the old policy.
        value_cloning_coef: Weight of the squared difference from the old value.
        **kwargs: Options of `IMPALA`.
    """

    def __init__(
        self,
        observation_space: SpaceOrDict,
        action_space: SpaceOrDict,
        *,
        replay_ratio: PositiveFloat = 1.0,
        replay_memory_gib: PositiveFloat = 1.0,
        replay_policy: ReplayPolicy = "reservoir",
        replay_in_checkpoint: bool = True,
        policy_cloning_coef: NonNegativeFloat = 0.01,
        value_cloning_coef: NonNegativeFloat = 0.005,
        **kwargs: Any,  # options of the base class
    ) -> None:
        super().__init__(observation_space, action_space, **kwargs)
        self.replay_ratio = replay_ratio
        self.policy_cloning_coef = policy_cloning_coef
        self.value_cloning_coef = value_cloning_coef
        self.kept = UnrollMemory(int(replay_memory_gib * 2**30), replay_policy)
        self.replays["unrolls"] = self.kept
        if not replay_in_checkpoint:
            self.not_in_checkpoints.add("unrolls")

    def check_run(self, trainer: Trainer, rollout_shape: tuple[int, int] | None) -> None:
        super().check_run(trainer, rollout_shape)
        if rollout_shape is not None:
            check_memory(self, "replay_memory_gib", rollout_shape[0])

    def update(self, rollout: Rollout) -> None:
        steps = self.batch(rollout)
        self.kept.begin_layout(layout_of_unrolls(rollout))
        if len(self.kept):
            earlier, old = self.kept.gather(self.draw(rollout.shape[1]))
            earlier, old = earlier.to(self.device), map_leaves(lambda x: x.to(self.device), old)
            steps.replayed = unroll(earlier, earlier.weights, **old)
            set_common_weight([part.batch for part in steps.parts])
        self.learn(steps)
        self.store_rollout(steps)

    def draw(self, num_new: int) -> Tensor:
        """Return random indices of stored unrolls to replay beside `num_new` new unrolls."""
        return self.kept.draw(self.replay_ratio * num_new, self.generator)

    def loss(self, batch: Unroll) -> Loss:
        """Return the loss over new and replayed steps, with the cloning terms of section 3 for the replayed steps."""
        loss = super().loss(batch)
        if (replayed := batch.replayed) is not None:
            distribution, values = self.add_terms(loss, replayed)
            rows = replayed.batch
            divergence = distribution.with_parameters(rows.old_distribution).kl(distribution)
            loss.add("policy_cloning_loss", divergence, self.policy_cloning_coef, rows)
            cloning = rl.value_cloning_loss(*loss.normalized(values, rows.values))
            loss.add("value_cloning_loss", cloning, self.value_cloning_coef, rows)
        return loss

    def add_terms(self, loss: Loss, steps: Unroll) -> tuple[Distribution, Tensor]:
        """Add the terms of `IMPALA`, and store the action distributions before the step."""
        distribution, values = super().add_terms(loss, steps)
        # Copies: a parameter that all rows share, such as log_std, changes with the step.
        steps.distributions = map_leaves(lambda x: x.detach().clone(), distribution.parameters())
        return distribution, values

    def store_rollout(self, steps: Unroll) -> None:
        """Store the unrolls of a rollout, with the learner's distributions and values before the step."""
        rollout, places = steps.rollout, steps.batch.places
        if steps.estimates is None:  # no row counted, and so there was no step
            return

        def on_steps(rows: Tensor) -> Tensor:
            return on_grid(rows, places, rows.new_zeros(*rollout.shape, *rows.shape[1:]))

        stored = copy.copy(rollout)
        stored.values = on_grid(steps.estimates.values, places, rollout.values)
        stored.weights = on_steps(steps.batch.weights) if "weights" in steps.batch.fields else None
        self.kept.append(stored, self.generator, old_distribution=map_leaves(on_steps, steps.distributions))
        self.steps.observe(replay_bytes=self.kept.num_bytes, replay_unrolls=len(self.kept))

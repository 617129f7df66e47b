"""Continual learning with experience and replay (Rolnick et al. 2019)."""

from __future__ import annotations

import copy
import sys
from typing import Any, get_args

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from lightning_rl import functional as rl
from lightning_rl.algorithms.impala import IMPALA
from lightning_rl.nested import map_leaves
from lightning_rl.policies.distributions import Distribution
from lightning_rl.rollouts.batch import on_grid, set_common_weight
from lightning_rl.rollouts.replay import ReplayPolicy, UnrollMemory, drop_unless_alike, layout_of_unrolls
from lightning_rl.rollouts.rollout import Rollout
from lightning_rl.spaces import SpaceOrDict
from lightning_rl.training.loss import Loss
from lightning_rl.training.minibatches import Unroll, example_unroll, unroll
from lightning_rl.validation import check, check_bool, check_number, is_one_of


class CLEAR(IMPALA):
    """IMPALA that goes on learning from what it did long ago, so as not to forget it (Rolnick et al. 2019).

    Each step is made from new unrolls and from replayed ones; V-trace corrects for the age of these. The loss has, for
    the replayed ones alone,

        policy_cloning_coef · KL(policy then ‖ policy) + value_cloning_coef · (V - V then)²      (section 3)

    "Then" is when the unroll was first learned from, policy and value being the learner's before that step. Means are
    over all steps, new and replayed.

    Args:
        observation_space: Of one environment: a Gymnasium space, or its description by `space_to_dict`.
        action_space: Of one environment, likewise.
        replay_ratio: Replayed unrolls for each new one, drawn uniformly with replacement from those of earlier
            rollouts; their number is rounded, and at least 1.
        replay_memory_gib: How much the unrolls that are kept may take, in GiB on each rank.
        replay_policy: Which of them leave then: with `reservoir` any, each unroll ever seen being as likely to be still
            there, with `fifo` the oldest.
        replay_in_checkpoint: Whether checkpoints have what is kept; a run that is resumed without begins with none.
        policy_cloning_coef: Weight of the divergence from the policy of then.
        value_cloning_coef: Weight of the squared difference from its value.
        **kwargs: Those of `IMPALA`.

    Raises:
        ConfigurationError: A value is out of range; names field, value and what was expected.
    """

    def __init__(
        self,
        observation_space: SpaceOrDict,
        action_space: SpaceOrDict,
        *,
        replay_ratio: float = 1.0,
        replay_memory_gib: float = 1.0,
        replay_policy: ReplayPolicy = "reservoir",
        replay_in_checkpoint: bool = True,
        policy_cloning_coef: float = 0.01,
        value_cloning_coef: float = 0.005,
        **kwargs: Any,  # noqa: ANN401 - those of the base class
    ) -> None:
        super().__init__(observation_space, action_space, **kwargs)
        check_number("replay_ratio", replay_ratio, above=0)
        check_number("replay_memory_gib", replay_memory_gib, above=0)
        choices = get_args(ReplayPolicy)
        check(is_one_of(replay_policy, choices), "replay_policy", replay_policy, " or ".join(choices))
        check_bool("replay_in_checkpoint", replay_in_checkpoint)
        check_number("policy_cloning_coef", policy_cloning_coef, at_least=0)
        check_number("value_cloning_coef", value_cloning_coef, at_least=0)
        self.replay_ratio = replay_ratio
        self.policy_cloning_coef = policy_cloning_coef
        self.value_cloning_coef = value_cloning_coef
        self.kept = UnrollMemory(int(replay_memory_gib * 2**30), replay_policy)
        self.replays["unrolls"] = self.kept
        if not replay_in_checkpoint:
            self.not_in_checkpoints.add("unrolls")

    def check_run(self, trainer: Trainer, rollout_shape: tuple[int, int] | None) -> None:
        """Check, besides what every algorithm does, that there is room for any unroll."""
        super().check_run(trainer, rollout_shape)
        if rollout_shape is not None:
            needed = self.most_bytes_of_unroll(rollout_shape[0])
            expected = f"at least {needed / 2**30:.3g}: the unroll of one environment takes up to {needed} bytes"
            check(self.kept.max_bytes >= needed, "replay_memory_gib", self.options["replay_memory_gib"], expected)

    @torch.no_grad()
    def most_bytes_of_unroll(self, length: int) -> int:
        """Return what is kept of `length` steps of one environment, in bytes, where each of them is truncated."""
        rollout = example_unroll(self.policy, self.observation_space, length)
        distribution, _ = self.actor_critic(rollout.flatten())
        actions, parameters = map_leaves(lambda x: x.unsqueeze(1), (distribution.mode(), distribution.parameters()))
        rollout.actions = actions
        memory = UnrollMemory(sys.maxsize)
        memory.append(rollout, torch.Generator(), old_distribution=parameters)
        return memory.num_bytes

    def update(self, rollout: Rollout) -> None:
        """One gradient step on a rollout and on replayed ones; then keep it."""
        steps = self.batch(rollout)
        drop_unless_alike(self.kept, layout_of_unrolls(rollout), "replay")
        if len(self.kept):
            earlier, then = self.kept.gather(self.draw(rollout.shape[1]))
            earlier, then = earlier.to(self.device), map_leaves(lambda x: x.to(self.device), then)
            steps.replayed = unroll(earlier, self.checked_weights(earlier), **then)
            set_common_weight([part.batch for part in steps.parts])
        self.learn(steps)
        self.store_rollout(steps)

    def draw(self, num_new: int) -> Tensor:
        """Return places of unrolls to replay beside `num_new` new ones."""
        count = max(1, round(self.replay_ratio * num_new))
        return torch.randint(len(self.kept), (count,), generator=self.generator)

    def loss(self, batch: Unroll) -> Loss:
        """Return the loss over new and replayed steps, these held to the policy and the values of then (section 3)."""
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
        """Add those of `IMPALA`, and keep the distributions as they are before the step."""
        distribution, values = super().add_terms(loss, steps)
        # Copies: what is the same for all rows is a parameter, which the step changes.
        steps.distributions = map_leaves(lambda x: x.detach().clone(), distribution.parameters())
        return distribution, values

    def store_rollout(self, steps: Unroll) -> None:
        """Keep the unrolls of a rollout, with what the learner made of them before its step."""
        rollout, places = steps.rollout, steps.batch.places
        if steps.estimates is None:  # nothing of it was learned from
            with torch.no_grad():
                self.loss(steps)
        assert steps.estimates is not None

        def kept(rows: Tensor) -> Tensor:
            return on_grid(rows, places, rows.new_zeros(*rollout.shape, *rows.shape[1:]))

        parameters = map_leaves(kept, steps.distributions)
        then = copy.copy(rollout)
        then.values = on_grid(steps.estimates.values, places, rollout.values)
        self.kept.append(then, self.generator, old_distribution=parameters)
        self.steps.observe(
            replay_bytes=torch.tensor(float(self.kept.num_bytes), device=self.device),
            replay_unrolls=torch.tensor(float(len(self.kept)), device=self.device),
        )

"""Continual learning with experience and replay (Rolnick et al. 2019)."""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from typing import Any, get_args

import torch
from gymnasium import spaces
from lightning.pytorch import Trainer
from torch import Tensor

from lightning_rl import functional as rl
from lightning_rl.algorithms.impala import IMPALA, Evaluated
from lightning_rl.nested import map_leaves
from lightning_rl.rollouts.batch import on_grid
from lightning_rl.rollouts.replay import ReplayPolicy, UnrollMemory, drop_unless_alike, layout_of_unrolls
from lightning_rl.rollouts.rollout import Rollout
from lightning_rl.spaces import SpaceDict
from lightning_rl.training.optimization import StepOutput
from lightning_rl.training.unroll import Unroll, example_unroll
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
        observation_space: spaces.Space[Any] | SpaceDict,
        action_space: spaces.Space[Any] | SpaceDict,
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
            check(self.kept.max_bytes >= needed, "replay_memory_gib", self.hparams["replay_memory_gib"], expected)

    @torch.no_grad()
    def most_bytes_of_unroll(self, length: int) -> int:
        """Return what is kept of `length` steps of one environment, in bytes, where each of them is truncated."""
        rollout = example_unroll(self.policy, self.observation_space, length)
        distribution, _ = self.evaluate(rollout.flatten())
        actions, parameters = map_leaves(lambda x: x.unsqueeze(1), (distribution.mode(), distribution.parameters()))
        rollout.actions = actions
        memory = UnrollMemory(sys.maxsize)
        memory.append(rollout, torch.Generator(), old_distribution=parameters)
        return memory.num_bytes

    def training_step(self, rollout: Rollout, batch_idx: int) -> StepOutput:
        """Learn from one rollout and from earlier ones, keep it, and return the losses."""
        with self.learning(rollout):
            new, *replayed = [self.evaluated(unroll) for unroll in self.unrolls(rollout)]
            self.store_rollout(
                rollout, new
            )  # before the step, which changes parameters that are in distributions as well
            self.update([new, *replayed])
            self.log_histograms(new.batch, "update")
        return {"losses": self.losses}

    def unrolls(self, rollout: Rollout) -> list[Unroll]:
        """Return the rollout and, where there are any, unrolls of earlier ones."""
        unrolls = super().unrolls(rollout)
        drop_unless_alike(self.kept, layout_of_unrolls(rollout), "replay")
        if len(self.kept):
            earlier, then = self.kept.gather(self.draw(rollout.shape[1]))
            unrolls.append(self.unroll(earlier.to(self.device), **map_leaves(lambda x: x.to(self.device), then)))
            self.set_global_weights_together([unroll.batch for unroll in unrolls])
        return unrolls

    def draw(self, num_new: int) -> Tensor:
        """Return places of unrolls to replay beside `num_new` new ones."""
        count = max(1, round(self.replay_ratio * num_new))
        return torch.randint(len(self.kept), (count,), generator=self.generator)

    def cloning_terms(self, parts: Sequence[Evaluated]) -> Sequence[Tensor]:
        """Return the terms that hold policy and value to what they were in the replayed unrolls, if there are any."""
        if len(parts) == 1:
            return ()
        replayed = parts[1]
        batch = replayed.batch
        divergence = replayed.distribution.with_parameters(batch.old_distribution).kl(replayed.distribution)
        policy_cloning = batch.mean(divergence)
        value_cloning = batch.mean(rl.value_cloning_loss(*self.normalize_values(replayed.values, batch.values)))
        self.diagnostics.add(policy_cloning_loss=policy_cloning, value_cloning_loss=value_cloning)
        return self.policy_cloning_coef * policy_cloning, self.value_cloning_coef * value_cloning

    def store_rollout(self, rollout: Rollout, evaluated: Evaluated) -> None:
        """Keep the unrolls of a rollout, with what the learner made of them before its step."""
        batch = evaluated.batch

        def kept(rows: Tensor) -> Tensor:
            return on_grid(rows.detach(), batch.places, rows.new_zeros(*rollout.shape, *rows.shape[1:]))

        parameters = map_leaves(kept, evaluated.distribution.parameters())
        then = copy.copy(rollout)
        then.values = on_grid(evaluated.values.detach(), batch.places, rollout.values)
        self.kept.append(then, self.generator, old_distribution=parameters)
        self.diagnostics.observe(
            replay_bytes=torch.tensor(float(self.kept.num_bytes), device=self.device),
            replay_unrolls=torch.tensor(float(len(self.kept)), device=self.device),
        )

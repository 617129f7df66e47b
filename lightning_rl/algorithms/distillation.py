"""Distillation from a teacher beside PPO (Ross et al. 2011, Schmitt et al. 2018)."""

from __future__ import annotations

from functools import cached_property
from operator import itemgetter
from typing import Any

import torch
from lightning.pytorch import Trainer

from lightning_rl import algorithms
from lightning_rl.algorithms.base import OnPolicyAlgorithm
from lightning_rl.algorithms.ppo import PPO
from lightning_rl.checkpointing.format import CHECKPOINT_KEY, read_checkpoint
from lightning_rl.nested import Nested, map_leaves
from lightning_rl.policies.actor_critic import ActorCritic
from lightning_rl.policies.distributions import Distribution
from lightning_rl.policies.values import in_chunks
from lightning_rl.rollouts.rollout import Rollout
from lightning_rl.spaces import SpaceOrDict
from lightning_rl.training.loss import Loss
from lightning_rl.training.schedules import Scheduled
from lightning_rl.validation import check


class Distillation(PPO):
    """PPO of a student that also imitates a teacher on the observations that the student visits.

    The student acts, and the teacher computes its action distribution for each observation (DAgger, Ross et al. 2011):

        rl_coef · (policy loss - entropy_coef · entropy) + value_coef · value loss
        + distillation_coef · mean KL(teacher ‖ student)

    `policy.critic_only` names the parts of an observation that the student's actor does not see. The teacher and the
    student's critic see these parts.

    Args:
        teacher: Path of the teacher's checkpoint: any algorithm with equal spaces, without memory; for training only.
        distillation_coef: Weight of the divergence. May be a schedule.
        rl_coef: Weight of PPO's policy loss and entropy bonus. May be a schedule.
        **kwargs: Options of `PPO`.
    """

    def __init__(
        self,
        observation_space: SpaceOrDict,
        action_space: SpaceOrDict,
        *,
        teacher: str,
        distillation_coef: Scheduled = 1.0,
        rl_coef: Scheduled = 1.0,
        **kwargs: Any,  # options of the base class
    ) -> None:
        super().__init__(observation_space, action_space, **kwargs)
        self.distillation_coef = self.scheduled("distillation_coef", distillation_coef, at_least=0)
        self.rl_coef = self.scheduled("rl_coef", rl_coef, at_least=0)

    @cached_property
    def teacher(self) -> ActorCritic:
        """The policy of the teacher; its parameters are not parameters of the algorithm.

        A file that is no checkpoint of this package, or a policy that does not fit, raises a `ConfigurationError`.
        """
        path = self.options["teacher"]
        algorithm = read_checkpoint(path, "teacher", mapped=True)[CHECKPOINT_KEY]["algorithm"]
        loaded = getattr(algorithms, algorithm, OnPolicyAlgorithm).load_from_checkpoint(path, map_location="cpu")
        for name in ("observation_space", "action_space", "policy.action_distribution"):
            found, expected = loaded.options[name], self.options[name]
            check(found == expected, f"teacher={path!r}: {name}", found, f"{expected!r}, as in the student")
        memory = getattr(loaded.policy, "memory", None)
        check(memory is None, f"teacher={path!r}: policy.memory", memory, "None")
        return loaded.policy.requires_grad_(False)

    def check_run(self, trainer: Trainer, rollout_shape: tuple[int, int] | None) -> None:
        super().check_run(trainer, rollout_shape)
        # Loads it. If the property raised an AttributeError, `self.teacher` would say that there is no such attribute.
        type(self).teacher.__get__(self)

    @torch.no_grad()
    def batch(self, rollout: Rollout, **per_step: Nested) -> Any:
        # A student in bfloat16 gets labels in float32.
        dtype = next(self.policy.parameters()).dtype
        self.teacher.to(self.device, torch.promote_types(dtype, torch.float32))
        observed = map_leaves(itemgetter(slice(rollout.shape[0])), rollout.observations)
        labels = in_chunks(lambda x: self.teacher(x)[0].parameters(), observed, lead=2)
        return super().batch(rollout, teacher_distribution=labels, **per_step)

    def add_policy_terms(self, loss: Loss, distribution: Distribution) -> None:
        """Add the terms of `PPO` and the divergence from the teacher."""
        loss.scale = self.rl_coef
        super().add_policy_terms(loss, distribution)
        loss.scale = 1.0
        labels = distribution.with_parameters(loss.batch.teacher_distribution)
        loss.add("distillation_loss", labels.kl(distribution), self.distillation_coef)

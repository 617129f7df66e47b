"""Behavior cloning (Pomerleau 1989): a policy that imitates recorded actions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from lightning_rl.algorithms.base import OnPolicyAlgorithm
from lightning_rl.nested import Nested
from lightning_rl.policies.distributions.continuous import BetaHead, SquashedGaussianHead
from lightning_rl.rollouts.batch import Batch
from lightning_rl.rollouts.rollout import Rollout
from lightning_rl.spaces import SpaceOrDict
from lightning_rl.training.config import OPTIONS_OF_PASSES, OPTIONS_OF_TARGETS
from lightning_rl.training.loss import Loss
from lightning_rl.training.parameter_groups import ActorOrCritic
from lightning_rl.training.schedules import Scheduled
from lightning_rl.validation import PositiveInt, check

_WITHOUT_EFFECT = (
    *("gamma", "policy.memory", "normalization.rewards", "normalization.values", "debug.histograms"),
    *("optimizer.critic.name", "optimizer.critic.options", "optimizer.critic.learning_rate"),
    *("optimizer.l2.value", "optimizer.l2.shared", "advantages.on_truncation", "advantages.normalize"),
    *OPTIONS_OF_TARGETS,
    *OPTIONS_OF_PASSES,
)


class BehaviourCloning(OnPolicyAlgorithm):
    """Minimize the mean of -log π(action | observation) over the steps of `RecordedEpisodes`.

    The critic does not change: train it next with `CriticPretraining` and `init_from`. The clock counts recorded steps.

    Args:
        num_epochs: Passes over each rollout of recorded steps.
        num_minibatches: Minibatches of each pass.
        entropy_coef: Weight of an entropy bonus, which keeps the policy exploring. May be a schedule.
        **kwargs: Options of `OnPolicyAlgorithm` for policies without memory.
    """

    learns_from_recorded_steps = True
    without_effect: ClassVar[Mapping[str, str]] = dict.fromkeys(
        _WITHOUT_EFFECT, "only the policy is learned, from recorded actions"
    )

    def __init__(
        self,
        observation_space: SpaceOrDict,
        action_space: SpaceOrDict,
        *,
        num_epochs: PositiveInt = 1,
        num_minibatches: PositiveInt = 4,
        entropy_coef: Scheduled = 0.0,
        learning_rate: Scheduled = 1e-3,
        **kwargs: Any,  # options of the base class
    ) -> None:
        super().__init__(observation_space, action_space, learning_rate=learning_rate, **kwargs)
        bounded = any(isinstance(part, BetaHead | SquashedGaussianHead) for part in self.policy.modules())
        expected = "distributions whose actions are in the units of the space, as recorded ones are"
        check(not bounded, "policy.action_distribution", self.options["policy.action_distribution"], expected)
        self.num_epochs = num_epochs
        self.num_minibatches = num_minibatches
        self.entropy_coef = self.scheduled("entropy_coef", entropy_coef, at_least=0)

    def update(self, rollout: Rollout) -> None:
        for minibatch in self.minibatches(self.batch(rollout), self.num_epochs, self.num_minibatches):
            self.descend(self.loss, minibatch)

    def batch(self, rollout: Rollout, **per_step: Nested) -> Batch:
        self.normalizers.begin(rollout)
        rows, weights = self.estimator.counted_steps(rollout, self.checked_weights(rollout))
        return rollout.flatten(rows, weights=weights, **per_step)

    def frozen_parameters(self, part: ActorOrCritic | None) -> list[nn.Parameter]:
        return super().frozen_parameters("actor")

    def loss(self, batch: Batch) -> Loss:
        distribution, _ = self.actor_critic(batch)
        loss = self.new_loss(batch)
        loss.add("cloning_loss", -distribution.log_prob(batch.actions))
        loss.add_entropy(distribution.entropies(), self.entropy_coef)
        return loss

"""Advantage actor-critic (Mnih et al. 2016), all environments in step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from lightning_rl import functional as rl
from lightning_rl.algorithms.base import OnPolicyAlgorithm
from lightning_rl.rollouts.batch import Batch
from lightning_rl.rollouts.rollout import Rollout
from lightning_rl.spaces import SpaceOrDict
from lightning_rl.training.config import OPTIONS_OF_PASSES
from lightning_rl.training.loss import Loss
from lightning_rl.training.schedules import Scheduled
from lightning_rl.validation import ClassSpec, NonNegativeFloat


class A2C(OnPolicyAlgorithm):
    """Synchronous advantage actor-critic (Mnih et al. 2016).

    One gradient step per rollout on

        policy-gradient loss + value_coef · value loss - entropy_coef · entropy

    Args:
        gae_lambda: λ of the advantage estimates. 1 gives n-step returns up to the end of the rollout, as in the paper.
            May be a schedule.
        value_coef: Weight of the value loss ½(V - return)².
        entropy_coef: Weight of the entropy bonus. May be a schedule.
        **kwargs: Options of `OnPolicyAlgorithm`. The default optimizer is RMSprop, as in the paper.
    """

    without_effect: ClassVar[Mapping[str, str]] = dict.fromkeys(
        OPTIONS_OF_PASSES, "A2C makes one gradient step per rollout"
    )

    def __init__(
        self,
        observation_space: SpaceOrDict,
        action_space: SpaceOrDict,
        *,
        learning_rate: Scheduled = 7e-4,
        gae_lambda: Scheduled = 1.0,
        value_coef: NonNegativeFloat = 0.5,
        entropy_coef: Scheduled = 0.01,
        **kwargs: Any,  # options of the base class
    ) -> None:
        super().__init__(observation_space, action_space, learning_rate=learning_rate, **kwargs)
        self.estimator.gae_lambda = self.scheduled(
            "gae_lambda", gae_lambda, at_least=0, at_most=1, owner=self.estimator
        )
        self.value_coef = value_coef
        self.entropy_coef = self.scheduled("entropy_coef", entropy_coef, at_least=0)

    def default_optimizer(self) -> ClassSpec:
        return {"class_path": "torch.optim.RMSprop", "init_args": {"alpha": 0.99, "eps": 1e-5}}

    def update(self, rollout: Rollout) -> None:
        for batch in self.minibatches(self.batch(rollout)):
            self.descend(self.loss, batch)

    def loss(self, batch: Batch) -> Loss:
        distribution, values = self.actor_critic(batch)
        log_probs = distribution.log_prob(batch.actions)
        loss = self.new_loss(batch)
        loss.add("policy_loss", rl.policy_gradient_loss(log_probs, self.estimator.normalized(batch)))
        loss.add_value(values, self.value_coef)
        loss.add_entropy(distribution.entropies(), self.entropy_coef)
        loss.watch_ratios(log_probs - batch.log_probs)
        return loss

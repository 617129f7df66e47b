"""Advantage actor-critic (Mnih et al. 2016), all environments in step."""

from __future__ import annotations

from typing import Any

from gymnasium import spaces
from torch import Tensor

from lightning_rl import functional as rl
from lightning_rl.algorithms.base import OnPolicyAlgorithm
from lightning_rl.rollouts.batch import Batch
from lightning_rl.rollouts.rollout import Rollout
from lightning_rl.spaces import SpaceDict
from lightning_rl.training.optimization import StepOutput
from lightning_rl.training.schedules import Scheduled
from lightning_rl.validation import ClassSpec, check_bool, check_number


class A2C(OnPolicyAlgorithm):
    """Synchronous advantage actor-critic (Mnih et al. 2016).

    One gradient step for each rollout, on

        policy-gradient loss + value_coef · value loss - entropy_coef · entropy

    Args:
        observation_space: Of one environment: a Gymnasium space, or its description by `space_to_dict`.
        action_space: Of one environment, likewise.
        learning_rate: Step size of the optimiser.
        gae_lambda: λ of the advantage estimates: 1 makes n-step returns of them, n being what is left of the rollout,
            as in the paper.
        value_coef: Weight of the value loss ½(V - return)².
        entropy_coef: Weight of the entropy bonus.
        normalize_advantages: Standardise them over the rollout.
        **kwargs: Those of `OnPolicyAlgorithm`; `optimizer=None` is RMSprop, as in the paper.

    Raises:
        ConfigurationError: A value is out of range; names field, value and what was expected.
    """

    def __init__(
        self,
        observation_space: spaces.Space[Any] | SpaceDict,
        action_space: spaces.Space[Any] | SpaceDict,
        *,
        learning_rate: Scheduled = 7e-4,
        gae_lambda: Scheduled = 1.0,
        value_coef: float = 0.5,
        entropy_coef: Scheduled = 0.01,
        normalize_advantages: bool = False,
        **kwargs: Any,  # noqa: ANN401 - those of the base class
    ) -> None:
        super().__init__(observation_space, action_space, learning_rate=learning_rate, **kwargs)
        check_number("value_coef", value_coef, at_least=0)
        check_bool("normalize_advantages", normalize_advantages)
        self.gae_lambda = self.scheduled("gae_lambda", gae_lambda, at_least=0, at_most=1)
        self.value_coef = value_coef
        self.entropy_coef = self.scheduled("entropy_coef", entropy_coef, at_least=0)
        self.normalize_advantages = normalize_advantages

    def default_optimizer(self) -> ClassSpec:
        """Return RMSprop with the decay of the paper."""
        return {"class_path": "torch.optim.RMSprop", "init_args": {"alpha": 0.99, "eps": 1e-5}}

    def training_step(self, rollout: Rollout, batch_idx: int) -> StepOutput:
        """Learn from one rollout, and return the losses."""
        with self.learning(rollout):
            batch = self.targets(rollout)
            for whole in self.minibatches(batch, num_minibatches=1):
                self.optimize(self.loss(whole))
            self.log_histograms(batch, "update")
        return {"losses": self.losses}

    def loss(self, batch: Batch) -> Tensor:
        """Return the loss over a rollout's steps."""
        advantages = self.normalized_advantages(batch) if self.normalize_advantages else batch.advantages
        distribution, values = self.evaluate(batch)
        log_probs = distribution.log_prob(batch.actions)
        policy_loss = batch.mean(rl.policy_gradient_loss(log_probs, advantages))
        value_loss = batch.mean(rl.value_loss(*self.normalize_values(values, batch.returns)))
        entropy = self.entropy(distribution, batch)
        self.diagnostics.add(policy_loss=policy_loss, value_loss=value_loss)
        self.observe_first_ratios(log_probs - batch.log_probs)
        return self.total(policy_loss, self.value_coef * value_loss, -self.entropy_coef * entropy)

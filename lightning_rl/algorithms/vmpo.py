"""On-policy maximum a posteriori policy optimization, V-MPO (Song et al. 2020)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.nn.functional import pad, softplus

from lightning_rl import functional as rl
from lightning_rl.algorithms.base import OnPolicyAlgorithm
from lightning_rl.distributed import gather_rows, mean_of_all_ranks, world_size
from lightning_rl.nested import Nested
from lightning_rl.policies.actor_critic import ActorCritic
from lightning_rl.policies.sharding import whole
from lightning_rl.rollouts.batch import Batch
from lightning_rl.rollouts.rollout import Rollout
from lightning_rl.spaces import SpaceOrDict
from lightning_rl.training.advantages import divergence, with_acting_distributions
from lightning_rl.training.config import OPTIONS_OF_PASSES
from lightning_rl.training.loss import Loss
from lightning_rl.training.schedules import Scheduled
from lightning_rl.validation import NonNegativeFloat, PositiveFloat, PositiveInt, check


class VMPO(OnPolicyAlgorithm):
    """V-MPO: fit the policy to the actions with above-median advantages, weighted by exp(advantage / η).

    Each gradient step is on (equations 3 to 6)

        -Σ ψ log π + η ε_η + η log mean exp(A / η) + α (ε_α - sg[KL]) + sg[α] KL + value_coef · value loss

    with ψ = softmax(A / η) over the half of the minibatch with the larger advantages, and KL the mean exact divergence
    KL(old ‖ new) from the policy that acted, over whole actions. The temperature η and the coefficient α are learned
    with the weights. With several ranks the minibatch is the union of the ranks' minibatches.

    Args:
        learning_rate: Step size of the optimizer, also for η and α; `optimizer.groups` may name them as `dual`.
        num_epochs: Passes over each rollout.
        num_minibatches: Minibatches of each pass.
        gae_lambda: λ of the advantage estimates. May be a schedule.
        temperature_epsilon: ε_η: bound of the divergence of the weights ψ from uniform weights, in nats.
        kl_epsilon: ε_α: bound of the divergence from the policy that acted, in nats.
        initial_temperature: Initial η.
        initial_kl_coef: Initial α.
        value_coef: Weight of the value loss ½(V - return)².
        **kwargs: Options of `OnPolicyAlgorithm`.
    """

    without_effect: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(OPTIONS_OF_PASSES, "V-MPO's passes have the policy and the value in one loss"),
        "advantages.normalize": "V-MPO weights actions by exp(advantage / η)",
    }

    def __init__(
        self,
        observation_space: SpaceOrDict,
        action_space: SpaceOrDict,
        *,
        learning_rate: Scheduled = 1e-3,
        num_epochs: PositiveInt = 4,
        num_minibatches: PositiveInt = 1,
        gae_lambda: Scheduled = 0.95,
        temperature_epsilon: PositiveFloat = 0.1,
        kl_epsilon: PositiveFloat = 0.01,
        initial_temperature: PositiveFloat = 1.0,
        initial_kl_coef: PositiveFloat = 5.0,
        value_coef: NonNegativeFloat = 0.5,
        **kwargs: Any,  # options of the base class
    ) -> None:
        super().__init__(observation_space, action_space, learning_rate=learning_rate, **kwargs)
        self.num_epochs = num_epochs
        self.num_minibatches = num_minibatches
        self.estimator.gae_lambda = self.scheduled(
            "gae_lambda", gae_lambda, at_least=0, at_most=1, owner=self.estimator
        )
        self.temperature_epsilon = temperature_epsilon
        self.kl_epsilon = kl_epsilon
        self.value_coef = value_coef

    def make_policy(self) -> ActorCritic:
        """Return the policy with a parameter for the dual variables η and α, so that the optimizer trains them too."""
        policy = super().make_policy()
        initial = torch.tensor([self.options["initial_temperature"], self.options["initial_kl_coef"]])
        policy.dual = nn.Parameter(initial + (-(-initial).expm1()).log())  # softplus of it is `initial`
        return policy

    @property
    def duals(self) -> Tensor:
        """The temperature η and the coefficient α, `[2]`, at least 1e-8."""
        return softplus(whole(self.policy.get_parameter("dual"))) + 1e-8

    def check_run(self, trainer: Trainer, rollout_shape: tuple[int, int] | None) -> None:
        super().check_run(trainer, rollout_shape)
        expected = "the policy of super().make_policy(), whose parameter dual has η and α"
        check(hasattr(self.policy, "dual"), "make_policy", type(self.policy).__name__, expected)
        expected = "bf16-mixed: a bfloat16 parameter would round away the steps of η and α"
        check(trainer.precision != "bf16-true", "precision", trainer.precision, expected)

    def batch(self, rollout: Rollout, **per_step: Nested) -> Batch:
        return with_acting_distributions(self.policy, rollout, super().batch, per_step)

    def update(self, rollout: Rollout) -> None:
        for minibatch in self.minibatches(self.batch(rollout), self.num_epochs, self.num_minibatches):
            self.descend(self.loss, minibatch)

    def loss(self, batch: Batch) -> Loss:
        distribution, values = self.actor_critic(batch)
        log_probs = distribution.log_prob(batch.actions)
        loss, (temperature, kl_coef) = self.new_loss(batch), self.duals
        advantages, others = gather_rows(batch.advantages)
        weights = gather_rows(batch.weights)[0] if "weights" in batch.fields else None
        best = rl.better_half(advantages, weights)
        advantages, weights = advantages[best], None if weights is None else weights[best]
        # Rows of other ranks add 0 here. DDP averages gradients over ranks; the factor turns this average into a sum.
        own_log_probs = world_size() * pad(log_probs, others)
        loss.add_scalar("policy_loss", rl.vmpo_policy_loss(own_log_probs[best], advantages, temperature, weights))
        loss.add_scalar(
            "temperature_loss", rl.vmpo_temperature_loss(advantages, temperature, self.temperature_epsilon, weights)
        )
        kl = mean_of_all_ranks(batch.mean(divergence(batch, distribution), "kl"))
        loss.add_scalar(None, rl.lagrangian(kl, kl_coef, self.kl_epsilon))
        loss.add_value(values, self.value_coef)
        loss.observe(kl=kl, temperature=temperature, kl_coef=kl_coef)
        loss.add_entropy(distribution.entropies(), coef=0.0)
        loss.watch_ratios(log_probs - batch.log_probs)
        return loss

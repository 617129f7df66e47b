"""On-policy maximum a posteriori policy optimisation (Song et al. 2020)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, softplus

from lightning_rl import functional as rl
from lightning_rl.algorithms.base import OnPolicyAlgorithm
from lightning_rl.distributed import gather_rows, mean_of_all_ranks, world_size
from lightning_rl.nested import Nested
from lightning_rl.policies.actor_critic import ActorCritic
from lightning_rl.rollouts.batch import Batch
from lightning_rl.rollouts.rollout import Rollout
from lightning_rl.spaces import SpaceOrDict
from lightning_rl.training.advantages import divergence, with_acting_distributions
from lightning_rl.training.config import OPTIONS_OF_PASSES
from lightning_rl.training.loss import Loss
from lightning_rl.training.schedules import Scheduled
from lightning_rl.validation import check_number, check_positive_int


class VMPO(OnPolicyAlgorithm):
    """V-MPO: the policy is fitted to the better half of its own actions, weighted by exp(advantage / η).

    Each gradient step is on (equations 3 to 6)

        -Σ ψ log π + η ε_η + η log mean exp(A / η) + α (ε_α - sg[KL]) + sg[α] KL + value_coef · value loss

    with ψ = softmax(A / η) over the half of the minibatch with the larger advantages, and KL the mean divergence
    KL(old ‖ new) from the policy that acted, exact and over whole actions. The temperature η and the coefficient α are
    learned with the weights. With several ranks the minibatch is the union of the ranks' minibatches.

    Args:
        observation_space: Of one environment: a Gymnasium space, or its description by `space_to_dict`.
        action_space: Of one environment, likewise.
        learning_rate: Step size of the optimiser, that of η and α too; `optimizer.groups` may name them as `dual`.
        num_epochs: Passes over each rollout.
        num_minibatches: Parts of each pass.
        gae_lambda: λ of the advantage estimates. May be a schedule.
        temperature_epsilon: ε_η: how far, in nats, the weights may be from uniform.
        kl_epsilon: ε_α: bound of the divergence, in nats.
        initial_temperature: η to begin with.
        initial_kl_coef: α to begin with.
        value_coef: Weight of the value loss ½(V - return)².
        **kwargs: Those of `OnPolicyAlgorithm`.

    Raises:
        ConfigurationError: A value is out of range; names field, value and what was expected.
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
        num_epochs: int = 4,
        num_minibatches: int = 1,
        gae_lambda: Scheduled = 0.95,
        temperature_epsilon: float = 0.1,
        kl_epsilon: float = 0.01,
        initial_temperature: float = 1.0,
        initial_kl_coef: float = 5.0,
        value_coef: float = 0.5,
        **kwargs: Any,  # noqa: ANN401 - those of the base class
    ) -> None:
        check_number("initial_temperature", initial_temperature, above=0)
        check_number("initial_kl_coef", initial_kl_coef, above=0)
        super().__init__(observation_space, action_space, learning_rate=learning_rate, **kwargs)
        check_positive_int("num_epochs", num_epochs)
        check_positive_int("num_minibatches", num_minibatches)
        check_number("temperature_epsilon", temperature_epsilon, above=0)
        check_number("kl_epsilon", kl_epsilon, above=0)
        check_number("value_coef", value_coef, at_least=0)
        self.num_epochs, self.num_minibatches = num_epochs, num_minibatches
        self.estimator.gae_lambda = self.scheduled(
            "gae_lambda", gae_lambda, at_least=0, at_most=1, owner=self.estimator
        )
        self.temperature_epsilon, self.kl_epsilon, self.value_coef = temperature_epsilon, kl_epsilon, value_coef

    def make_policy(self) -> ActorCritic:
        """Return the policy, with the duals η and α beside its weights, for the optimiser to have them all."""
        policy = super().make_policy()
        initial = torch.tensor([self.options["initial_temperature"], self.options["initial_kl_coef"]])
        policy.dual = nn.Parameter(initial + (-(-initial).expm1()).log())  # softplus of it is `initial`
        return policy

    @property
    def duals(self) -> Tensor:
        """The temperature η and the coefficient α, `[2]`, wherever a step leads not below 1e-8."""
        return softplus(self.policy.get_parameter("dual")) + 1e-8

    def batch(self, rollout: Rollout, **per_step: Nested) -> Batch:
        """Return a rollout's steps with what to learn, and the distributions that acted."""
        return with_acting_distributions(self.policy, rollout, super().batch, per_step)

    def update(self, rollout: Rollout) -> None:
        """Several passes of minibatch steps over one rollout."""
        for minibatch in self.minibatches(self.batch(rollout), self.num_epochs, self.num_minibatches):
            self.descend(self.loss, minibatch)

    def loss(self, batch: Batch) -> Loss:
        """Return the loss over a minibatch (equations 3 to 6)."""
        distribution, values = self.actor_critic(batch)
        loss, log_probs = self.new_loss(batch), distribution.log_prob(batch.actions)
        temperature, kl_coef = self.duals
        weights = batch.weights if "weights" in batch.fields else None
        advantages, others = gather_rows(batch.advantages)
        weights = None if weights is None else gather_rows(weights)[0]
        best = rl.better_half(advantages, weights)
        advantages, weights = advantages[best], None if weights is None else weights[best]
        # The rows of other ranks add 0 here. DDP averages over ranks, and the factor makes that average a sum.
        own_log_probs = world_size() * pad(log_probs, others)
        loss.add_scalar("policy_loss", rl.vmpo_policy_loss(own_log_probs[best], advantages, temperature, weights))
        loss.add_scalar(
            "temperature_loss", rl.vmpo_temperature_loss(advantages, temperature, self.temperature_epsilon, weights)
        )
        kl = mean_of_all_ranks(batch.mean(divergence(batch, distribution)))
        loss.add_scalar(None, rl.lagrangian(kl, kl_coef, self.kl_epsilon))
        loss.add_value(values, self.value_coef)
        loss.observe(kl=kl, temperature=temperature, kl_coef=kl_coef)
        loss.add_entropy(distribution.entropies(), coef=0.0)
        loss.watch_ratios(log_probs - batch.log_probs)
        return loss

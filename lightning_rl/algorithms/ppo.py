"""Proximal policy optimisation (Schulman et al. 2017)."""

from __future__ import annotations

from typing import Any, Literal

import torch
from gymnasium import spaces
from lightning.pytorch import Trainer
from torch import Tensor

from lightning_rl import functional as rl
from lightning_rl.algorithms.base import OnPolicyAlgorithm
from lightning_rl.distributions import Distribution
from lightning_rl.nested import Nested
from lightning_rl.rollout import Batch, Rollout, check_minibatches
from lightning_rl.spaces import SpaceDict
from lightning_rl.validation import check, check_number, check_positive_int


class PPO(OnPolicyAlgorithm):
    """Proximal policy optimisation with a clipped surrogate objective (Schulman et al. 2017).

    From each rollout: generalised advantage estimates (Schulman et al. 2016), then `num_epochs` passes over its steps
    in `num_minibatches` random parts, each a gradient step on

        policy loss (equation 7) + value_coef · value loss - entropy_coef · entropy      (equation 9)

    Args:
        observation_space: Of one environment: a Gymnasium space, or its description by `space_to_dict`.
        action_space: Of one environment, likewise.
        num_epochs: Passes over each rollout.
        num_minibatches: Parts of each pass; must divide `num_envs * rollout_length`.
        gae_lambda: λ of the advantage estimates: 0 is one-step, 1 Monte Carlo.
        clip_range: ε: the importance ratio is clipped to [1 - ε, 1 + ε].
        clip_range_value: Clip the change of the value since the rollout to this; None does not.
        value_coef: Weight of the value loss ½(V - return)².
        entropy_coef: Weight of the entropy bonus.
        normalize_advantages: Over each `minibatch`, over the whole `rollout`, or `none`.
        target_kl: Make no further update from a rollout once the approximate KL divergence between the policy that
            collected it and the current one exceeds 1.5 times this; None never stops.
        **kwargs: Those of `OnPolicyAlgorithm`.

    Raises:
        ConfigurationError: A value is out of range; names field, value and what was expected.
    """

    def __init__(
        self,
        observation_space: spaces.Space[Any] | SpaceDict,
        action_space: spaces.Space[Any] | SpaceDict,
        *,
        num_epochs: int = 4,
        num_minibatches: int = 4,
        gae_lambda: float = 0.95,
        clip_range: float = 0.2,
        clip_range_value: float | None = None,
        value_coef: float = 0.5,
        entropy_coef: float = 0.0,
        normalize_advantages: Literal["minibatch", "rollout", "none"] = "minibatch",
        target_kl: float | None = None,
        **kwargs: Any,  # noqa: ANN401 - those of the base class
    ) -> None:
        super().__init__(observation_space, action_space, **kwargs)
        check_positive_int("num_epochs", num_epochs)
        check_positive_int("num_minibatches", num_minibatches)
        check_number("gae_lambda", gae_lambda, at_least=0, at_most=1)
        check_number("clip_range", clip_range, above=0)
        check_number("value_coef", value_coef, at_least=0)
        check_number("entropy_coef", entropy_coef, at_least=0)
        for name, value in (("clip_range_value", clip_range_value), ("target_kl", target_kl)):
            if value is not None:
                check_number(name, value, above=0)
        choices = ("minibatch", "rollout", "none")
        check(normalize_advantages in choices, "normalize_advantages", normalize_advantages, f"one of {choices}")
        self.num_epochs = num_epochs
        self.num_minibatches = num_minibatches
        self.gae_lambda = gae_lambda
        self.clip_range = clip_range
        self.clip_range_value = clip_range_value
        self.value_coef = value_coef
        self.entropy_coef = entropy_coef
        self.normalize_advantages = normalize_advantages
        self.target_kl = target_kl

    def check_run(self, trainer: Trainer, rollout_shape: tuple[int, int] | None) -> None:
        """Check, besides what every algorithm does, that the rollouts to come can be cut into minibatches."""
        super().check_run(trainer, rollout_shape)
        if rollout_shape is not None:
            memory = getattr(self.policy, "memory", None)
            num_sequences = None if memory is None else memory.num_sequences(rollout_shape)
            check_minibatches(rollout_shape[0] * rollout_shape[1], self.num_minibatches, num_sequences)

    def training_step(self, rollout: Rollout, batch_idx: int) -> None:
        """Learn from one rollout."""
        with self.learning(rollout):
            self.update(self.targets(rollout))

    def targets(self, rollout: Rollout, **per_step: Nested) -> Batch:
        """Return the steps of a rollout with advantages, returns, and more `[T, B, ...]` tensors beside them."""
        advantages = self.gae(rollout, self.gae_lambda)
        batch = rollout.flatten(advantages=advantages, returns=advantages + rollout.values, **per_step)
        self.diagnostics.observe(explained_variance=self.explained_variance(batch.values, batch.returns))
        if self.normalize_advantages == "rollout":
            batch = batch.replace(advantages=self.normalize(batch.advantages))
        return batch

    def update(self, batch: Batch) -> None:
        """Make all updates from the steps of one rollout."""
        for _ in range(self.num_epochs):
            for minibatch in self.minibatches(batch, self.num_minibatches):
                self.optimize(self.loss(minibatch))
                if self.diagnostics.known_closed:
                    return

    def loss(self, batch: Batch) -> Tensor:
        """Return the loss of equation 9 over a minibatch."""
        distribution, values = self.evaluate(batch)
        return self.actor_loss(batch, distribution) + self.critic_loss(batch, values)

    def actor_loss(self, batch: Batch, distribution: Distribution) -> Tensor:
        """Return the terms of the policy: surrogate loss (equation 7) - entropy_coef · entropy."""
        advantages = batch.advantages
        if self.normalize_advantages == "minibatch":
            advantages = self.normalize(advantages)
        log_ratios = distribution.log_prob(batch.actions) - batch.log_probs
        policy_loss = batch.mean(rl.clipped_surrogate_loss(log_ratios, advantages, self.clip_range))
        self.diagnostics.add(policy_loss=policy_loss)
        entropy = self.entropy(distribution, batch)
        self._observe(batch, log_ratios.detach())
        return policy_loss - self.entropy_coef * entropy

    def critic_loss(self, batch: Batch, values: Tensor) -> Tensor:
        """Return the term of the value: value_coef · value loss."""
        if self.clip_range_value is None:
            value_loss = batch.mean(rl.value_loss(values, batch.returns))
        else:
            value_loss = batch.mean(rl.clipped_value_loss(values, batch.returns, batch.values, self.clip_range_value))
        self.diagnostics.add(value_loss=value_loss)
        return self.value_coef * value_loss

    @torch.no_grad()
    def _observe(self, batch: Batch, log_ratios: Tensor) -> None:
        """Measure how far the policy has moved, and stop the updates from this rollout if that is too far."""
        approx_kl = batch.mean(rl.approx_kl_k3(log_ratios))
        self.diagnostics.observe(
            approx_kl=approx_kl,
            approx_kl_k1=batch.mean(rl.approx_kl_k1(log_ratios)),
            clip_fraction=batch.mean(rl.clip_indicator(log_ratios, self.clip_range).to(log_ratios.dtype)),
        )
        self.observe_first_ratios(log_ratios)
        if self.target_kl is not None:
            mean_kl = self.all_reduce(approx_kl) / self.trainer.world_size
            self.diagnostics.close_unless(mean_kl <= 1.5 * self.target_kl)

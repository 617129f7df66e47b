"""Proximal policy optimization (Schulman et al. 2017)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from lightning.pytorch import Trainer
from torch import Tensor

from lightning_rl import fast
from lightning_rl import functional as rl
from lightning_rl.algorithms.base import OnPolicyAlgorithm
from lightning_rl.options import OrDict, defaults_of
from lightning_rl.policies.distributions import Distribution
from lightning_rl.rollouts.batch import Batch, check_minibatches
from lightning_rl.rollouts.rollout import Rollout
from lightning_rl.spaces import SpaceOrDict
from lightning_rl.training.config import AdvantageConfig, ClippingConfig
from lightning_rl.training.loss import Loss
from lightning_rl.training.schedules import Scheduled
from lightning_rl.validation import NonNegativeFloat, PositiveInt, check

# Members of PPO that its loss uses.
READ_BY_LOSS = (
    *("actor_critic", "add_policy_terms", "surrogate_loss", "clip_fraction", "clip_ranges"),
    *("new_loss", "descend"),
)


class PPO(OnPolicyAlgorithm):
    """Proximal policy optimization with a clipped surrogate objective (Schulman et al. 2017).

    Each rollout gives generalized advantage estimates (Schulman et al. 2016). Then `num_epochs` passes over its steps,
    in `num_minibatches` random parts each, take gradient steps on

        policy loss (equation 7) + value_coef · value loss - entropy_coef · entropy      (equation 9)

    Args:
        num_epochs: Passes over each rollout.
        num_minibatches: Minibatches of each pass; must divide `num_envs * rollout_length`, or the number of sequences
            if the policy has memory.
        minibatch_size: Steps of each minibatch on each rank, in place of `num_minibatches`.
        gae_lambda: λ of the advantage estimates: 0 is one-step, 1 Monte Carlo. May be a schedule.
        clip_range: ε: the importance ratio is clipped to [1 - ε, 1 + ε]. None disables clipping. May be a schedule.
        value_coef: Weight of the value loss ½(V - return)².
        entropy_coef: Weight of the entropy bonus. May be a schedule.
        target_kl: Stop the updates from a rollout once the approximate KL divergence of the current policy from the one
            that collected it exceeds 1.5 times this. None never stops. May be a schedule.
        advantages: Computation of advantages and value targets; normalized over each minibatch by default.
        clipping: Further limits on how far one rollout may change policy and values.
        **kwargs: Options of `OnPolicyAlgorithm`.
    """

    def __init__(
        self,
        observation_space: SpaceOrDict,
        action_space: SpaceOrDict,
        *,
        num_epochs: PositiveInt = 4,
        num_minibatches: PositiveInt | None = 4,
        minibatch_size: PositiveInt | None = None,
        gae_lambda: Scheduled = 0.95,
        clip_range: Scheduled | None = 0.2,
        value_coef: NonNegativeFloat = 0.5,
        entropy_coef: Scheduled = 0.0,
        target_kl: Scheduled | None = None,
        advantages: OrDict[AdvantageConfig] = AdvantageConfig(normalize="minibatch"),
        clipping: OrDict[ClippingConfig] = ClippingConfig(),
        **kwargs: Any,  # options of the base class
    ) -> None:
        super().__init__(observation_space, action_space, advantages=advantages, **kwargs)
        self.num_epochs = num_epochs
        self.num_minibatches, self.minibatch_size = num_minibatches, minibatch_size
        if minibatch_size is None:
            check(num_minibatches is not None, "num_minibatches", None, "an integer, unless minibatch_size is set")
        else:
            default = defaults_of(type(self))["num_minibatches"]
            expected = f"None with minibatch_size={minibatch_size}"
            check(num_minibatches in (None, default), "num_minibatches", num_minibatches, expected)
        self.estimator.gae_lambda = self.scheduled(
            "gae_lambda", gae_lambda, at_least=0, at_most=1, owner=self.estimator
        )
        self.value_coef = value_coef
        self.entropy_coef = self.scheduled("entropy_coef", entropy_coef, at_least=0)

        def limit(name: str, option: str) -> float | None:
            value = self.options[option]
            return None if value is None else self.scheduled(name, value, above=0, option=option)

        self.clip_range = limit("clip_range", "clip_range")
        self.target_kl = limit("target_kl", "target_kl")
        self.clip_range_low = limit("clip_range_low", "clipping.low")
        self.clip_range_high = limit("clip_range_high", "clipping.high")
        self.clip_range_value = limit("clip_range_value", "clipping.value")
        self.log_prob_clip = self.options["clipping.log_prob"]
        self.dual_clip = self.options["clipping.dual"]
        self.value_huber_delta = self.options["clipping.value_huber_delta"]
        rollback = self.options["clipping.rollback"]
        check(not rollback or self.target_kl is not None, "clipping.rollback", rollback, "a target_kl beside it")
        self.steps.rollback = rollback

    def update(self, rollout: Rollout) -> None:
        batch = self.batch(rollout)
        for minibatch in self.minibatches(batch, self.num_epochs, self.num_minibatches_of(rollout.shape)):
            self.descend(self.loss, minibatch)

    def num_minibatches_of(self, shape: Sequence[int]) -> int:
        """Return the number of minibatches in a pass over this rank's rows of this shape, such as `[T, B]`."""
        if self.minibatch_size is not None:
            return max(1, math.prod(shape) // self.minibatch_size)
        assert self.num_minibatches is not None
        return self.num_minibatches

    @fast.closed_form(fast.PPOLoss, reads=READ_BY_LOSS)  # the same loss by formulas: edit both, or delete this line
    def loss(self, batch: Batch) -> Loss:
        """Return the loss of equation 9 over a minibatch.

        For small networks on the CPU, a closed form computes the same loss without calling this method, unless a
        subclass overrides it or a method it uses. To step through these lines, set `debug.fast_paths: none`.
        """
        distribution, values = self.actor_critic(batch)
        loss = self.new_loss(batch)
        self.add_policy_terms(loss, distribution)
        loss.add_value(values, self.value_coef, clip_range=self.clip_range_value, huber_delta=self.value_huber_delta)
        return loss

    def add_policy_terms(self, loss: Loss, distribution: Distribution) -> None:
        """Add surrogate loss and entropy bonus, log KL divergence and clip fraction, stop updates at `target_kl`.

        An override adds further terms after `super().add_policy_terms(loss, distribution)`.
        """
        batch, (low, high) = loss.batch, self.clip_ranges
        log_probs = distribution.log_prob(batch.actions)
        log_ratios = loss.log_ratios(log_probs)
        bounded = log_ratios
        if self.log_prob_clip is not None:
            bounded = log_probs.clamp(-self.log_prob_clip, self.log_prob_clip) - batch.log_probs
        advantages = self.estimator.normalized(batch)
        loss.add("policy_loss", self.surrogate_loss(bounded, advantages))
        loss.add_entropy(distribution.entropies(), self.entropy_coef)
        loss.observe(
            approx_kl=rl.approx_kl_k3(log_ratios.detach()),
            approx_kl_k1=rl.approx_kl_k1(log_ratios.detach()),
            clip_fraction=self.clip_fraction(batch, rl.clip_indicator(bounded, low, high)),
        )
        if self.target_kl is not None:
            loss.stop_above("approx_kl", 1.5 * self.target_kl)

    def surrogate_loss(self, log_ratios: Tensor, advantages: Tensor) -> Tensor:
        """Return the clipped surrogate loss of each row (equation 7), `[N]`; override it for another surrogate."""
        return rl.dual_clipped_surrogate_loss(log_ratios, advantages, *self.clip_ranges, self.dual_clip)

    def clip_fraction(self, batch: Batch, is_clipped: Tensor) -> Tensor:
        """Return the share of a minibatch's rows whose importance ratio is clipped: `is_clipped`, `[N]`, is 1."""
        return batch.mean(is_clipped)

    @property
    def clip_ranges(self) -> tuple[float, float]:
        """Largest distance of the importance ratio below and above 1; infinite without clipping."""
        both = math.inf if self.clip_range is None else self.clip_range
        low, high = self.clip_range_low, self.clip_range_high
        return both if low is None else low, both if high is None else high

    def check_run(self, trainer: Trainer, rollout_shape: tuple[int, int] | None) -> None:
        super().check_run(trainer, rollout_shape)
        if rollout_shape is not None:
            num_rows, num_minibatches = math.prod(rollout_shape), self.num_minibatches_of(rollout_shape)
            memory = getattr(self.policy, "memory", None)
            num_sequences = None if memory is None else memory.num_sequences(rollout_shape)
            if (size := self.minibatch_size) is not None:
                length = num_rows // (num_sequences or num_rows)
                expected = f"a divisor of the {num_rows} steps of a rollout"
                expected += f" and a multiple of the {length} steps of a sequence" if num_sequences else ""
                check(num_rows % size == size % length == 0, "minibatch_size", size, expected)
            check_minibatches(num_rows, num_minibatches, num_sequences)
            self.check_rows(num_rows * trainer.world_size, num_minibatches)

    def check_rows(self, num_rows: int, num_minibatches: int) -> None:
        """Raise a `ConfigurationError` if advantages are normalized over minibatches of one row of all ranks."""
        of_one_row = self.estimator.normalize == "minibatch" and num_rows == num_minibatches
        remedy = "fewer" if num_rows > 1 else "a rollout of more steps (num_envs, rollout_length)"
        expected = f"{remedy}, or advantages.normalize: none: the normalized advantage of a single step is 0"
        check(not of_one_row, "num_minibatches", num_minibatches, expected)

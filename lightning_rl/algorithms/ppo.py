"""Proximal policy optimization (Schulman et al. 2017)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Trainer
from torch import Tensor

from lightning_rl import fast
from lightning_rl import functional as rl
from lightning_rl.algorithms.base import OnPolicyAlgorithm
from lightning_rl.options import defaults_of
from lightning_rl.policies.distributions import Distribution
from lightning_rl.rollouts.batch import Batch, check_minibatches
from lightning_rl.rollouts.rollout import Rollout
from lightning_rl.spaces import SpaceOrDict
from lightning_rl.training.config import AdvantageConfig, AdvantageOptions, ClippingConfig, ClippingOptions
from lightning_rl.training.loss import Loss
from lightning_rl.training.schedules import Scheduled
from lightning_rl.validation import check, check_bool, check_number, check_positive_int

# Members of PPO that its loss uses.
READ_BY_LOSS = ("actor_critic", "add_policy_terms", "clip_fraction", "clip_ranges", "new_loss", "descend")


class PPO(OnPolicyAlgorithm):
    """Proximal policy optimisation with a clipped surrogate objective (Schulman et al. 2017).

    From each rollout: generalised advantage estimates (Schulman et al. 2016), then `num_epochs` passes over its steps
    in `num_minibatches` random parts, each a gradient step on

        policy loss (equation 7) + value_coef · value loss - entropy_coef · entropy      (equation 9)

    Options given as a number may be a schedule where it says so; see `lightning_rl.training.schedules.parse_schedule`.

    Args:
        observation_space: Of one environment: a Gymnasium space, or its description by `space_to_dict`.
        action_space: Of one environment, likewise.
        num_epochs: Passes over each rollout.
        num_minibatches: Minibatches of each pass; must divide `num_envs * rollout_length`, with memory the number of
            sequences.
        minibatch_size: Steps of each minibatch on each rank, in place of `num_minibatches`.
        gae_lambda: λ of the advantage estimates: 0 is one-step, 1 Monte Carlo. May be a schedule.
        clip_range: ε: the importance ratio is clipped to [1 - ε, 1 + ε]. None disables clipping. May be a schedule.
        value_coef: Weight of the value loss ½(V - return)².
        entropy_coef: Weight of the entropy bonus. May be a schedule.
        target_kl: Stop the updates from a rollout once the approximate KL divergence between the policy that collected
            it and the current one exceeds 1.5 times this. None never stops. May be a schedule.
        advantages: How advantages and value targets are computed; advantages are normalized over each minibatch by
            default.
        clipping: Further bounds of what one rollout may change.
        **kwargs: Options of `OnPolicyAlgorithm`.

    Raises:
        ConfigurationError: A value is out of range; names field, value and what was expected.
    """

    def __init__(
        self,
        observation_space: SpaceOrDict,
        action_space: SpaceOrDict,
        *,
        num_epochs: int = 4,
        num_minibatches: int | None = 4,
        minibatch_size: int | None = None,
        gae_lambda: Scheduled = 0.95,
        clip_range: Scheduled | None = 0.2,
        value_coef: float = 0.5,
        entropy_coef: Scheduled = 0.0,
        target_kl: Scheduled | None = None,
        advantages: AdvantageOptions = AdvantageConfig(normalize="minibatch"),
        clipping: ClippingOptions = ClippingConfig(),
        **kwargs: Any,  # noqa: ANN401 - options of the base class
    ) -> None:
        super().__init__(observation_space, action_space, advantages=advantages, **kwargs)
        self.take_options(
            num_epochs=num_epochs,
            num_minibatches=num_minibatches,
            minibatch_size=minibatch_size,
            value_coef=value_coef,
            target_kl=target_kl,
            clipping=clipping,
        )
        check_ppo_options(self.options, defaults_of(type(self))["num_minibatches"])
        self.num_epochs, self.num_minibatches, self.minibatch_size = num_epochs, num_minibatches, minibatch_size
        self.estimator.gae_lambda = self.scheduled(
            "gae_lambda", gae_lambda, at_least=0, at_most=1, owner=self.estimator
        )
        self.clip_range = self.scheduled_or_none("clip_range", clip_range, above=0)
        self.clip_range_low = self._clip("clip_range_low", "clipping.low")
        self.clip_range_high = self._clip("clip_range_high", "clipping.high")
        self.clip_range_value = self._clip("clip_range_value", "clipping.value")
        self.log_prob_clip, self.dual_clip = self.options["clipping.log_prob"], self.options["clipping.dual"]
        self.value_huber_delta, self.value_coef = self.options["clipping.value_huber_delta"], value_coef
        self.entropy_coef = self.scheduled("entropy_coef", entropy_coef, at_least=0)
        self.target_kl = self.scheduled_or_none("target_kl", target_kl, above=0)
        self.steps.takes_back = self.options["clipping.rollback"]

    def _clip(self, name: str, option: str) -> float | None:
        return self.scheduled_or_none(name, self.options[option], above=0, option=option)

    def update(self, rollout: Rollout) -> None:
        """Algorithm 1: several passes of minibatch steps over one rollout."""
        batch = self.batch(rollout)
        for minibatch in self.minibatches(batch, self.num_epochs, self.parts_of(rollout)):
            self.descend(self.loss, minibatch)

    def parts_of(self, rollout: Rollout) -> int:
        """Return the number of minibatches of each pass over a rollout."""
        return self.parts_of_rows(math.prod(rollout.shape))

    def parts_of_rows(self, num_rows: int) -> int:
        """Return the number of minibatches that so many rows of this rank are cut into."""
        if self.minibatch_size is None:
            assert self.num_minibatches is not None
            return self.num_minibatches
        return max(1, num_rows // self.minibatch_size)

    @fast.closed_form(fast.PPOLoss, reads=READ_BY_LOSS)  # the same loss by formulas: edit both, or delete this line
    def loss(self, batch: Batch) -> Loss:
        """Return the loss of equation 9 over a minibatch.

        With `debug.fast_paths: auto`, the default, the closed form computes two small networks on a CPU instead: set it
        to `none` to step through these lines. A subclass that overrides them, or what they call, is never passed over.
        """
        distribution, values = self.actor_critic(batch)
        loss = self.new_loss(batch)
        self.add_policy_terms(loss, distribution)
        loss.add_value(values, self.value_coef, clip_range=self.clip_range_value, huber_delta=self.value_huber_delta)
        return loss

    def add_policy_terms(self, loss: Loss, distribution: Distribution) -> None:
        """Add the surrogate loss (equation 7) and the entropy bonus; override it to add further terms.

        Args:
            loss: Over a minibatch.
            distribution: Of its actions, by the current parameters.
        """
        batch, (low, high) = loss.batch, self.clip_ranges
        log_probs = distribution.log_prob(batch.actions)
        log_ratios = clipped = loss.log_ratios(log_probs)
        if self.log_prob_clip is not None:
            clipped = log_probs.clamp(-self.log_prob_clip, self.log_prob_clip) - batch.log_probs
        advantages = self.estimator.normalized(batch)
        loss.add("policy_loss", rl.dual_clipped_surrogate_loss(clipped, advantages, low, high, self.dual_clip))
        loss.add_entropy(distribution.entropies(), self.entropy_coef)
        moved = log_ratios.detach()
        loss.observe(
            approx_kl=rl.approx_kl_k3(moved),
            approx_kl_k1=rl.approx_kl_k1(moved),
            clip_fraction=self.clip_fraction(batch, rl.clip_indicator(clipped, low, high)),
        )
        if self.target_kl is not None:
            loss.stop_above("approx_kl", 1.5 * self.target_kl)

    def clip_fraction(self, batch: Batch, is_clipped: Tensor) -> Tensor:
        """Return the share of a minibatch whose importance ratio is clipped: where `is_clipped`, `[N]`, is 1."""
        return batch.mean(is_clipped)

    @property
    def clip_ranges(self) -> tuple[float, float]:
        """How far below and above 1 the importance ratio may be; infinite where it is not clipped."""
        both = math.inf if self.clip_range is None else self.clip_range
        low, high = self.clip_range_low, self.clip_range_high
        return both if low is None else low, both if high is None else high

    def check_run(self, trainer: Trainer, rollout_shape: tuple[int, int] | None) -> None:
        """Check, besides what every algorithm does, that the rollouts to come can be cut into minibatches."""
        super().check_run(trainer, rollout_shape)
        memory = getattr(self.policy, "memory", None)
        if rollout_shape is not None:
            num_sequences = None if memory is None else memory.num_sequences(rollout_shape)
            num_rows = math.prod(rollout_shape)
            if (size := self.minibatch_size) is not None:
                expected = f"a divisor of the {num_rows} steps of a rollout"
                check(num_rows % size == 0, "minibatch_size", size, expected)
            check_minibatches(num_rows, self.parts_of_rows(num_rows), num_sequences)
            self.check_rows(num_rows * trainer.world_size, self.parts_of_rows(num_rows))

    def check_rows(self, num_rows: int, num_minibatches: int) -> None:
        """Raise where minibatches of so many rows of all ranks have nothing to learn.

        Raises:
            ConfigurationError: Each has a single one, and normalizes its advantage.
        """
        of_one_row = self.estimator.normalize == "minibatch" and num_rows == num_minibatches
        remedy = "fewer" if num_rows > 1 else "a rollout of more steps (num_envs, rollout_length)"
        expected = f"{remedy}, or advantages.normalize: none: the normalized advantage of a single step is 0"
        check(not of_one_row, "num_minibatches", num_minibatches, expected)


def check_ppo_options(given: Mapping[str, Any], num_minibatches: int) -> None:
    """Check the options of PPO by themselves and against each other.

    Args:
        given: Options by full name.
        num_minibatches: Default of this option.

    Raises:
        ConfigurationError: One of them is out of range, or has no meaning beside another.
    """
    check_positive_int("num_epochs", given["num_epochs"])
    if given["minibatch_size"] is None:
        check_positive_int("num_minibatches", given["num_minibatches"])
    else:
        check_positive_int("minibatch_size", given["minibatch_size"])
        count, size = given["num_minibatches"], given["minibatch_size"]
        check(count in (None, num_minibatches), "num_minibatches", count, f"None beside minibatch_size={size}")
    check_number("value_coef", given["value_coef"], at_least=0)
    for name, bound in (("log_prob", 0), ("dual", 1), ("value_huber_delta", 0)):
        if given[f"clipping.{name}"] is not None:
            check_number(f"clipping.{name}", given[f"clipping.{name}"], above=bound)
    rollback = given["clipping.rollback"]
    check_bool("clipping.rollback", rollback)
    check(not rollback or given["target_kl"] is not None, "clipping.rollback", rollback, "a target_kl beside it")

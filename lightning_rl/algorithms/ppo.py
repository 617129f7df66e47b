"""Proximal policy optimization (Schulman et al. 2017)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from gymnasium import spaces
from lightning.pytorch import Trainer
from torch import Tensor

from lightning_rl import fast
from lightning_rl import functional as rl
from lightning_rl.algorithms.base import OnPolicyAlgorithm
from lightning_rl.policies.distributions import Distribution
from lightning_rl.rollouts.batch import Batch, check_minibatches
from lightning_rl.rollouts.rollout import Rollout
from lightning_rl.spaces import SpaceDict
from lightning_rl.training.loss import Loss
from lightning_rl.training.optimizers import AdaptiveLearningRate
from lightning_rl.training.parameter_groups import check_critic
from lightning_rl.training.schedules import Scheduled
from lightning_rl.validation import check, check_bool, check_number, check_positive_int, is_int, is_one_of

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
        num_value_epochs: Passes of the value loss, if not as many: the first ones are joint, those that only one of
            the two losses has left are without the other. With a shared encoder each of them changes that.
        num_minibatches: Parts of each pass; must divide `num_envs * rollout_length`, with `memory` the number of
            sequences.
        gae_lambda: λ of the advantage estimates: 0 is one-step, 1 Monte Carlo. May be a schedule.
        clip_range: ε: the importance ratio is clipped to [1 - ε, 1 + ε]; None does not clip it. May be a schedule.
        clip_range_low: ε of the lower bound, if it is another one. May be a schedule.
        clip_range_high: ε of the upper bound, if it is another one. May be a schedule.
        log_prob_clip: Clip the log-probabilities of the current policy, not those of the one that acted, to ± this in
            the importance ratio; None does not.
        dual_clip: Where the advantage A is negative, count at least this times A (Ye et al. 2020); above 1, None does
            not.
        clip_range_value: Clip the change of the value since the rollout to this; None does not. May be a schedule.
        value_huber_delta: Errors of the value above this count on a line (Huber loss) rather than squared; None: none.
        value_coef: Weight of the value loss ½(V - return)².
        entropy_coef: Weight of the entropy bonus. May be a schedule.
        normalize_advantages: Over each `minibatch`, over the whole `rollout`, or `none`.
        recompute_advantages: Before each pass but the first, estimate values, advantages and returns anew with the
            critic as it is then.
        target_kl: Make no further update from a rollout once the approximate KL divergence between the policy that
            collected it and the current one exceeds 1.5 times this; None never stops. May be a schedule.
        kl_rollback: After each update look at the divergence on its own minibatch, and take the update back if it
            exceeds that bound, parameters and state of the optimisers; no further one follows.
        adaptive_learning_rate: `{"target_kl": d}`: after each rollout, divide the learning rate by `factor` (1.5) if
            the mean approximate KL divergence is above 2d, multiply it by that if it is below d/2, and keep it between
            `minimum` (1e-6) and `maximum` (1e-2). Of two optimisers it is that of the actor.
        critic_warmup_steps: In rollouts that begin before this many environment steps only the value is learned, by
            what is the critic's alone, so that the policy stays what it was loaded as; in `num_value_epochs` passes.
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
        num_value_epochs: int | None = None,
        num_minibatches: int = 4,
        gae_lambda: Scheduled = 0.95,
        clip_range: Scheduled | None = 0.2,
        clip_range_low: Scheduled | None = None,
        clip_range_high: Scheduled | None = None,
        log_prob_clip: float | None = None,
        dual_clip: float | None = None,
        clip_range_value: Scheduled | None = None,
        value_huber_delta: float | None = None,
        value_coef: float = 0.5,
        entropy_coef: Scheduled = 0.0,
        normalize_advantages: Literal["minibatch", "rollout", "none"] = "minibatch",
        recompute_advantages: bool = False,
        target_kl: Scheduled | None = None,
        kl_rollback: bool = False,
        adaptive_learning_rate: dict[str, float] | None = None,
        critic_warmup_steps: int = 0,
        **kwargs: Any,  # noqa: ANN401 - those of the base class
    ) -> None:
        super().__init__(observation_space, action_space, **kwargs)
        check_settings(self.hparams)
        self.num_epochs, self.num_minibatches = num_epochs, num_minibatches
        self.estimator.gae_lambda = self.scheduled(
            "gae_lambda", gae_lambda, at_least=0, at_most=1, owner=self.estimator
        )
        self.estimator.normalize, self.estimator.renews = normalize_advantages, recompute_advantages
        self.clip_range = self.scheduled_or_none("clip_range", clip_range, above=0)
        self.clip_range_low = self.scheduled_or_none("clip_range_low", clip_range_low, above=0)
        self.clip_range_high = self.scheduled_or_none("clip_range_high", clip_range_high, above=0)
        self.log_prob_clip, self.dual_clip = log_prob_clip, dual_clip
        self.clip_range_value = self.scheduled_or_none("clip_range_value", clip_range_value, above=0)
        self.value_huber_delta, self.value_coef = value_huber_delta, value_coef
        self.entropy_coef = self.scheduled("entropy_coef", entropy_coef, at_least=0)
        self.target_kl = self.scheduled_or_none("target_kl", target_kl, above=0)
        if critic_warmup_steps:
            check_critic(self.policy, "critic_warmup_steps", critic_warmup_steps)
        self.steps.num_value_epochs, self.steps.critic_warmup_steps = num_value_epochs, critic_warmup_steps
        self.steps.takes_back = kl_rollback
        if adaptive_learning_rate is not None:
            self.steps.adaptive_learning_rate = AdaptiveLearningRate(**adaptive_learning_rate)

    def update(self, rollout: Rollout) -> None:
        """Algorithm 1: several passes of minibatch steps over one rollout."""
        batch = self.batch(rollout)
        for minibatch in self.minibatches(batch, self.num_epochs, self.num_minibatches):
            self.descend(self.loss, minibatch)

    @fast.closed_form(fast.PPOLoss, reads=READ_BY_LOSS)  # the same loss by formulas: edit both, or delete this line
    def loss(self, batch: Batch) -> Loss:
        """Return the loss of equation 9 over a minibatch.

        With `fast_paths: auto`, the default, the closed form computes two small networks on a CPU instead: set it to
        `off` to step through these lines. A subclass that overrides them, or what they call, is never passed over.
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
            num_rows = rollout_shape[0] * rollout_shape[1]
            check_minibatches(num_rows, self.num_minibatches, num_sequences)
            self.check_rows(num_rows * trainer.world_size)

    def check_rows(self, num_rows: int) -> None:
        """Raise where minibatches of so many rows of all ranks have nothing to learn.

        Raises:
            ConfigurationError: Each has a single one, and normalizes its advantage.
        """
        of_one_row = self.estimator.normalize == "minibatch" and num_rows == self.num_minibatches
        remedy = "fewer" if num_rows > 1 else "a rollout of more steps (num_envs, rollout_length)"
        expected = f"{remedy}, or normalize_advantages: none: the normalised advantage of a single step is 0"
        check(not of_one_row, "num_minibatches", self.num_minibatches, expected)


_SETS_THE_RATE = ("anneal_learning_rate", "lr_scheduler")


def check_settings(given: Mapping[str, Any]) -> None:
    """Check options by themselves and against each other.

    Raises:
        ConfigurationError: One of them is out of range, or has no meaning beside another.
    """
    check_positive_int("num_epochs", given["num_epochs"])
    check_positive_int("num_minibatches", given["num_minibatches"])
    if given["num_value_epochs"] is not None:
        check_positive_int("num_value_epochs", given["num_value_epochs"])
    warmup = given["critic_warmup_steps"]
    check(is_int(warmup) and warmup >= 0, "critic_warmup_steps", warmup, "an integer of at least 0")
    check_number("value_coef", given["value_coef"], at_least=0)
    for name, bound in (("log_prob_clip", 0), ("dual_clip", 1), ("value_huber_delta", 0)):
        if given[name] is not None:
            check_number(name, given[name], above=bound)
    choices, choice = ("minibatch", "rollout", "none"), given["normalize_advantages"]
    check(is_one_of(choice, choices), "normalize_advantages", choice, f"one of {choices}")
    for name in ("recompute_advantages", "kl_rollback"):
        check_bool(name, given[name])
    check(not given["kl_rollback"] or given["target_kl"] is not None, "kl_rollback", True, "a target_kl beside it")
    if (adaptive := given["adaptive_learning_rate"]) is not None:
        _check_adaptive(adaptive)
        others = [name for name in _SETS_THE_RATE if given[name]]
        others += ["learning_rate, a schedule,"] if isinstance(given["learning_rate"], dict) else []
        check(not others, "adaptive_learning_rate", adaptive, f"null, since {' and '.join(others)} is given")


def _check_adaptive(adaptive: Any) -> None:  # noqa: ANN401 - it is checked here
    field, known = "adaptive_learning_rate", ("target_kl", "factor", "minimum", "maximum")
    valid = isinstance(adaptive, Mapping) and "target_kl" in adaptive and {*adaptive} <= {*known}
    check(valid, field, adaptive, f"target_kl and, if needed, {', '.join(known[1:])}")
    check_number(f"{field}: target_kl", adaptive["target_kl"], above=0)
    check_number(f"{field}: factor", adaptive.get("factor", 1.5), above=1)
    minimum = adaptive.get("minimum", 1e-6)
    check_number(f"{field}: minimum", minimum, above=0)
    check_number(f"{field}: maximum", adaptive.get("maximum", 1e-2), at_least=minimum)

"""Proximal policy optimisation (Schulman et al. 2017)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from gymnasium import spaces
from lightning.pytorch import Trainer
from torch import Tensor, nn

from lightning_rl import fast
from lightning_rl import functional as rl
from lightning_rl.algorithms import overlapped_ppo
from lightning_rl.algorithms.base import OnPolicyAlgorithm
from lightning_rl.policies.distributions import Distribution
from lightning_rl.rollouts.batch import Batch, check_minibatches
from lightning_rl.rollouts.rollout import Rollout
from lightning_rl.spaces import SpaceDict
from lightning_rl.training.optimization import AdaptiveLearningRate, StepOutput
from lightning_rl.training.parameter_groups import ActorOrCritic, check_critic, parameters_of_policy
from lightning_rl.training.schedules import Scheduled
from lightning_rl.validation import check, check_bool, check_number, check_positive_int, is_int, is_one_of

Range = Tensor | float
"""What a schedule may change: compiled functions are given tensors, since numbers would be compiled in."""


class PolicyRows(NamedTuple):
    """What came of the policy's part, `[N]` each; only the losses have a gradient.

    Attributes:
        losses: Surrogate loss.
        log_ratios: Logarithm of the importance ratio, of log-probabilities that are not clipped.
        approx_kl: Estimate k3 of the divergence, likewise.
        is_clipped: 1 where the importance ratio is outside of its range, else 0.
    """

    losses: Tensor
    log_ratios: Tensor
    approx_kl: Tensor
    is_clipped: Tensor


def policy_rows(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    low: Range,
    high: Range,
    log_prob_clip: float | None,
    dual_clip: float | None,
) -> PolicyRows:
    """Return the surrogate loss of each row, and how far the policy has moved there.

    Args:
        log_probs: Of the current policy, `[N]`.
        old_log_probs: Of the one that acted.
        advantages: Likewise.
        low: How far below 1 the importance ratio may be.
        high: How far above.
        log_prob_clip: Bound on the absolute value of `log_probs`.
        dual_clip: See `PPO`.
    """
    log_ratios = in_loss = log_probs - old_log_probs
    if log_prob_clip is not None:
        in_loss = log_probs.clamp(-log_prob_clip, log_prob_clip) - old_log_probs
    losses = rl.dual_clipped_surrogate_loss(in_loss, advantages, low, high, dual_clip)
    changes, log_ratios = in_loss.detach().expm1(), log_ratios.detach()
    is_clipped = ((changes < -low) | (changes > high)).to(log_ratios.dtype)
    return PolicyRows(losses, log_ratios, rl.approx_kl_k3(log_ratios), is_clipped)


def value_rows(
    values: Tensor, returns: Tensor, old_values: Tensor, limit: Range | None, huber_delta: float | None
) -> Tensor:
    """Return the value loss of each row.

    Args:
        values: By the current critic, `[N]`.
        returns: To be predicted.
        old_values: By the critic at the time of the rollout.
        limit: Bound on the change since then; None: none.
        huber_delta: See `PPO`.
    """
    error: Callable[[Tensor, Tensor], Tensor] = rl.value_loss
    if huber_delta is not None:
        error = partial(rl.huber_value_loss, delta=huber_delta)
    losses = error(values, returns)
    if limit is None:
        return losses
    change = (values - old_values).clamp(-limit, limit)  # type: ignore[arg-type]
    return torch.maximum(losses, error(old_values + change, returns))


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function compiled by `torch.compile`: once in a process, for all models."""
    return torch.compile(function, fullgraph=True)


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
    for name in ("recompute_advantages", "kl_rollback", "compile_loss", "overlapped"):
        check_bool(name, given[name])
    check(not given["kl_rollback"] or given["target_kl"] is not None, "kl_rollback", True, "a target_kl beside it")
    if given["overlapped"]:
        _check_overlapped(given)
    if (adaptive := given["adaptive_learning_rate"]) is not None:
        _check_adaptive(adaptive)
        others = [name for name in _SETS_THE_RATE if given[name]]
        others += ["learning_rate, a schedule,"] if isinstance(given["learning_rate"], dict) else []
        check(not others, "adaptive_learning_rate", adaptive, f"null, since {' and '.join(others)} is given")


def _check_overlapped(given: Mapping[str, Any]) -> None:
    whose = "beside overlapped: targets are those of V-trace, from the current values"
    for name, only in (("advantage_estimator", "gae"), ("value_target", "td_lambda"), ("recompute_values", False)):
        check(given[name] == only, name, given[name], f"{only!r} {whose}")
    name, only = "update_normalizers", "after"
    check(given[name] == only, name, given[name], f"{only!r} beside overlapped, which needs the policy as it was")


def _check_adaptive(adaptive: Any) -> None:  # noqa: ANN401 - it is checked here
    field, known = "adaptive_learning_rate", ("target_kl", "factor", "minimum", "maximum")
    valid = isinstance(adaptive, Mapping) and "target_kl" in adaptive and {*adaptive} <= {*known}
    check(valid, field, adaptive, f"target_kl and, if needed, {', '.join(known[1:])}")
    check_number(f"{field}: target_kl", adaptive["target_kl"], above=0)
    check_number(f"{field}: factor", adaptive.get("factor", 1.5), above=1)
    minimum = adaptive.get("minimum", 1e-6)
    check_number(f"{field}: minimum", minimum, above=0)
    check_number(f"{field}: maximum", adaptive.get("maximum", 1e-2), at_least=minimum)


T = TypeVar("T")
# Members of PPO that its loss uses; `optimize` takes the result.
READ_BY_LOSS = (
    *("actor_terms", "value_loss", "penalties", "clip_fraction", "evaluate", "entropy", "total"),
    *("normalize_values", "normalizes_minibatches", "optimize"),
)


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
        compile_loss: Compile what is computed for each row, from log-probabilities and values on, by `torch.compile`.
            The first update then waits for the compiler, and needs one; see docs/algorithms/ppo.md.
        critic_warmup_steps: In rollouts that begin before this many environment steps only the value is learned, by
            what is the critic's alone, so that the policy stays what it was loaded as; in `num_value_epochs` passes.
        overlapped: Learn from rollouts of earlier versions of the policy too, those of asynchronous actors
            (`num_actors` of the data): V-trace makes advantages and returns from the current values, with the
            importance weights of the policy at the beginning of the updates, bounded by 1, and the ratio that is
            clipped is to that policy.
        **kwargs: Those of `OnPolicyAlgorithm`.

    Raises:
        ConfigurationError: A value is out of range; names field, value and what was expected.
    """

    can_overlap = True
    """Whether `overlapped` is an option here."""

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
        compile_loss: bool = False,
        critic_warmup_steps: int = 0,
        overlapped: bool = False,
        **kwargs: Any,  # noqa: ANN401 - those of the base class
    ) -> None:
        super().__init__(observation_space, action_space, **kwargs)
        check_settings(self.hparams)
        self.num_epochs = num_epochs
        self.num_value_epochs = num_epochs if num_value_epochs is None else num_value_epochs
        self.num_minibatches = num_minibatches
        self.gae_lambda = self.scheduled("gae_lambda", gae_lambda, at_least=0, at_most=1)
        self.clip_range = self.scheduled_or_none("clip_range", clip_range, above=0)
        self.clip_range_low = self.scheduled_or_none("clip_range_low", clip_range_low, above=0)
        self.clip_range_high = self.scheduled_or_none("clip_range_high", clip_range_high, above=0)
        self.log_prob_clip = log_prob_clip
        self.dual_clip = dual_clip
        self.clip_range_value = self.scheduled_or_none("clip_range_value", clip_range_value, above=0)
        self.value_huber_delta = value_huber_delta
        self.value_coef = value_coef
        self.entropy_coef = self.scheduled("entropy_coef", entropy_coef, at_least=0)
        self.normalize_advantages = normalize_advantages
        self.recompute_advantages = recompute_advantages
        self.target_kl = self.scheduled_or_none("target_kl", target_kl, above=0)
        self.kl_rollback = kl_rollback
        self.compile_loss = compile_loss
        self.adaptive_learning_rate = None
        if adaptive_learning_rate is not None:
            self.adaptive_learning_rate = AdaptiveLearningRate(**adaptive_learning_rate)
        if critic_warmup_steps:
            check_critic(self.policy, "critic_warmup_steps", critic_warmup_steps)
        self.critic_warmup_steps = critic_warmup_steps
        check(not overlapped or self.can_overlap, "overlapped", overlapped, f"false with {type(self).__name__}")
        self.overlapped = self.corrects_for_lag = overlapped

    def check_run(self, trainer: Trainer, rollout_shape: tuple[int, int] | None) -> None:
        """Check, besides what every algorithm does, that the rollouts to come can be cut into minibatches."""
        super().check_run(trainer, rollout_shape)
        if rollout_shape is not None:
            memory = getattr(self.policy, "memory", None)
            num_sequences = None if memory is None else memory.num_sequences(rollout_shape)
            num_rows = rollout_shape[0] * rollout_shape[1]
            check_minibatches(num_rows, self.num_minibatches, num_sequences)
            self.check_rows(num_rows * trainer.world_size)
        on_xla = trainer.strategy.root_device.type == "xla"
        check(not (self.compile_loss and on_xla), "compile_loss", True, "false on XLA, which compiles by itself")

    def check_rows(self, num_rows: int) -> None:
        """Raise where minibatches of so many rows of all ranks have nothing to learn.

        Raises:
            ConfigurationError: Each has a single one, and normalises its advantage.
        """
        of_one_row = self.normalizes_minibatches and num_rows == self.num_minibatches
        remedy = "fewer" if num_rows > 1 else "a rollout of more steps (num_envs, rollout_length)"
        expected = f"{remedy}, or normalize_advantages: none: the normalised advantage of a single step is 0"
        check(not of_one_row, "num_minibatches", self.num_minibatches, expected)

    def observe_loss(self, rollout: Rollout | Batch) -> None:
        """Compute the loss over a rollout as it is seen now, or over rows of one."""
        super().observe_loss(self.reevaluate(rollout) if isinstance(rollout, Rollout) else rollout)

    @property
    def is_warming_up(self) -> bool:
        """Whether only the value is learned yet."""
        return self.env_steps < self.critic_warmup_steps

    @property
    def num_passes(self) -> int:
        """How many passes the updates from a rollout make: of the policy's loss, of that of the value, or of both."""
        return self.num_value_epochs if self.is_warming_up else max(self.num_epochs, self.num_value_epochs)

    @property
    def normalizes_minibatches(self) -> bool:
        """Whether the advantages of each minibatch are normalised for themselves."""
        return self.normalize_advantages == "minibatch"

    def frozen_parameters(self, only: ActorOrCritic | None) -> list[nn.Parameter]:
        """Return those that an update leaves as they are: all that actions depend on, while the critic warms up."""
        return parameters_of_policy(self.policy) if self.is_warming_up else super().frozen_parameters(only)

    def training_step(self, rollout: Rollout, batch_idx: int) -> StepOutput:
        """Learn from one rollout, and return the losses."""
        with self.learning(rollout):
            rollout = self.reevaluate(rollout)
            self.update(rollout, self.targets(rollout))
        return {"losses": self.losses}

    def reevaluate(self, rollout: Rollout) -> Rollout:
        """Return a rollout as the current policy sees it, where an earlier one may have collected it."""
        if not self.overlapped:
            return rollout
        rollout = overlapped_ppo.reevaluate(self, rollout)
        assert rollout.log_rhos is not None
        self.diagnostics.observe(importance_weight=overlapped_ppo.mean_weight(self, rollout, rollout.log_rhos))
        return rollout

    def advantages_and_returns(self, rollout: Rollout) -> tuple[Tensor, Tensor]:
        """Return advantages and value targets `[T, B]`; by V-trace of a rollout that `reevaluate` has returned."""
        if rollout.log_rhos is None:
            return super().advantages_and_returns(rollout)
        return overlapped_ppo.vtrace(self, rollout, rollout.log_rhos)

    def update(self, rollout: Rollout, batch: Batch) -> None:
        """Make passes of gradient steps over a batch, unless they are stopped.

        Args:
            rollout: That the batch is made of.
            batch: What `targets` made of it.
        """
        batch = self.prepare_batch(batch)
        num_passes = self.num_passes
        for epoch in range(num_passes):
            if epoch > 0 and self.recompute_advantages:
                batch = self.prepare_batch(self.with_new_targets(batch, rollout))
            only = self._half(epoch)
            for minibatch in self.minibatches(batch, self.num_minibatches):
                keep_if = partial(self._is_close, minibatch) if self.kl_rollback and only != "critic" else None
                self.optimize(self.engine.loss(self, minibatch, only), only=only, keep_if=keep_if)
                if self.diagnostics.stopped:
                    return
            if epoch in (0, num_passes - 1):
                self.log_histograms(batch, "first_epoch" if epoch == 0 else "last_epoch")

    @fast.closed_form(fast.PPOLoss, reads=READ_BY_LOSS)  # the same loss by formulas: edit both, or delete this line
    def loss(self, batch: Batch, only: ActorOrCritic | None = None) -> Tensor:
        """Return the loss of equation 9 over a minibatch; it needs no Trainer.

        Args:
            batch: The minibatch.
            only: The half of the network to learn, whose terms there are then; None: both.
        """
        distribution, values = self.evaluate(batch)
        terms: list[Tensor] = []
        if only != "critic":
            terms += self.actor_terms(batch, distribution)
        if only != "actor":
            terms += [self.value_coef * self.value_loss(batch, values)]
        return self.total(*terms)

    def actor_terms(self, batch: Batch, distribution: Distribution) -> Sequence[Tensor]:
        """Return the terms about the policy: surrogate loss (equation 7), entropy bonus and penalties, if any.

        Args:
            batch: The minibatch.
            distribution: Of its actions, by the current parameters.
        """
        advantages = self.normalized_advantages(batch) if self.normalizes_minibatches else batch.advantages
        log_probs = distribution.log_prob(batch.actions)
        low, high = self.clip_ranges
        inputs = (log_probs, batch.log_probs, advantages, self._range(low), self._range(high))
        rows = self._compiled(policy_rows)(*inputs, self.log_prob_clip, self.dual_clip)
        if not self.overlapped:  # which begins with 1 by itself
            self.observe_first_ratios(rows.log_ratios)
        policy_loss = batch.mean(rows.losses)
        self.diagnostics.add(policy_loss=policy_loss)
        entropy = self.entropy(distribution, batch)
        with torch.no_grad():
            approx_kl = batch.mean(rows.approx_kl)
            self.diagnostics.observe(
                approx_kl=approx_kl,
                approx_kl_k1=batch.mean(rl.approx_kl_k1(rows.log_ratios)),
                clip_fraction=self.clip_fraction(batch, rows.is_clipped),
            )
            self.stop_unless_close(approx_kl)
        bonus = [-self.entropy_coef * entropy] if self.entropy_coef else []
        return [policy_loss, *bonus, *self.penalties(batch, distribution)]

    def value_loss(self, batch: Batch, values: Tensor) -> Tensor:
        """Return the loss of values `[N]`, squared or Huber's, clipped or not."""
        values, returns, old_values = self.normalize_values(values, batch.returns, batch.values)
        limit = None if self.clip_range_value is None else self._range(self.clip_range_value)
        losses = self._compiled(value_rows)(values, returns, old_values, limit, self.value_huber_delta)
        value_loss = batch.mean(losses)
        self.diagnostics.add(value_loss=value_loss)
        return value_loss

    def penalties(self, batch: Batch, distribution: Distribution) -> Sequence[Tensor]:
        """Return further terms of the loss over a minibatch, scalars; there are none here.

        Args:
            batch: The minibatch.
            distribution: Of its actions, by the current parameters.
        """
        return ()

    @property
    def clip_ranges(self) -> tuple[float, float]:
        """How far below and above 1 the importance ratio may be; infinite where it is not clipped."""
        both = math.inf if self.clip_range is None else self.clip_range
        low, high = self.clip_range_low, self.clip_range_high
        return both if low is None else low, both if high is None else high

    def clip_fraction(self, batch: Batch, is_clipped: Tensor) -> Tensor:
        """Return the share of a minibatch whose importance ratio is clipped.

        Args:
            batch: The minibatch.
            is_clipped: 1 where it is, else 0, `[N]`.
        """
        return batch.mean(is_clipped)

    def after_updates(self, means: dict[str, float]) -> None:
        """Adapt the learning rate to the divergence, the same on every rank."""
        if self.adaptive_learning_rate is not None and "approx_kl" in means:
            mean_kl = self.average_over_ranks(torch.tensor(means["approx_kl"], device=self.device))
            self.adaptive_learning_rate.adapt(self.optimizer.optimizer, float(mean_kl))

    def prepare_batch(self, batch: Batch) -> Batch:
        """Return a batch as its minibatches are cut from it, with advantages normalised over all of it if so wanted."""
        if self.normalize_advantages != "rollout":
            return batch
        return batch.replace(advantages=self.normalized_advantages(batch))

    def _compiled(self, function: Callable[..., T]) -> Callable[..., T]:
        """Return a function of rows as `compile_loss` wants it; what has no gradient is not worth compiling."""
        return compiled(function) if self.compile_loss and torch.is_grad_enabled() else function

    def _range(self, value: float) -> Tensor | float:
        """Return a number as `_compiled` functions take it: what changes must not be compiled in."""
        # In float64, whose sums with other numbers are those of Python's; beside other tensors it has no say in dtypes.
        return torch.tensor(value, dtype=torch.float64) if self.compile_loss and torch.is_grad_enabled() else value

    def _half(self, epoch: int) -> ActorOrCritic | None:
        """Return the half of the network that a pass is about; None: both."""
        if self.is_warming_up or epoch >= self.num_epochs:
            return "critic"
        return "actor" if epoch >= self.num_value_epochs else None

    def stop_unless_close(self, approx_kl: Tensor) -> None:
        """Stop the updates from this rollout if the divergence on a minibatch is beyond what `target_kl` allows."""
        if self.target_kl is not None:
            self.diagnostics.stop_unless(self._allows(approx_kl, self.target_kl))

    def _is_close(self, batch: Batch) -> Tensor:
        """Return whether the policy, as it is now, is as close to the one of the rollout as `target_kl` asks."""
        assert self.target_kl is not None
        distribution, _ = self.evaluate(batch)
        log_ratios = distribution.log_prob(batch.actions) - batch.log_probs
        return self._allows(batch.mean(rl.approx_kl_k3(log_ratios)), self.target_kl)

    def _allows(self, approx_kl: Tensor, target_kl: float) -> Tensor:
        return self.average_over_ranks(approx_kl) <= 1.5 * target_kl

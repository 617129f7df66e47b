"""Importance-weighted actor-learner architecture (Espeholt et al. 2018): its learner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from gymnasium import spaces
from torch import Tensor

from lightning_rl import functional as rl
from lightning_rl.algorithms.unrolls import UnrollLearner
from lightning_rl.policies.distributions import Distribution
from lightning_rl.policies.values import values_reached
from lightning_rl.rollouts.batch import Batch
from lightning_rl.rollouts.rollout import Rollout
from lightning_rl.spaces import SpaceDict
from lightning_rl.training.optimization import StepOutput
from lightning_rl.training.schedules import Scheduled
from lightning_rl.training.unroll import Unroll
from lightning_rl.validation import ClassSpec, check, check_bool, check_number


class Evaluated(NamedTuple):
    """What the learner makes of an unroll.

    Attributes:
        batch: Its rows, with `advantages` and `returns` by V-trace.
        distribution: Of their actions.
        log_probs: Of the actions that were taken, `[N]`.
        values: `[N]`.
    """

    batch: Batch
    distribution: Distribution
    log_probs: Tensor
    values: Tensor

    def valid_rows(self, x: Tensor) -> Tensor:
        """Return the entries of `x`, `[N]`, of rows that count; others are there too."""
        return x[self.batch.weights != 0] if "weights" in self.batch.fields else x


class IMPALA(UnrollLearner):
    """The learner of IMPALA: an actor-critic whose targets V-trace corrects for older policies (Espeholt et al. 2018).

    One gradient step for each rollout, whose policy may be of an earlier version than the learner's, on

        policy-gradient loss + value_coef · value loss - entropy_coef · entropy      (section 4.2)

    Args:
        observation_space: Of one environment: a Gymnasium space, or its description by `space_to_dict`.
        action_space: Of one environment, likewise.
        learning_rate: Step size of the optimiser.
        vtrace_lambda: λ of the trace coefficients, 0 to 1. May be a schedule.
        clip_rho: ρ̄, bound of the importance weight of a temporal difference, which decides what values converge to;
            None: none.
        clip_c: c̄, bound of that in the trace, which decides how fast; None: none.
        clip_pg_rho: Bound of that of an advantage; None: none.
        vtrace_leak: Share of what these bounds cut off that counts all the same: 0 is V-trace, above is leaky V-trace.
        clip_advantage: Learn actions by advantages above 0 alone, as max(A, 0).
        value_coef: Weight of the value loss ½(V - V-trace target)².
        entropy_coef: Weight of the entropy bonus. May be a schedule.
        **kwargs: Those of `UnrollLearner`; `optimizer=None` is RMSprop, as in the paper.

    Raises:
        ConfigurationError: A value is out of range; names field, value and what was expected.
    """

    corrects_for_lag = True

    def __init__(
        self,
        observation_space: spaces.Space[Any] | SpaceDict,
        action_space: spaces.Space[Any] | SpaceDict,
        *,
        learning_rate: Scheduled = 6e-4,
        vtrace_lambda: Scheduled = 1.0,
        clip_rho: float | None = 1.0,
        clip_c: float | None = 1.0,
        clip_pg_rho: float | None = 1.0,
        vtrace_leak: float = 0.0,
        clip_advantage: bool = False,
        value_coef: float = 0.5,
        entropy_coef: Scheduled = 0.01,
        **kwargs: Any,  # noqa: ANN401 - those of the base class
    ) -> None:
        super().__init__(observation_space, action_space, learning_rate=learning_rate, **kwargs)
        for name, bound in (("clip_rho", clip_rho), ("clip_c", clip_c), ("clip_pg_rho", clip_pg_rho)):
            if bound is not None:
                check_number(name, bound, above=0)
        check_number("vtrace_leak", vtrace_leak, at_least=0, at_most=1)
        check_bool("clip_advantage", clip_advantage)
        check_number("value_coef", value_coef, at_least=0)
        for name, only in (("advantage_estimator", "gae"), ("value_target", "td_lambda"), ("recompute_values", False)):
            given = self.hparams[name]
            check(given == only, name, given, f"{only}: both targets are those of V-trace, from the learner's values")
        self.vtrace_lambda = self.scheduled("vtrace_lambda", vtrace_lambda, at_least=0, at_most=1)
        self.clip_rho, self.clip_c, self.clip_pg_rho = clip_rho, clip_c, clip_pg_rho
        self.vtrace_leak = vtrace_leak
        self.clip_advantage = clip_advantage
        self.value_coef = value_coef
        self.entropy_coef = self.scheduled("entropy_coef", entropy_coef, at_least=0)

    def default_optimizer(self) -> ClassSpec:
        """Return RMSprop with the decay and epsilon of the paper."""
        return {"class_path": "torch.optim.RMSprop", "init_args": {"alpha": 0.99, "eps": 0.01}}

    def training_step(self, rollout: Rollout, batch_idx: int) -> StepOutput:
        """Learn from one rollout, and return the losses."""
        with self.learning(rollout):
            parts = [self.evaluated(unroll) for unroll in self.unrolls(rollout)]
            self.update(parts)
            self.log_histograms(parts[0].batch, "update")
        return {"losses": self.losses}

    def observe_loss(self, rollout: Rollout | Batch) -> None:
        """Compute the loss over a rollout alone, without replay.

        Raises:
            TypeError: It was given rows, which V-trace cannot put in the order of time.
        """
        if not isinstance(rollout, Rollout):
            raise TypeError(f"compute_loss of {type(self).__name__} takes a Rollout, not a {type(rollout).__name__}")
        parts = [self.evaluated(unroll) for unroll in IMPALA.unrolls(self, rollout)]
        self.observe_targets(parts)
        self.loss(parts)

    def update(self, parts: Sequence[Evaluated]) -> None:
        """Take one step from all parts together, unless they have no row that counts."""
        self.observe_targets(parts)
        if self.has_rows(parts[0].batch):
            self.optimize(self.loss(parts))

    def unrolls(self, rollout: Rollout) -> list[Unroll]:
        """Return what one step is made from: here the rollout alone."""
        if self.update_normalizers == "before":
            self.update_running_statistics_first(rollout)
        unrolls = [self.unroll(rollout)]
        self.set_global_weights_together([unroll.batch for unroll in unrolls])
        return unrolls

    def evaluated(self, unroll: Unroll) -> Evaluated:
        """Return what the learner makes of an unroll, and its V-trace targets."""
        rollout, batch = unroll.rollout, self.start_minibatch(unroll.batch)
        distribution, values = self.evaluate(batch)
        log_probs = distribution.log_prob(batch.actions)
        log_rhos = log_probs.detach() - batch.log_probs
        advantages, returns = map(unroll.rows, self.vtrace(unroll, log_rhos, values.detach()))
        if self.clip_advantage:
            advantages = advantages.clamp(min=0)
        # Not where actors are asynchronous: one rank may have a rollout of its own policy, and another have none.
        if rollout.actor is None and self.is_on_policy(rollout):
            self.observe_first_ratios(log_rhos)
        return Evaluated(batch.replace(advantages=advantages, returns=returns), distribution, log_probs, values)

    def vtrace(self, unroll: Unroll, log_rhos: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return advantages and value targets, `[T, B]` (equation 1 and section 4.2).

        Args:
            unroll: Whose.
            log_rhos: Logarithms of the importance weights of its rows, `[N]`.
            values: The learner's, of the same rows.
        """
        rollout = unroll.rollout
        values = unroll.grid(values, rollout.values)
        reached = rollout.next_values if self.is_on_policy(rollout) else values_reached(self.policy, rollout, values)
        targets, advantages = rl.vtrace(
            unroll.grid(log_rhos, torch.zeros_like(rollout.values)),
            self.normalized_rewards(rollout),
            values,
            reached,
            rollout.discounts(self.gamma, self.on_truncation),
            rollout.traces(self.vtrace_lambda),
            *(self.clip_rho, self.clip_c, self.clip_pg_rho, self.vtrace_leak),
        )
        return advantages, targets

    def is_on_policy(self, rollout: Rollout) -> bool:
        """Whether the learner, with its normalisers, is still what collected a rollout."""
        return rollout.policy_version == self.policy_version and self.update_normalizers == "after"

    def loss(self, parts: Sequence[Evaluated]) -> Tensor:
        """Return the loss over all parts of a step; the terms are recorded as means, whatever `reduction` is."""
        policy_loss = _sum([x.batch.mean(rl.policy_gradient_loss(x.log_probs, x.batch.advantages)) for x in parts])
        pairs = [self.normalize_values(x.values, x.batch.returns) for x in parts]
        value_loss = _sum([x.batch.mean(rl.value_loss(*pair)) for x, pair in zip(parts, pairs, strict=True)])
        self.diagnostics.add(policy_loss=policy_loss, value_loss=value_loss)
        entropy = self.entropy_of(parts)
        terms = [policy_loss, self.value_coef * value_loss, -self.entropy_coef * entropy, *self.cloning_terms(parts)]
        scale = self.scale(parts[0].batch)
        return self.total(*(scale * term for term in terms))

    def cloning_terms(self, parts: Sequence[Evaluated]) -> Sequence[Tensor]:
        """Return further terms of the loss, scalars; there are none here."""
        return ()

    def entropy_of(self, parts: Sequence[Evaluated]) -> Tensor:
        """Return the mean entropy over all parts of a step, and record it and that of each part of the actions."""
        shares: dict[str, list[Tensor]] = {}
        for one in parts:
            for path, entropy in one.distribution.entropies().items():
                shares.setdefault(path, []).append(one.batch.mean(entropy))
        means = {path: _sum(some) for path, some in shares.items()}
        total = _sum([*means.values()])
        self.diagnostics.add(entropy=total)
        self.diagnostics.observe(**{f"entropy.{path}": mean for path, mean in means.items() if path})
        return total

    def observe_targets(self, parts: Sequence[Evaluated]) -> None:
        """Hand the value targets to `value_normalization`, and observe those of the newest unrolls: NaN of none."""
        self._value_targets = torch.cat([one.valid_rows(one.batch.returns) for one in parts])
        new, returns = parts[0], parts[0].valid_rows(parts[0].batch.returns)
        values = new.valid_rows(new.values.detach()).to(returns.dtype)
        ratios = new.valid_rows(new.log_probs.detach() - new.batch.log_probs).exp()
        count, weights = self.all_reduce(torch.stack([ratios.new_tensor(len(ratios)), ratios.sum()]))
        self.diagnostics.observe(
            explained_variance=self.explained_variance(values, returns),
            importance_weight=weights / count,
        )


def _sum(terms: Sequence[Tensor]) -> Tensor:
    return torch.stack([*terms]).sum()

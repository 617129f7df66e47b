"""Advantages, returns and step weights of a rollout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from torch import Tensor

from lightning_rl.functional import gae
from lightning_rl.nested import Nested
from lightning_rl.policies.actor_critic import ActorCritic
from lightning_rl.policies.normalization import ValueNormalizer
from lightning_rl.policies.values import with_recomputed_values
from lightning_rl.rollouts.batch import Batch
from lightning_rl.rollouts.rollout import OnTruncation, Rollout
from lightning_rl.training.optimization import Updates
from lightning_rl.training.parameter_groups import part_of
from lightning_rl.validation import check


class Targets(Updates):
    """Makes of a rollout what is to be learned from it, as the options of every algorithm say.

    Attributes:
        gamma: Discount factor.
        gae_lambda: λ of the advantage estimates that `targets` makes.
        on_truncation: What a time limit is, see `Rollout.discounts`.
        advantage_estimator: How advantages are made.
        value_target: How returns are made.
        recompute_values: Whether the values for both are computed anew.
        update_normalizers: Whether normalisers take a rollout in before or after its updates.
    """

    policy: ActorCritic
    gamma: float
    gae_lambda: float = 0.95
    on_truncation: OnTruncation
    advantage_estimator: Literal["gae", "monte_carlo"]
    value_target: Literal["td_lambda", "empirical"]
    recompute_values: bool
    update_normalizers: Literal["after", "before"]

    def __init__(self) -> None:
        super().__init__()
        self._kept_normalizers: dict[str, Tensor] = {}
        self._kept_discounted_return: Tensor | None = None
        self._value_targets: Tensor | None = None

    def setup(self, stage: str) -> None:
        """Take back what is left of updates that an exception has ended: nobody goes on with them."""
        self.roll_back_normalizers()
        self.updating = False
        super().setup(stage)

    def gae(self, rollout: Rollout, lambda_: float) -> Tensor:
        """Return generalised advantage estimates `[T, B]` of a rollout, from normalised rewards."""
        rewards = self.normalized_rewards(rollout)
        discounts = rollout.discounts(self.gamma, self.on_truncation)
        return gae(rewards, rollout.values, rollout.next_values, discounts, rollout.traces(lambda_))

    def normalized_rewards(self, rollout: Rollout) -> Tensor:
        """Return a rollout's rewards `[T, B]` as `normalize_rewards` says."""
        return rollout.rewards if self.reward_normalizer is None else self.reward_normalizer(rollout.rewards)

    def targets(self, rollout: Rollout, **per_step: Nested) -> Batch:
        """Return a rollout's steps with `advantages`, and `returns` for the values to learn, as one batch.

        What an update begins with: the options about values, returns and normalisers take effect here. With
        `update_normalizers: before` the normalisers take the rollout in.

        Args:
            rollout: What to learn from.
            **per_step: More tensors `[T, B, ...]` that the batch is to have.
        """
        if self.update_normalizers == "before":
            self.update_running_statistics_first(rollout)
        if self.recompute_values:
            rollout = with_recomputed_values(self.policy, rollout)
        advantages, returns = self.advantages_and_returns(rollout)
        rows, weights = self.counted_steps(rollout, advantages, returns)
        if weights is not None:
            per_step["weights"] = weights
        batch = rollout.flatten(rows, advantages=advantages, returns=returns, **per_step)
        values, returns = batch.values, batch.returns
        if weights is not None:  # with memory, steps that do not count are there too
            counted = batch.weights != 0
            values, returns = values[counted], returns[counted]
        self._value_targets = returns
        self.diagnostics.observe(explained_variance=self.explained_variance(values, returns))
        return batch

    def prepare_batch(self, batch: Batch) -> Batch:
        """Return a batch as its minibatches are cut from it; override it to change what is learned from all of it."""
        return batch

    def with_new_targets(self, batch: Batch, rollout: Rollout) -> Batch:
        """Return a batch that `targets` made with values, advantages and returns by the critic as it is now."""
        rollout = with_recomputed_values(self.policy, rollout)
        advantages, returns = self.advantages_and_returns(rollout)
        rows, _ = self.counted_steps(rollout, advantages, returns)
        new = rollout.flatten(rows, advantages=advantages, returns=returns)
        return batch.replace(values=new.values, advantages=new.advantages, returns=new.returns)

    def advantages_and_returns(self, rollout: Rollout) -> tuple[Tensor, Tensor]:
        """Return advantages and value targets `[T, B]` as `advantage_estimator` and `value_target` say."""
        lambda_ = 1.0 if self.advantage_estimator == "monte_carlo" else self.gae_lambda
        advantages = self.gae(rollout, lambda_)
        empirical = self.value_target == "empirical" and lambda_ != 1
        return advantages, (self.gae(rollout, 1.0) if empirical else advantages) + rollout.values

    def counted_steps(
        self, rollout: Rollout, advantages: Tensor, returns: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return which steps are learned from (None: the real ones), and how much they count (None: the same)."""
        rows, weights = rollout.valid, self.given_weights(rollout)
        if weights is None:
            return rows, None
        return (weights != 0) if rows is None else rows & (weights != 0), weights

    def given_weights(self, rollout: Rollout) -> Tensor | None:
        """Return what `step_weights` says.

        Raises:
            ConfigurationError: That has another shape than the rollout, so that it would weigh something else.
        """
        weights = self.step_weights(rollout)
        if weights is not None:
            found, expected = tuple(weights.shape), rollout.shape
            check(found == expected, "step_weights: shape", found, f"{expected}, steps and environments of the rollout")
        return weights

    def step_weights(self, rollout: Rollout) -> Tensor | None:
        """Return how much each step counts in the losses, `[T, B]`, not negative; None: all the same.

        Override it to weigh steps. Losses and means are then weighted means, in which steps of weight 0 have no part.
        Advantages and returns of the steps before them are made of their rewards and values all the same.
        """
        return None

    def update_running_statistics_first(self, rollout: Rollout) -> None:
        """Take a rollout into the running moments before anything is learned from it, to be undone if nothing is."""
        self._keep_normalizers()
        self.update_running_statistics(rollout)

    def update_running_statistics(self, rollout: Rollout) -> None:
        """Take the real steps of a rollout into the running moments."""
        if (normalizer := getattr(self.policy, "observation_normalizer", None)) is not None:
            normalizer.update(rollout.flatten().observations, self.all_reduce)
        if self.reward_normalizer is not None:
            # Each actor has environments of its own. After a rollout that was dropped a return goes on from what it was
            # before: as likely as any other.
            first = None if rollout.actor is None else rollout.actor * rollout.shape[1]
            # Episodes begin anew with another run, and where environments cannot be taken back to where they were.
            starts = None if rollout.starts is None else rollout.starts[0]
            places: dict[str, Any] = {"first": first, "starts": starts}
            self.reward_normalizer.update(rollout.rewards, rollout.dones, rollout.valid, self.all_reduce, **places)

    def normalize_values(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Return values and returns, of any shape, in units of the value head; for losses, that look at differences."""
        normalizer = self._value_normalizer
        return values if normalizer is None else tuple(map(normalizer, values))

    @property
    def _value_normalizer(self) -> ValueNormalizer | None:
        return getattr(self.policy, "value_normalizer", None)

    def _take_into_value_normalizer(self) -> None:
        """Take what the critic has learned into the moments of `value_normalization`."""
        if (normalizer := self._value_normalizer) is not None:
            if self._value_targets is None:
                raise RuntimeError("value_normalization needs the returns that are learned: call self.targets")
            normalizer.update(self._value_targets, self.policy.value_heads, self.all_reduce)
        self._value_targets = None

    @contextmanager
    def isolated_state(self) -> Iterator[None]:
        """Have diagnostics of their own, and afterwards those of before, and the normalisers as they were."""
        names = ("diagnostics", "_value_targets", "_kept_normalizers", "_kept_discounted_return")
        kept = {name: getattr(self, name) for name in names}
        rewards = self.reward_normalizer
        discounted_return = None if rewards is None else rewards.discounted_return
        self._forget_normalizers()
        self.diagnostics = self.new_diagnostics()
        try:
            yield
        finally:
            self._restore_normalizers()
            if rewards is not None and discounted_return is not None:
                rewards.discounted_return = discounted_return
            for name, value in kept.items():
                setattr(self, name, value)

    def _keep_normalizers(self) -> None:
        """Remember the normalisers, should nothing be learned from the rollout that they take in now."""
        self._kept_normalizers = {n: x.clone() for n, x in self.state_dict().items() if part_of(n) == "normalizers"}
        if self.reward_normalizer is not None:
            self._kept_discounted_return = self.reward_normalizer.discounted_return

    def roll_back_normalizers(self) -> None:
        """Make replays and normalisers what they were before updates that were not made to their end.

        Otherwise nothing is remembered, and nothing is changed.
        """
        for replay in self.replays.values():
            replay.rollback()
        self._restore_normalizers()
        self._forget_normalizers()

    def _restore_normalizers(self) -> None:
        """Take back what they took in since."""
        state = self.state_dict()
        for name, x in self._kept_normalizers.items():
            state[name].copy_(x)
        if self.reward_normalizer is not None and self._kept_discounted_return is not None:
            self.reward_normalizer.discounted_return = self._kept_discounted_return

    def _forget_normalizers(self) -> None:
        self._kept_normalizers, self._kept_discounted_return = {}, None

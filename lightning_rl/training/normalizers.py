"""The running statistics of a run: frozen while a rollout is learned from, updated when that has succeeded."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from torch import Tensor, nn

from lightning_rl.distributed import all_reduce
from lightning_rl.environments.wrappers.rewards import RewardClip, check_reward_options, make_reward_transform
from lightning_rl.policies.normalization import ValueNormalizer
from lightning_rl.rollouts.rollout import Rollout
from lightning_rl.training.reward_normalization import RewardNormalizer
from lightning_rl.validation import check


class Normalizers:
    """Normalizes observations, rewards and values, and takes each rollout in once it was learned from.

    Args:
        policy: May have an `observation_normalizer` and a `value_normalizer`.
        of_rewards: Normalizes rewards; None leaves them as they are.
        when: Take a rollout in `after` its updates, or `before` them, to be undone if they fail.

    Attributes:
        counts_resets: Whether steps that only reset an environment are taken in too.
        scale_rewards: Transforms rewards in place of a normalizer; None: none.
        value_targets: What the critic learns from the present rollout, `[N]`; None where that is not known.
    """

    def __init__(
        self, policy: nn.Module, of_rewards: RewardNormalizer | None, when: Literal["after", "before"]
    ) -> None:
        self.policy = policy
        self.of_rewards = of_rewards
        self.when = when
        self.counts_resets = False
        self.scale_rewards: Any = None
        self.value_targets: Tensor | None = None
        self._before: tuple[list[Tensor], Tensor | None] | None = None

    @property
    def of_observations(self) -> Any:  # noqa: ANN401
        """That of the policy, None if it has none."""
        return getattr(self.policy, "observation_normalizer", None)

    @property
    def of_values(self) -> ValueNormalizer | None:
        """That of the policy, None if it has none."""
        return getattr(self.policy, "value_normalizer", None)

    def rewards(self, rollout: Rollout) -> Tensor:
        """Return a rollout's rewards `[T, B]`, normalized."""
        if self.scale_rewards is not None:
            scaled: Tensor = self.scale_rewards(rollout.rewards)
            return scaled
        return rollout.rewards if self.of_rewards is None else self.of_rewards(rollout.rewards)

    def transform_rewards(self, scale: float, clip: RewardClip | None, normalize_rewards: object) -> None:
        """Scale and bound rewards by fixed numbers, in place of a normalizer.

        Args:
            scale: Factor of rewards.
            clip: Bounds of rewards after that; None: none.
            normalize_rewards: The option that a normalizer was made by, for the error.

        Raises:
            ConfigurationError: A value is out of range, or there is a normalizer too.
        """
        check_reward_options(scale, clip)
        self.scale_rewards = make_reward_transform(scale, clip)
        both = self.scale_rewards is not None and self.of_rewards is not None
        check(not both, "normalization.rewards", normalize_rewards, "false beside reward_scale or reward_clip")

    def begin(self, rollout: Rollout) -> None:
        """Take a rollout in before it is learned from, where that is wanted."""
        if self.when == "before":
            self._before = self._snapshot()
            self._take_in(rollout)

    def commit(self, rollout: Rollout) -> None:
        """Take in a rollout that was learned from, and the returns that the critic has learned."""
        if self._before is None:
            self._take_in(rollout)
        if self.of_values is not None and self.value_targets is not None:
            self.of_values.update(self.value_targets, self.policy.value_heads, all_reduce)  # type: ignore[arg-type]
        self.value_targets = self._before = None

    def rollback(self) -> None:
        """Make everything what it was before updates that were not made to their end."""
        if self._before is not None:
            self._restore(self._before)
        self.value_targets = self._before = None

    def forget_returns(self) -> None:
        """Begin the discounted returns anew: rewards in between are not known."""
        if self.of_rewards is not None:
            self.of_rewards.forget()

    @contextmanager
    def isolated(self) -> Iterator[None]:
        """Leave everything as it is, whatever happens in between."""
        kept = self._before, self.value_targets
        before = self._snapshot()
        self._before = self.value_targets = None
        try:
            yield
        finally:
            self._restore(before)
            self._before, self.value_targets = kept

    def _take_in(self, rollout: Rollout) -> None:
        """Take the real steps of a rollout into the running moments."""
        if self.counts_resets:
            rollout = copy.copy(rollout)
            rollout.valid = None
        if self.of_observations is not None:
            self.of_observations.update(rollout.flatten().observations, all_reduce)
        if self.of_rewards is not None:
            # Each actor has environments of its own. After a rollout that was dropped a return goes on from what it was
            # before: as likely as any other.
            first = None if rollout.actor is None else rollout.actor * rollout.shape[1]
            # Episodes begin anew with another run, and where environments cannot be taken back to where they were.
            starts = None if rollout.starts is None else rollout.starts[0]
            places: dict[str, Any] = {"first": first, "starts": starts}
            self.of_rewards.update(rollout.rewards, rollout.dones, rollout.valid, all_reduce, **places)

    def _statistics(self) -> list[Tensor]:
        """Return the tensors that a rollout changes before it is learned from."""
        modules = [self.of_observations, self.of_rewards]
        return [buffer for module in modules if module is not None for buffer in module.buffers()]

    def _snapshot(self) -> tuple[list[Tensor], Tensor | None]:
        discounted_return = None if self.of_rewards is None else self.of_rewards.discounted_return
        return [x.clone() for x in self._statistics()], discounted_return

    def _restore(self, snapshot: tuple[list[Tensor], Tensor | None]) -> None:
        tensors, discounted_return = snapshot
        for x, old in zip(self._statistics(), tensors, strict=True):
            x.copy_(old)
        if self.of_rewards is not None and discounted_return is not None:
            self.of_rewards.discounted_return = discounted_return

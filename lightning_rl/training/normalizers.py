"""Running statistics of observations, rewards and values: fixed during an update, and updated after it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_rl.environments.wrappers.transforms import RewardClip, check_reward_options, make_reward_transform
from lightning_rl.functional import reverse_scan
from lightning_rl.policies.normalization import RewardScale, RunningMoments, ValueNormalizer
from lightning_rl.rollouts.rollout import Rollout
from lightning_rl.validation import check


class Normalizers:
    """Normalizes observations, rewards and values, and updates the running statistics with each learned rollout.

    Args:
        policy: Policy that may have an `observation_normalizer` and a `value_normalizer`.
        of_rewards: Reward normalizer. None leaves rewards unchanged.
        when: Update the statistics `after` the updates from a rollout, or `before` them; failed updates are undone.

    Attributes:
        counts_resets: Whether rows that only reset an environment enter the statistics.
        scale_rewards: Fixed transform of rewards, used instead of a normalizer.
        value_targets: Targets of the value loss for the current rollout, `[N]`. None: unknown.
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
        # Undoes an update of the statistics before learning.
        self._undo: Callable[[], None] | None = None

    @property
    def of_observations(self) -> Any:
        return getattr(self.policy, "observation_normalizer", None)

    @property
    def of_values(self) -> ValueNormalizer | None:
        return getattr(self.policy, "value_normalizer", None)

    def rewards(self, rollout: Rollout) -> Tensor:
        """Return the normalized rewards of a rollout, `[T, B]`."""
        transform = self.scale_rewards or self.of_rewards
        return rollout.rewards if transform is None else transform(rollout.rewards)

    def transform_rewards(self, scale: float, clip: RewardClip | None, normalize_rewards: object) -> None:
        """Scale and clip rewards by fixed numbers; an error if `normalization.rewards` is also set."""
        check_reward_options(scale, clip)
        self.scale_rewards = make_reward_transform(scale, clip)
        both = self.scale_rewards is not None and self.of_rewards is not None
        check(not both, "normalization.rewards", normalize_rewards, "false beside reward_scale or reward_clip")

    def begin(self, rollout: Rollout) -> None:
        """Update the statistics before learning, at most once per update, if `when` is `before`."""
        if self.when == "before" and self._undo is None:
            self._undo = self._snapshot()
            self._update(rollout)

    def commit(self, rollout: Rollout) -> None:
        """Update the statistics after learning from a rollout, also the statistics of the value targets."""
        if self._undo is None:
            self._update(rollout)
        if self.of_values is not None and self.value_targets is not None:
            self.of_values.update(self.value_targets, self.policy.value_heads)  # type: ignore[arg-type]
        self.value_targets = self._undo = None

    def rollback(self) -> None:
        if self._undo is not None:
            self._undo()
        self.value_targets = self._undo = None

    @contextmanager
    def isolated(self) -> Iterator[None]:
        # Within an update, `_undo` keeps `begin` from merging the rollout a second time.
        restore, kept = self._snapshot(), (self._undo, self.value_targets)
        try:
            yield
        finally:
            restore()
            self._undo, self.value_targets = kept

    def _update(self, rollout: Rollout) -> None:
        if self.counts_resets:
            rollout = copy.copy(rollout)
            rollout.valid = None
        if self.of_observations is not None:
            self.of_observations.update(rollout.flatten().observations)
        if self.of_rewards is not None:
            # Each actor has its own environments. If a rollout was dropped, their returns continue from the last
            # learned one.
            first = None if rollout.actor is None else rollout.actor * rollout.shape[1]
            starts = None if rollout.starts is None else rollout.starts[0]
            ends, repeats = rollout.dones, rollout.repeats
            self.of_rewards.update(rollout.rewards, ends, rollout.valid, first=first, starts=starts, repeats=repeats)

    def _snapshot(self) -> Callable[[], None]:
        """Copy the statistics of observations and rewards, and return a function that restores them."""
        modules = [module for module in (self.of_observations, self.of_rewards) if module is not None]
        copies = [{name: x.clone() for name, x in module.state_dict().items()} for module in modules]
        discounted_return = None if self.of_rewards is None else self.of_rewards.discounted_return

        def restore() -> None:
            for module, old in zip(modules, copies, strict=True):
                module.load_state_dict(old)  # the module may be on another device by now
            if self.of_rewards is not None and discounted_return is not None:
                self.of_rewards.discounted_return = discounted_return

        return restore


class RewardNormalizer(nn.Module):
    """Divide rewards by the running standard deviation of the discounted return, and clip; the mean stays.

    Like `VecNormalize` of OpenAI Baselines: R[t] = r[t] + gamma · R[t-1], starting at 0 in each episode; R `[B]` is
    `discounted_return`. Gymnasium's `NormalizeReward` drops R[t-1] already at a terminal step, and keeps R after a time
    limit. With `gamma=0`, R is the reward itself. `epsilon` is added to the variance, which is `initial_variance`
    before any data.
    """

    def __init__(
        self, gamma: float, clip: float | None = 10.0, epsilon: float = 1e-8, initial_variance: float = 1.0
    ) -> None:
        super().__init__()
        self.moments = RunningMoments((), initial_variance)
        self.gamma = gamma
        self.clip = clip
        self.epsilon = epsilon
        # Not a buffer: every rank has its own environments, but DDP and checkpoints copy the buffers of the first rank.
        self.discounted_return = torch.zeros(0, dtype=torch.float64)

    def forward(self, rewards: Tensor) -> Tensor:
        scaled = rewards * self.moments.scale(self.epsilon).to(rewards.dtype)
        return scaled if self.clip is None else scaled.clamp(-self.clip, self.clip)

    def reset_returns(self) -> None:
        """Start new discounted returns, because rewards in between are unknown."""
        self.discounted_return = torch.zeros_like(self.discounted_return)

    @torch.no_grad()
    def update(
        self,
        rewards: Tensor,
        ends: Tensor,
        valid: Tensor | None = None,
        *,
        first: int | None = None,
        starts: Tensor | None = None,
        repeats: Tensor | None = None,
    ) -> None:
        """Update the running variance with a rollout of each rank, tensors `[T, B]`; a collective call.

        Args:
            rewards: Raw rewards.
            ends: Whether the episode ended with the step.
            valid: Which entries are real steps. None: all.
            first: Index of the rollout's first environment, if several actors deliver rollouts in turn. None: the
                rollout has all environments.
            starts: Which environments start an episode with the rollout, `[B]`; in a resumed run this may include
                environments whose last episode did not end. None: only environments whose last episode ended.
            repeats: Repeats of each action, as in `Rollout`; gamma discounts once per repeat. None: one repeat.
        """
        num_envs, start, known = rewards.shape[1], first or 0, self.discounted_return
        size = num_envs if first is None else max(start + num_envs, len(known))
        if len(known) != size:  # not at every call: it would compile another graph on XLA
            known = nn.functional.pad(known, (0, size - len(known)))
        known = known.to(self.moments.mean.device, self.moments.mean.dtype)
        before = known[start : start + num_envs] if size != num_envs else known
        if starts is not None:
            before = before.masked_fill(starts.to(before.device), 0)
        rewards = rewards.to(before.dtype)
        if valid is not None:
            rewards = rewards.where(valid, 0)
            ends = ends | ~valid  # an environment reset, or failed in the first step of the rollout
        gamma = self.gamma if repeats is None else self.gamma ** repeats.to(rewards.dtype)
        keep = gamma * (~ends).to(rewards.dtype)
        decay = torch.cat([torch.ones_like(keep[:1]), keep[:-1]])
        returns = reverse_scan(rewards.flip(0), decay.flip(0), before).flip(0)
        after = keep[-1] * returns[-1]  # 0 after the end of an episode
        self.discounted_return = after if size == num_envs else known.slice_scatter(after, 0, start, start + num_envs)
        self.moments.update(returns.flatten() if valid is None else returns[valid])


def reward_normalizers(model: nn.Module) -> dict[str, RewardNormalizer]:
    """Return the reward normalizers of an algorithm by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, RewardNormalizer)}


def make_reward_normalizer(kind: bool | RewardScale, gamma: float, clip: float | None) -> RewardNormalizer | None:
    """Return the normalizer for `normalization.rewards`, or None; `reward_std` uses the epsilon of TF-Agents, 1e-3."""
    scale = reward_scale(kind)
    if scale is None:
        return None
    return RewardNormalizer(0.0, clip, 1e-3) if scale == "reward_std" else RewardNormalizer(gamma, clip)


def reward_scale(kind: bool | RewardScale | None) -> RewardScale | None:
    """Return the divisor of rewards that `normalization.rewards` selects: True is `return_std`, False None."""
    return "return_std" if kind is True else kind or None

"""Running statistics that normalize rewards."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_rl.distributed import Reduce, _identity
from lightning_rl.functional import reverse_scan
from lightning_rl.policies.normalization import RewardScale, RunningMoments


class RewardNormalizer(nn.Module):
    """Divide rewards by the running deviation of the discounted return, and clip.

    As OpenAI Baselines' `VecNormalize`: R[t] = r[t] + gamma · R[t-1], beginning anew with the first step of an episode.
    Gymnasium's `NormalizeReward` differs: it forgets the past with the step that terminates, and not at a time limit.

    With a discount factor of 0 the return is the reward, and this the deviation of raw rewards; no mean is subtracted.

    Args:
        gamma: Discount factor.
        clip: Bound on the absolute normalised reward; None does not clip.
        epsilon: Added to the variance.
        initial_variance: What the variance is before any data.
    """

    def __init__(
        self, gamma: float, clip: float | None = 10.0, epsilon: float = 1e-8, initial_variance: float = 1.0
    ) -> None:
        super().__init__()
        self.moments = RunningMoments((), initial_variance)
        self.gamma = gamma
        self.clip = clip
        self.epsilon = epsilon
        # Of this rank's environments, so no buffer: DDP would give every rank those of the first, and a checkpoint too.
        self.discounted_return = torch.zeros(0, dtype=torch.float64)

    def forget(self) -> None:
        """Begin the discounted returns anew: rewards in between are not known."""
        self.discounted_return = torch.zeros_like(self.discounted_return)

    def forward(self, rewards: Tensor) -> Tensor:
        """Normalise rewards of any shape."""
        scaled = rewards * self.moments.scale(self.epsilon).to(rewards.dtype)
        return scaled if self.clip is None else scaled.clamp(-self.clip, self.clip)

    @torch.no_grad()
    def update(
        self,
        rewards: Tensor,
        ends: Tensor,
        valid: Tensor | None = None,
        reduce: Reduce = _identity,
        *,
        first: int | None = None,
        starts: Tensor | None = None,
    ) -> None:
        """Take in a rollout.

        Args:
            rewards: Raw rewards, shape `[T, B]`.
            ends: Whether the episode ended with the step, shape `[T, B]`.
            valid: Which entries are real steps, shape `[T, B]`; all of them if left out.
            reduce: Sums a tensor over all ranks.
            first: Place of the first of these environments among all whose rollouts are taken in by turns; None: these
                are all.
            starts: Which environments begin an episode with the rollout, shape `[B]`: in another run also such whose
                last one has not ended. None: those whose last one ended.
        """
        num_envs = rewards.shape[1]
        others, before = self._discounted_returns(first, num_envs)
        before = before.to(self.moments.mean.device, self.moments.mean.dtype)
        if starts is not None:
            before = before.masked_fill(starts.to(before.device), 0)
        rewards = rewards.to(before.dtype)
        if valid is not None:
            rewards = rewards.where(valid, 0)
            ends = ends | ~valid  # nothing goes on over a reset, nor over a failure in the first step of a rollout
        keep = self.gamma * (~ends).to(rewards.dtype)
        decay = torch.cat([torch.ones_like(keep[:1]), keep[:-1]])
        returns = reverse_scan(rewards.flip(0), decay.flip(0), before).flip(0)
        # What the next rollout begins with: 0 after the end of an episode.
        after = keep[-1] * returns[-1]
        if others is not None and first is not None:
            after = others.to(after).slice_scatter(after, 0, first, first + num_envs)
        self.discounted_return = after
        self.moments.update(returns.flatten() if valid is None else returns[valid], reduce)

    def _discounted_returns(self, first: int | None, num_envs: int) -> tuple[Tensor | None, Tensor]:
        """Return the discounted returns of all environments, None where there are no others, and those of these."""
        known = self.discounted_return
        if first is None and known.shape == (num_envs,):
            return None, known
        # The first rollout, or another number of environments. Moved like any other: to XLA zeros made there are
        # another graph.
        every = torch.zeros(num_envs if first is None else max(first + num_envs, len(known)), dtype=known.dtype)
        kept = known[: len(every)]
        every[: len(kept)] = kept
        return (None, every) if first is None else (every, every[first : first + num_envs])


def make_reward_normalizer(kind: bool | RewardScale, gamma: float, clip: float | None) -> RewardNormalizer | None:
    """Return the normaliser that `normalize_rewards` asks for, None for none.

    That of the rewards themselves has the epsilon of TF-Agents, 1e-3.
    """
    scale = reward_scale(kind)
    if scale is None:
        return None
    return RewardNormalizer(0.0, clip, 1e-3) if scale == "reward_std" else RewardNormalizer(gamma, clip)


def reward_scale(kind: bool | RewardScale | None) -> RewardScale | None:
    """Return what rewards are divided by where `normalize_rewards` is `kind`: True is `return_std`, False nothing."""
    return "return_std" if kind is True else kind or None

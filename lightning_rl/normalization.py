"""Running moments as buffers, so that checkpoints, device moves and evaluation carry them.

Statistics are frozen while a rollout is collected and learned from, and take its data in afterwards: acting and
updating see the same function, and the importance ratio is 1 on arrival.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, Self, cast

import torch
from torch import Tensor, nn

from lightning_rl.distributed import Reduce, _identity, exact_dtype
from lightning_rl.functional import reverse_scan
from lightning_rl.nested import Nested, join, module_name, part_at

RewardScale = Literal["return_std", "reward_std"]
"""What rewards are divided by: the running deviation of the discounted return, or that of the rewards themselves."""


class _Statistics(nn.Module):
    """A module whose own buffers stay in float64, whatever the precision of the network.

    A float32 count would stop at 2^24.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Follow moves between devices, but not casts."""
        own = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in own.items():
            assert buffer is not None
            device = fn(torch.empty(0, device=buffer.device)).device
            self._buffers[name] = buffer.to(device, exact_dtype(device))
        return self


class RunningMoments(_Statistics):
    """Count, mean and population variance of everything seen, merged by Chan et al. 1983.

    Args:
        shape: Shape of one observation.
        initial_variance: What the variance is before any data.
    """

    count: Tensor
    mean: Tensor
    variance: Tensor

    def __init__(self, shape: tuple[int, ...] = (), initial_variance: float = 1.0) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("variance", torch.full(shape, float(initial_variance), dtype=torch.float64))

    @torch.no_grad()
    def update(self, x: Tensor, reduce: Reduce = _identity) -> None:
        """Take in `x`, shape `[N, *shape]`; with `reduce`, the union of all ranks' `x`.

        Ranks merge what is new, not their totals, so nothing is counted twice.
        """
        x = x.to(self.mean.dtype)
        totals = reduce(torch.cat([x.new_tensor([x.shape[0]]), x.sum(0).flatten()]))
        count = totals[0]
        mean = (totals[1:] / count.clamp(min=1)).view_as(self.mean)
        squares = reduce((x - mean).square().sum(0))
        new_count = self.count + count
        weight = count / new_count.clamp(min=1)
        delta = mean - self.mean
        variance = (self.variance * self.count + squares) / new_count.clamp(min=1)
        variance += delta.square() * weight * (1 - weight)
        # Without a single row nothing changes, not even the initial variance; nor where an entry is not finite, or
        # the moments would be so for good.
        taken = (count > 0) & totals.isfinite().all() & squares.isfinite().all()
        self.variance.copy_(torch.where(taken, variance, self.variance))
        self.mean.copy_(torch.where(taken, self.mean + delta * weight, self.mean))
        self.count.copy_(torch.where(taken, new_count, self.count))

    def scale(self, epsilon: float) -> Tensor:
        """Return 1 / √(variance + epsilon)."""
        return (self.variance + epsilon).rsqrt()


class ObservationNormalizer(nn.Module):
    """Subtract the running mean, divide by the running deviation, clip.

    Args:
        shape: Shape of one observation.
        clip: Bound on the absolute normalised value.
        epsilon: Added to the variance.
        initial_variance: What the variance is before any data.
    """

    def __init__(
        self, shape: tuple[int, ...], clip: float = 10.0, epsilon: float = 1e-8, initial_variance: float = 1.0
    ) -> None:
        super().__init__()
        self.moments = RunningMoments(shape, initial_variance)
        self.clip = clip
        self.epsilon = epsilon

    def forward(self, observations: Tensor) -> Tensor:
        """Normalise observations `[..., *shape]`, in at least float32; with mean 0 before any data."""
        x = observations if observations.dtype == torch.float64 else observations.float()
        mean, scale = self.moments.mean.to(x.dtype), self.moments.scale(self.epsilon).to(x.dtype)
        return ((x - mean) * scale).clamp(-self.clip, self.clip)

    def update(self, observations: Tensor, reduce: Reduce = _identity) -> None:
        """Take in observations `[N, *shape]`."""
        self.moments.update(observations, reduce)


class NestedNormalizer(nn.Module):
    """An `ObservationNormalizer` for each of some leaves; the others stay as they are.

    Args:
        shapes: Shape of each of these leaves, by its path.
        **options: Those of each `ObservationNormalizer`.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], **options: float) -> None:
        super().__init__()
        self.paths = list(shapes)
        normalizers = {module_name(path): ObservationNormalizer(shape, **options) for path, shape in shapes.items()}
        self.leaves = nn.ModuleDict(normalizers)

    def forward(self, observations: Nested) -> Nested:
        """Normalise nested observations, leaves `[..., *shape]`."""
        return self._normalize(observations, "")

    def update(self, observations: Nested, reduce: Reduce = _identity) -> None:
        """Take in nested observations, leaves `[N, *shape]`."""
        for path in self.paths:
            self._of(path).update(part_at(observations, path), reduce)

    def _of(self, path: str) -> ObservationNormalizer:
        return cast(ObservationNormalizer, self.leaves[module_name(path)])

    def _normalize(self, x: Nested, path: str) -> Nested:
        if isinstance(x, dict):
            return {key: self._normalize(part, join(path, key)) for key, part in x.items()}
        if isinstance(x, tuple):
            return tuple(self._normalize(part, join(path, index)) for index, part in enumerate(x))
        return self._of(path)(x) if path in self.paths else x


class RewardNormalizer(_Statistics):
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

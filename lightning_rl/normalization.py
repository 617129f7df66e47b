"""Running moments as buffers, so that checkpoints, device moves and evaluation carry them.

Statistics are frozen while a rollout is collected and learned from, and take its data in afterwards: acting and updating
see the same function, and the importance ratio is 1 on arrival.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_rl.functional import reverse_scan

Reduce = Callable[[Tensor], Tensor]
"""Sums a tensor over all ranks."""


def _identity(x: Tensor) -> Tensor:
    return x


class RunningMoments(nn.Module):
    """Count, mean and population variance of everything seen, merged by Chan et al. 1983.

    Kept in float64 whatever the module's precision: a float32 count stops growing at 2^24.

    Args:
        shape: Shape of one observation.
    """

    count: Tensor
    mean: Tensor
    variance: Tensor

    def __init__(self, shape: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("variance", torch.ones(shape, dtype=torch.float64))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RunningMoments:
        """Follow moves between devices, but not casts."""
        device = fn(torch.empty(0, device=self.count.device)).device
        dtype = torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64
        for name, buffer in self._buffers.items():
            assert buffer is not None
            self._buffers[name] = buffer.to(device=device, dtype=dtype)
        return self

    @torch.no_grad()
    def update(self, x: Tensor, reduce: Reduce = _identity) -> None:
        """Take in `x`, shape `[N, *shape]`; with `reduce`, the union of all ranks' `x`.

        Ranks merge what is new, not their totals, so nothing is counted twice.
        """
        x = x.to(self.mean.dtype)
        total = torch.cat([x.new_tensor([x.shape[0]]), x.sum(0).flatten()])
        total = reduce(total)
        count, mean = total[0], (total[1:] / total[0]).view_as(self.mean)
        squares = reduce((x - mean).square().sum(0))
        new_count = self.count + count
        delta = mean - self.mean
        self.variance.mul_(self.count).add_(squares).add_(delta.square() * self.count * count / new_count).div_(
            new_count
        )
        self.mean.add_(delta * count / new_count)
        self.count.copy_(new_count)


class ObservationNormalizer(nn.Module):
    """Subtract the running mean, divide by the running deviation, clip.

    Args:
        shape: Shape of one observation.
        clip: Bound on the absolute normalised value.
        epsilon: Added to the variance.
    """

    def __init__(self, shape: tuple[int, ...], clip: float = 10.0, epsilon: float = 1e-8) -> None:
        super().__init__()
        self.moments = RunningMoments(shape)
        self.clip = clip
        self.epsilon = epsilon

    def forward(self, observations: Tensor) -> Tensor:
        """Normalise observations `[..., *shape]`; before any data they are only clipped."""
        mean = self.moments.mean.to(observations.dtype)
        scale = (self.moments.variance + self.epsilon).rsqrt().to(observations.dtype)
        return ((observations - mean) * scale).clamp(-self.clip, self.clip)

    def update(self, observations: Tensor, reduce: Reduce = _identity) -> None:
        """Take in observations `[N, *shape]`."""
        self.moments.update(observations, reduce)


class RewardNormalizer(nn.Module):
    """Divide rewards by the running deviation of the discounted return, and clip.

    As OpenAI Baselines and Gymnasium do: R[t] = r[t] + gamma · R[t-1], restarted with each episode.

    Args:
        gamma: Discount factor.
        clip: Bound on the absolute normalised reward.
        epsilon: Added to the variance.
    """

    discounted_return: Tensor

    def __init__(self, gamma: float, clip: float = 10.0, epsilon: float = 1e-8) -> None:
        super().__init__()
        self.moments = RunningMoments()
        self.gamma = gamma
        self.clip = clip
        self.epsilon = epsilon
        self.register_buffer("discounted_return", torch.zeros(0))

    def forward(self, rewards: Tensor) -> Tensor:
        """Normalise rewards of any shape; before any data they are only clipped."""
        scale = (self.moments.variance + self.epsilon).rsqrt().to(rewards.dtype)
        return (rewards * scale).clamp(-self.clip, self.clip)

    @torch.no_grad()
    def update(self, rewards: Tensor, ends: Tensor, valid: Tensor | None = None, reduce: Reduce = _identity) -> None:
        """Take in a rollout.

        Args:
            rewards: Raw rewards, shape `[T, B]`.
            ends: Whether the episode ended with the step, shape `[T, B]`.
            valid: Which entries are real steps, shape `[T, B]`; all of them if left out.
            reduce: Sums a tensor over all ranks.
        """
        if self.discounted_return.shape != rewards.shape[1:]:  # the first rollout, or another number of environments
            self.discounted_return = torch.zeros_like(rewards[0])
        keep = self.gamma * (~ends).to(rewards.dtype)
        decay = torch.cat([torch.ones_like(keep[:1]), keep[:-1]])
        returns = reverse_scan(rewards.flip(0), decay.flip(0), self.discounted_return.to(rewards.dtype)).flip(0)
        self.discounted_return = keep[-1] * returns[-1]
        self.moments.update(returns.flatten() if valid is None else returns[valid], reduce)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:  # noqa: ANN401
        """Accept the number of environments that the checkpoint was made with."""
        stored = state_dict.get(prefix + "discounted_return")
        if stored is not None:
            self.discounted_return = torch.empty_like(stored, device=self.discounted_return.device)
        super()._load_from_state_dict(state_dict, prefix, *args)

"""Running statistics that normalize observations and values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Self, cast, get_args

import torch
from torch import Tensor, nn

from lightning_rl.distributed import Reduce, _identity, exact_dtype
from lightning_rl.nested import Nested, join, module_name, part_at
from lightning_rl.validation import check, is_one_of

RewardScale = Literal["return_std", "reward_std"]
"""What rewards are divided by: the running deviation of the discounted return, or that of the rewards themselves."""


class ExactStates(nn.Module):
    """Base of modules without submodules whose statistics keep their precision, whatever that of the network is.

    A float32 count would stop at 2^24, and a bfloat16 count at 256.

    Attributes:
        stays_off: Types of devices that the statistics are not moved to.
    """

    stays_off: tuple[str, ...] = ()

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Self:  # noqa: ANN401
        """Follow moves between devices, but not casts: `to` calls only this private method of submodules."""

        def move(state: Tensor) -> Tensor:
            device = fn(torch.empty(0, device=state.device)).device
            return state if device.type in self.stays_off else state.to(device, exact_dtype(device))

        return super()._apply(move, *args, **kwargs)  # type: ignore[no-untyped-call, no-any-return]


class RunningMoments(ExactStates):
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


ValueNormalization = Literal["running_std", "popart"]


class ValueNormalizer(nn.Module):
    """The value head predicts returns over their running deviation; nothing is subtracted, as DI-engine's `value_norm`.

    When the deviation changes, so does what the head is taken to mean.

    Args:
        epsilon: Added to the variance.
    """

    def __init__(self, epsilon: float = 1e-8) -> None:
        super().__init__()
        self.moments = RunningMoments()
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """Return differences of values or returns, of any shape, in units of the head: as they are before any data."""
        return x * self.moments.scale(self.epsilon).to(x.dtype)

    def denormalize(self, outputs: Tensor) -> Tensor:
        """Return outputs of the head, of any shape, in units of return and at least float32."""
        outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        return outputs / self.moments.scale(self.epsilon).to(outputs.dtype)

    def update(self, returns: Tensor, heads: Sequence[nn.Linear], reduce: Reduce) -> None:
        """Take in returns `[N]`, now that they have been learned from; each of `heads` predicts such."""
        self.moments.update(returns, reduce)


class PopArt(ValueNormalizer):
    """The head predicts returns less their running mean, over their deviation (van Hasselt et al. 2016).

    When the moments change, its weights are rescaled such that every value stays what it was. The moments are those of
    all returns so far, in place of the paper's moving averages.
    """

    def denormalize(self, outputs: Tensor) -> Tensor:
        """Return outputs of the head, of any shape, in units of return and at least float32."""
        values = super().denormalize(outputs)
        return values + self.moments.mean.to(values.dtype)

    @torch.no_grad()
    def update(self, returns: Tensor, heads: Sequence[nn.Linear], reduce: Reduce) -> None:
        """Take in returns `[N]`, and rescale `heads`."""
        mean, deviation = self.moments.mean.clone(), 1 / self.moments.scale(self.epsilon)
        super().update(returns, heads, reduce)
        scale = self.moments.scale(self.epsilon)
        for head in heads:
            bias = (head.bias.to(mean.dtype) * deviation + mean - self.moments.mean) * scale
            head.weight.copy_(head.weight.to(mean.dtype) * deviation * scale)
            head.bias.copy_(bias)


def make_value_normalizer(kind: ValueNormalization | None) -> ValueNormalizer | None:
    """Return the normaliser of that name; None for None.

    Raises:
        ConfigurationError: There is none.
    """
    kinds = get_args(ValueNormalization)
    check(kind is None or is_one_of(kind, kinds), "value_normalization", kind, "null or one of " + ", ".join(kinds))
    if kind is None:
        return None
    return PopArt() if kind == "popart" else ValueNormalizer()

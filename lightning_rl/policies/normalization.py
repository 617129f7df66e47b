"""Running statistics that normalize observations and values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Self, cast

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from lightning_rl.distributed import all_reduce, exact_dtype
from lightning_rl.nested import Nested, map_paths, module_name, part_at, replace_leaves, space_leaves
from lightning_rl.spaces import is_image
from lightning_rl.validation import check, check_number, check_type

_ELEMENTS_AT_A_TIME = 2**20  # that are float64 at once: of a rollout of images all would take gigabytes

RewardScale = Literal["return_std", "reward_std"]
"""Divisor of rewards: the running standard deviation of the discounted return, or of the rewards themselves."""


class RunningMoments(nn.Module):
    """Running count, mean and population variance of rows `[N, *shape]`, merged by Chan et al. 1983.

    Buffers keep their precision when a network is cast: a float32 count would stop at 2^24, a bfloat16 one at 256.
    """

    count: Tensor
    mean: Tensor
    variance: Tensor

    def __init__(self, shape: tuple[int, ...] = (), initial_variance: float = 1.0) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("variance", torch.full(shape, float(initial_variance), dtype=torch.float64))

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Self:
        """Follow moves between devices, but not casts: `to` calls only this private method of submodules."""

        def move(state: Tensor) -> Tensor:
            device = fn(torch.empty(0, device=state.device)).device
            return state.to(device, exact_dtype(device))

        return super()._apply(move, *args, **kwargs)  # type: ignore[no-untyped-call, no-any-return]

    @torch.no_grad()
    def update(self, x: Tensor) -> None:
        """Merge the rows `x`, `[N, *shape]`, of all ranks, unless an entry is not finite; a collective call."""
        parts = torch.split(x, max(1, _ELEMENTS_AT_A_TIME // max(1, self.mean.numel())))

        def total(term: Callable[[Tensor], Tensor]) -> Tensor:
            return torch.stack([term(part.to(self.mean.dtype)).sum(0) for part in parts]).sum(0)

        totals = all_reduce(torch.cat([self.mean.new_tensor([len(x)]), total(lambda part: part).flatten()]))
        count = totals[0]
        mean = (totals[1:] / count.clamp(min=1)).view_as(self.mean)
        squares = all_reduce(total(lambda part: (part - mean).square()))
        new_count = self.count + count
        weight = count / new_count.clamp(min=1)
        delta = mean - self.mean
        variance = (self.variance * self.count + squares) / new_count.clamp(min=1)
        variance += delta.square() * weight * (1 - weight)
        # No rows leave the moments, and the initial variance, as they were.
        taken = (count > 0) & totals.isfinite().all() & squares.isfinite().all()
        self.variance.copy_(torch.where(taken, variance, self.variance))
        self.mean.copy_(torch.where(taken, self.mean + delta * weight, self.mean))
        self.count.copy_(torch.where(taken, new_count, self.count))

    def scale(self, epsilon: float) -> Tensor:
        # With an epsilon of 0, the scale of an entry that never changes would be infinite, and the entry 0 * inf.
        return (self.variance + max(epsilon, torch.finfo(torch.float32).tiny)).rsqrt()


class ObservationNormalizer(nn.Module):
    """Normalizes and clips by running mean and variance; see the option `observations` of `NormalizationConfig`."""

    def __init__(
        self, shape: tuple[int, ...], clip: float = 10.0, epsilon: float = 1e-8, initial_variance: float = 1.0
    ) -> None:
        super().__init__()
        self.moments = RunningMoments(shape, initial_variance)
        self.clip = clip
        self.epsilon = epsilon

    def forward(self, observations: Tensor) -> Tensor:
        """Normalize observations `[..., *shape]`, in at least float32."""
        dtype = torch.float64 if observations.dtype == torch.float64 else torch.float32
        mean, scale = self.moments.mean, self.moments.scale(self.epsilon).to(dtype)
        if observations.dtype not in (torch.int64, torch.int32):  # which may be large, such as times since 1970
            mean = mean.to(dtype)
        if observations.dtype is torch.bool:  # PyTorch refuses a difference
            observations = observations.to(dtype)
        return (observations - mean).to(dtype).mul_(scale).clamp_(-self.clip, self.clip)

    def update(self, observations: Tensor) -> None:
        self.moments.update(observations)


class NestedNormalizer(nn.Module):
    """An `ObservationNormalizer` for each leaf in `shapes`, by path; other leaves stay unchanged."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], **options: float) -> None:
        super().__init__()
        self.paths = list(shapes)
        normalizers = {module_name(path): ObservationNormalizer(shape, **options) for path, shape in shapes.items()}
        self.leaves = nn.ModuleDict(normalizers)

    def forward(self, observations: Nested) -> Nested:
        """Normalize nested observations, leaves `[..., *shape]`."""

        def normalize(path: str, x: Tensor) -> Tensor:
            return self.of(path)(x) if path in self.paths else x

        return map_paths(normalize, observations)

    def update(self, observations: Nested) -> None:
        for path in self.paths:
            self.of(path).update(part_at(observations, path))

    def of(self, path: str) -> ObservationNormalizer:
        return cast(ObservationNormalizer, self.leaves[module_name(path)])


def make_normalizer(
    space: spaces.Space[Any], given: Mapping[str, bool | float]
) -> tuple[ObservationNormalizer | NestedNormalizer, spaces.Space[Any]]:
    """Return a normalizer of every `Box`, with or without images, and the space of normalized observations.

    Raises:
        ConfigurationError: The space has no such `Box`, or an option is unknown or out of range.
    """
    options = dict(given)
    images = options.pop("images", False)
    check(isinstance(images, bool), "normalization.observations.images", images, "true or false")
    known = {"clip": {"above": 0}, "epsilon": {"at_least": 0}, "initial_variance": {"at_least": 0}}
    for name, value in options.items():
        expected = f"true, false or some of {', '.join(known)}, images"
        check(name in known, "normalization.observations", given, expected)
        check_number(f"normalization.observations.{name}", value, **known[name])
    found = {
        path: leaf
        for path, leaf in space_leaves(space).items()
        if isinstance(leaf, spaces.Box) and (images or not is_image(leaf))
    }
    without_images = "" if images else " that is no image can be normalized without 'images: true'"
    expected = f"False, since only a Box{without_images}, and {space} has none"
    check(bool(found), "normalization.observations", given or True, expected)
    normalizers = NestedNormalizer({path: leaf.shape for path, leaf in found.items()}, **options)
    for path, leaf in found.items():
        if is_image(leaf) and "initial_variance" not in options:  # divides by 255, as without normalization
            normalizers.of(path).moments.variance.fill_(255.0**2)

    def bounded(path: str, leaf: spaces.Space[Any]) -> spaces.Space[Any]:
        if path not in found:
            return leaf
        clip = normalizers.of(path).clip
        return spaces.Box(-clip, clip, leaf.shape, np.float32)

    return normalizers.of("") if "" in found else normalizers, replace_leaves(bounded, space)


ValueNormalization = Literal["running_std", "popart"]


class ValueNormalizer(nn.Module):
    """The value head predicts returns divided by their running standard deviation, as DI-engine's `value_norm`.

    The mean is not subtracted. A change of the standard deviation also changes the predicted values.
    """

    def __init__(self, epsilon: float = 1e-8) -> None:
        super().__init__()
        self.moments = RunningMoments()
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """Return differences of values or returns, of any shape, in units of the head."""
        return x * self.moments.scale(self.epsilon).to(x.dtype)

    def denormalize(self, outputs: Tensor) -> Tensor:
        """Return outputs of the head, of any shape, in units of return and at least float32."""
        outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        return outputs / self.moments.scale(self.epsilon).to(outputs.dtype)

    def update(self, returns: Tensor, heads: Sequence[nn.Linear]) -> None:
        """Merge valid returns `[N]` into the moments. `PopArt` also rescales the value `heads`."""
        self.moments.update(returns)


class PopArt(ValueNormalizer):
    """The value head predicts (return - mean) / standard deviation (van Hasselt et al. 2016).

    When the moments change, the weights of the head are rescaled so that its values stay the same. The moments are
    averages over all returns so far instead of the paper's moving averages.
    """

    def denormalize(self, outputs: Tensor) -> Tensor:
        """Return outputs of the head, of any shape, in units of return and at least float32."""
        values = super().denormalize(outputs)
        return values + self.moments.mean.to(values.dtype)

    @torch.no_grad()
    def update(self, returns: Tensor, heads: Sequence[nn.Linear]) -> None:
        """Merge returns `[N]` into the moments, and rescale `heads`."""
        mean, deviation = self.moments.mean.clone(), 1 / self.moments.scale(self.epsilon)
        super().update(returns, heads)
        scale = self.moments.scale(self.epsilon)
        for head in heads:
            bias = (head.bias.to(mean.dtype) * deviation + mean - self.moments.mean) * scale
            head.weight.copy_(head.weight.to(mean.dtype) * deviation * scale)
            head.bias.copy_(bias)


def make_value_normalizer(kind: ValueNormalization | None) -> ValueNormalizer | None:
    """Return the value normalizer of a kind; None for None."""
    check_type("normalization.values", kind, ValueNormalization | None)
    if kind is None:
        return None
    return PopArt() if kind == "popart" else ValueNormalizer()

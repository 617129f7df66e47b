"""Metrics of episodes and updates, summed over ranks by torchmetrics."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_rl.distributed import exact_dtype


def _plus(sums: Tensor, values: Sequence[Sequence[float]]) -> Tensor:
    """Return sums with the values of each added one by one: to the last digit the same in however many calls."""
    return sums.new_tensor([functools.reduce(operator.add, v, s) for s, v in zip(sums.tolist(), values, strict=True)])


class _Window(Metric):
    """A metric of what happened since the last log, which a checkpoint can take along.

    Its states keep their precision where the network is cast to bfloat16, which cannot even count beyond 256.
    """

    full_state_update = False

    def _apply(self, fn: Callable[[Tensor], Tensor], exclude_state: Sequence[str] = "") -> Self:
        """Follow moves between devices, but not casts, nor to XLA, which would compile for each number of values."""
        device = fn(torch.empty(0, device=self.device)).device
        if device.type == "xla":
            return self
        return super()._apply(lambda state: state.to(device, exact_dtype(device)), exclude_state)  # type: ignore[return-value]

    def snapshot(self) -> dict[str, Any]:
        """Return this rank's state as plain data."""
        states = {name: getattr(self, name).cpu().clone() for name in self._defaults}
        # Not how often: numbers may be taken in one by one or together.
        return {"states": states, "update_called": self.update_called}

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Take over what `snapshot` returned."""
        for name, value in snapshot["states"].items():
            setattr(self, name, value.to(getattr(self, name).device))
        was_updated = snapshot["update_count"] if "update_count" in snapshot else snapshot["update_called"]
        self._update_count = int(bool(was_updated))  # earlier checkpoints have a number


class EpisodeStatistics(_Window):
    """Mean, smallest and largest return and length of finished episodes, over all ranks.

    `compute` gives an empty dict where no episode has ended.
    """

    count: Tensor
    sums: Tensor
    minima: Tensor
    maxima: Tensor

    def __init__(self) -> None:
        super().__init__()
        # Entries of the vectors: return, length.
        self.add_state("count", torch.zeros((), dtype=torch.float64), "sum")
        self.add_state("sums", torch.zeros(2, dtype=torch.float64), "sum")
        self.add_state("minima", torch.full((2,), torch.inf, dtype=torch.float64), "min")
        self.add_state("maxima", torch.full((2,), -torch.inf, dtype=torch.float64), "max")

    def update(self, returns: Sequence[float], lengths: Sequence[int]) -> None:
        """Take in finished episodes."""
        if not returns:
            return
        values = torch.tensor([returns, lengths], dtype=self.sums.dtype, device=self.sums.device)
        # Not in place: what `Trainer.validate` left behind are inference tensors.
        self.count = self.count + values.shape[1]
        self.sums = _plus(self.sums, (returns, lengths))
        self.minima = torch.minimum(self.minima, values.amin(1))
        self.maxima = torch.maximum(self.maxima, values.amax(1))

    def compute(self) -> dict[str, float]:
        """Return `episode_return`, `episode_return_min`, `…_max`, `episode_length`, … and `episodes`."""
        count = float(self.count)
        if not count:
            return {}
        result = {}
        for row, name in enumerate(("episode_return", "episode_length")):
            result[name] = float(self.sums[row]) / count
            result[f"{name}_min"] = float(self.minima[row])
            result[f"{name}_max"] = float(self.maxima[row])
        return result | {"episodes": count}


class Total(_Window):
    """A sum over all ranks."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros((), dtype=torch.float64), "sum")

    def update(self, value: float) -> None:
        """Add a number."""
        self.total = self.total + value

    def compute(self) -> float:
        """Return the sum."""
        return float(self.total)


class Largest(_Window):
    """The largest of some numbers that are not negative, over all ranks."""

    largest: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("largest", torch.zeros((), dtype=torch.float64), "max")

    def update(self, value: float) -> None:
        """Take in a number."""
        self.largest = self.largest.clamp(min=value)

    def compute(self) -> float:
        """Return the largest."""
        return float(self.largest)


class ScalarMeans(_Window):
    """Means of named scalars over all ranks; a name that nothing was reported for is left out.

    Every rank must report the same names, if need be without values; in which order, and which of them first, is all
    the same, since they are kept in that of the alphabet.

    Args:
        names: Names known beforehand; others join when they are first reported.
    """

    sums: Tensor
    counts: Tensor

    def __init__(self, names: Sequence[str] = ()) -> None:
        super().__init__()
        self.names = list(names)
        self.add_state("sums", torch.zeros(len(names), dtype=torch.float64), "sum")
        self.add_state("counts", torch.zeros(len(names), dtype=torch.float64), "sum")

    def update(self, values: Mapping[str, Sequence[float]]) -> None:
        """Take in values, any number for each name."""
        # Ranks add up their vectors place by place. Older checkpoints have names in another order.
        names = sorted({*self.names, *values})
        if names != self.names:
            self._arrange(names)
        reported = [values.get(name, ()) for name in self.names]
        self.sums = _plus(self.sums, reported)
        self.counts = self.counts + self.counts.new_tensor([len(v) for v in reported])

    def _arrange(self, names: list[str]) -> None:
        """Have an entry for each of these names, in this order, with what is known of it."""
        for state in ("sums", "counts"):
            old: Tensor = getattr(self, state)
            known = dict(zip(self.names, old.tolist(), strict=True))
            setattr(self, state, old.new_tensor([known.get(name, 0.0) for name in names]))
            self._defaults[state] = old.new_zeros(len(names))
        self.names = names

    def count(self, name: str) -> int:
        """Return how many values of a scalar this rank has taken in."""
        return int(self.counts[self.names.index(name)])

    def compute(self) -> dict[str, float]:
        """Return the mean of each scalar that has values."""
        pairs = zip(self.names, self.sums.tolist(), self.counts.tolist(), strict=True)
        return {name: total / count for name, total, count in pairs if count}

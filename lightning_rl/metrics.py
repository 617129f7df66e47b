"""Metrics of episodes and updates, summed over ranks by torchmetrics."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torchmetrics import Metric


class EpisodeStatistics(Metric):
    """Mean, smallest and largest return and length of finished episodes, over all ranks.

    `compute` gives an empty dict where no episode has ended.
    """

    full_state_update = False
    count: Tensor
    sums: Tensor
    minima: Tensor
    maxima: Tensor

    def __init__(self) -> None:
        super().__init__()
        # Rows of the vectors: return, length. float64, since sums of returns outgrow float32.
        self.add_state("count", torch.zeros((), dtype=torch.float64), "sum")
        self.add_state("sums", torch.zeros(2, dtype=torch.float64), "sum")
        self.add_state("minima", torch.full((2,), torch.inf, dtype=torch.float64), "min")
        self.add_state("maxima", torch.full((2,), -torch.inf, dtype=torch.float64), "max")

    def update(self, returns: Sequence[float], lengths: Sequence[int]) -> None:
        """Take in finished episodes."""
        if not returns:
            return
        values = torch.tensor([returns, lengths], dtype=torch.float64, device=self.sums.device)
        self.count += values.shape[1]
        self.sums += values.sum(1)
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


class ScalarMeans(Metric):
    """Means of named scalars over all ranks; a name that nothing was reported for is left out.

    Args:
        names: The scalars' names, the same on every rank.
    """

    full_state_update = False
    sums: Tensor
    counts: Tensor

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self.names = list(names)
        self.add_state("sums", torch.zeros(len(names), dtype=torch.float64), "sum")
        self.add_state("counts", torch.zeros(len(names), dtype=torch.float64), "sum")

    def update(self, values: Sequence[Sequence[float]]) -> None:
        """Take in values, a list of any length for each name."""
        sums, counts = [sum(v) for v in values], [len(v) for v in values]
        self.sums += torch.tensor(sums, dtype=torch.float64, device=self.sums.device)
        self.counts += torch.tensor(counts, dtype=torch.float64, device=self.sums.device)

    def compute(self) -> dict[str, float]:
        """Return the mean of each scalar that has values."""
        pairs = zip(self.names, self.sums.tolist(), self.counts.tolist(), strict=True)
        return {name: total / count for name, total, count in pairs if count}

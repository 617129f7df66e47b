"""What an algorithm asks of all ranks together: sums and means, moments, weights of minibatches."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.nn import functional

from lightning_rl.distributed import exact_dtype
from lightning_rl.functional import explained_variance, normalize_rows
from lightning_rl.rollouts.batch import Batch


class OverRanks(LightningModule):
    """A module whose ranks talk to each other; all of them make the same calls in the same order.

    With one rank, or without a Trainer, nobody is asked.
    """

    @property
    def world_size(self) -> int:
        """Number of ranks that learn together; 1 without a Trainer."""
        return 1 if self._trainer is None else self._trainer.world_size

    def all_reduce(self, x: Tensor, operation: Literal["sum", "max"] = "sum") -> Tensor:
        """Return the sum of `x` over all ranks, or the largest."""
        if self.world_size == 1:
            return x
        # Not `Trainer.strategy.reduce`: it has the ranks wait for each other first, and writes over `x`. Every strategy
        # that trains several ranks here has this process group.
        result = x.detach().clone()
        torch.distributed.all_reduce(result, getattr(torch.distributed.ReduceOp, operation.upper()))
        return result

    def of_ranks(self, x: Tensor) -> Tensor:
        """Return what each rank has as `x`, `[ranks, ...]`."""
        if self.world_size == 1:
            return x.unsqueeze(0)
        gathered = x.new_zeros(self.world_size, *x.shape)
        gathered[self.global_rank] = x
        return self.all_reduce(gathered)

    def rows_of_ranks(self, x: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """Return the rows of all ranks, `[M]`, rank by rank, and the numbers of rows before and after this rank's.

        Args:
            x: Of this rank, `[N]`, without gradient; N may be another on each rank.
        """
        if self.world_size == 1:
            return x, (0, 0)
        counts = [int(count) for count in self.of_ranks(torch.tensor(len(x), device=x.device)).tolist()]
        before, after = sum(counts[: self.global_rank]), sum(counts[self.global_rank + 1 :])
        # The rows of other ranks are 0 until they are added up.
        return self.all_reduce(functional.pad(x, (before, after))), (before, after)

    def average_over_ranks(self, x: Tensor) -> Tensor:
        """Return the mean of `x` over all ranks."""
        return self.all_reduce(x) / self.world_size

    def over_ranks(self, mean: Tensor) -> Tensor:
        """Return a rank's share of a mean (what `Batch.mean` gives) as the mean of all ranks, with the rank's gradient.

        For terms that are not linear in a mean: averaged over ranks, their gradient is that of the term of the mean.
        """
        if self.world_size == 1:
            return mean
        return mean + (self.average_over_ranks(mean.detach()) - mean.detach())

    def moments(self, parts: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return number, mean and sum of squared deviations of the entries of each part, of all ranks, `[parts]` each.

        Ranks talk to each other once, by the formula of Chan et al., 1979, which puts together what each of them
        computes around its own mean.

        Args:
            parts: Of this rank, `[N]` each; N may be another for each of them, and on each rank.
        """
        counts = parts[0].new_tensor([len(part) for part in parts])
        means = torch.stack([part.sum() for part in parts]) / counts.clamp(min=1)
        squares = torch.stack([(part - mean).square().sum() for part, mean in zip(parts, means, strict=True)])
        counts, means, squares = self.of_ranks(torch.stack([counts, means, squares])).unbind(1)
        total = counts.sum(0)
        mean = (counts * means).sum(0) / total.clamp(min=1)
        return total, mean, (squares + counts * (means - mean).square()).sum(0)

    def normalize_each(self, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return `(x - mean) / (standard deviation + 1e-8)` of each part, taken over its entries on all ranks.

        Override it to normalise advantages in another way.

        Args:
            parts: Of this rank, `[N]` each: those of all minibatches of a pass, or of one. N may be another for each of
                them, and on each rank; these talk to each other once.
        """
        if self.world_size == 1:
            same = (list(some) for _, some in itertools.groupby(parts, key=len))
            return [part for some in same for part in normalize_rows(torch.stack(some)).unbind()]
        # In float64 equal entries have exactly their own mean, so that they become 0 rather than noise.
        exact = [part.to(exact_dtype(part.device)) for part in parts]
        counts, means, squares = self.moments(exact)
        scales = (squares / (counts - 1).clamp(min=1)).sqrt() + 1e-8
        return [
            ((x - means[k]) / scales[k]).to(part.dtype) for k, (x, part) in enumerate(zip(exact, parts, strict=True))
        ]

    def explained_variance(self, predictions: Tensor, targets: Tensor) -> Tensor:
        """Return `1 - Var[target - prediction] / Var[target]`, taken over the entries of all ranks."""
        if self.world_size == 1:
            return explained_variance(predictions, targets)
        dtype = exact_dtype(targets.device)
        _, _, (unexplained, total) = self.moments([(targets - predictions).to(dtype), targets.to(dtype)])
        return torch.where(total > 0, 1 - unexplained / total, torch.nan)

    def set_global_weights(self, parts: Sequence[Batch]) -> None:
        """Set what each row of some minibatches counts for, so that `Batch.mean` is over the rows of all ranks.

        That is 0 where no rank has a row that counts; with one rank it is what they have anyway.
        """
        if self.world_size > 1:
            own = [float(part.total_weight) for part in parts]
            totals = self.all_reduce(torch.tensor(own, dtype=exact_dtype(self.device), device=self.device)).tolist()
            for part, total in zip(parts, totals, strict=True):
                part.weight = self.world_size / total if total else 0.0

    def has_rows(self, part: Batch) -> bool:
        """Return whether any rank has a row that counts in a minibatch that `set_global_weights` has seen.

        A step of Adam without any would go on along the moments that earlier ones have left.
        """
        return part.weight != 0

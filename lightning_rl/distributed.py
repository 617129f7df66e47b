"""Communication between the ranks of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional

_ON_THE_CPU: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""Of each group of all ranks the one of the same ranks that has nothing to do with devices."""


def gather_ranks(state: Any) -> list[Any]:  # noqa: ANN401 - whatever ranks have to say
    """Return the `state` of every rank, in their order; a collective call."""
    if world_size() == 1:
        return [state]
    states: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(states, state)
    return states


def gather_on_rank_zero(state: Any) -> list[Any]:  # noqa: ANN401 - whatever a file may hold
    """Return the `state` of every rank, in their order, on rank 0, which writes files, and nothing on others.

    A collective call, for what may be large: it goes from CPU to CPU. With NCCL it would need room on every GPU, and
    `gather_ranks` room for that of all ranks.
    """
    if world_size() == 1:
        return [state]
    is_first = torch.distributed.get_rank() == 0
    states: list[Any] | None = [None] * torch.distributed.get_world_size() if is_first else None
    torch.distributed.gather_object(state, states, dst=0, group=_group_on_the_cpu())
    return states or []


def _group_on_the_cpu() -> Any:  # noqa: ANN401 - a `ProcessGroup`, which not every build of PyTorch has
    """Return a group of all ranks that talk by Gloo, made once for each group of them; a collective call then."""
    everyone = torch.distributed.group.WORLD
    if torch.distributed.get_backend() == "gloo":
        return everyone
    if everyone not in _ON_THE_CPU:
        _ON_THE_CPU[everyone] = torch.distributed.new_group(backend="gloo")
    return _ON_THE_CPU[everyone]


Reduce = Callable[[Tensor], Tensor]
"""Sums a tensor over all ranks."""


def world_size() -> int:
    """Return the number of ranks that learn together; 1 without a process group."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 1
    return torch.distributed.get_world_size()


def all_reduce(x: Tensor, operation: Literal["sum", "max"] = "sum") -> Tensor:
    """Return the sum of `x` over all ranks, or the largest; a collective call."""
    if world_size() == 1:
        return x
    # Not `Trainer.strategy.reduce`: it has the ranks wait for each other first, and writes over `x`.
    result = x.detach().clone()
    torch.distributed.all_reduce(result, getattr(torch.distributed.ReduceOp, operation.upper()))
    return result


def average(x: Tensor) -> Tensor:
    """Return the mean of `x` over all ranks; a collective call."""
    return all_reduce(x) / world_size()


def mean_of_all_ranks(mean: Tensor) -> Tensor:
    """Return a rank's share of a mean (what `Batch.mean` gives) as the mean of all ranks, with the rank's gradient.

    For terms that are not linear in a mean: averaged over ranks, their gradient is that of the term of the mean.
    """
    if world_size() == 1:
        return mean
    return mean + (average(mean.detach()) - mean.detach())


def gather_tensors(x: Tensor) -> Tensor:
    """Return what each rank has as `x`, `[ranks, ...]`; a collective call."""
    if world_size() == 1:
        return x.unsqueeze(0)
    gathered = x.new_zeros(world_size(), *x.shape)
    gathered[torch.distributed.get_rank()] = x
    return all_reduce(gathered)


def gather_rows(x: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """Return the rows of all ranks, `[M]`, rank by rank, and the numbers of rows before and after this rank's.

    Args:
        x: Of this rank, `[N]`, without gradient; N may be another on each rank.
    """
    if world_size() == 1:
        return x, (0, 0)
    rank = torch.distributed.get_rank()
    counts = [int(count) for count in gather_tensors(torch.tensor(len(x), device=x.device)).tolist()]
    before, after = sum(counts[:rank]), sum(counts[rank + 1 :])
    # The rows of other ranks are 0 until they are added up.
    return all_reduce(functional.pad(x, (before, after))), (before, after)


def moments(parts: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return number, mean and sum of squared deviations of the entries of each part, of all ranks, `[parts]` each.

    Ranks talk to each other once, by the formula of Chan et al., 1979, which puts together what each of them computes
    around its own mean.

    Args:
        parts: Of this rank, `[N]` each; N may be another for each of them, and on each rank.
    """
    counts = parts[0].new_tensor([len(part) for part in parts])
    means = torch.stack([part.sum() for part in parts]) / counts.clamp(min=1)
    squares = torch.stack([(part - mean).square().sum() for part, mean in zip(parts, means, strict=True)])
    counts, means, squares = gather_tensors(torch.stack([counts, means, squares])).unbind(1)
    total = counts.sum(0)
    mean = (counts * means).sum(0) / total.clamp(min=1)
    return total, mean, (squares + counts * (means - mean).square()).sum(0)


def _identity(x: Tensor) -> Tensor:
    return x


def exact_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype to keep statistics in: float64, or float32 where a device has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64

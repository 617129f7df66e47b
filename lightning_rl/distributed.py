"""Communication between the ranks of a run, and their common end where one of them fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional

# Seconds that the ranks started by this one get before they are ended by force: to say what happened to them; and to
# notice on their own that this one is about to end, which those that wait for it in a collective call do not.
_TO_SAY, _TO_NOTICE = 10.0, 2.0
# Of a rank that another one started, that one.
_PARENT = os.getppid()
_CLAIM = "lightning_rl/failed"
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


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and those that led to it, each once: one that is raised twice may be its own cause."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        yield error
        seen.add(id(error))
        error = error.__cause__ or error.__context__


class RankFailure(RuntimeError):
    """Another rank is gone and did not say why."""


def end_all_ranks(error: Exception, children: list[subprocess.Popen[bytes]]) -> None:
    """End this rank and those it started because of an error; return on the one rank that reports it.

    The first rank to fail reports. What fails on every rank, such as a gradient that is not finite, is reported once,
    and a lost connection only if the other rank was killed.

    Args:
        error: What was raised on this rank.
        children: Processes of the ranks that this one started; none where something else did.

    Raises:
        SystemExit: Another rank reports.
        RankFailure: Another rank is gone without a report.
    """
    lost = "the connection to another rank was lost: it was killed, or its own error says more"
    # Held until the others have ended: the first rank serves it.
    everyone: Any = torch.distributed.group.WORLD
    store = everyone.get_group_store()
    started = list(children)
    children.clear()  # or Lightning's observer would kill this process as soon as it sees one of them end
    if torch.distributed.get_rank() > 0 and os.getppid() != _PARENT:
        raise RankFailure(lost) from error  # calling the store of a rank that was killed prints pages
    try:
        is_first = store.add(_CLAIM, 1) == 1
    except RuntimeError:  # the first rank, which serves the store, is gone
        raise RankFailure(lost) from error
    codes = _wait(started, _TO_NOTICE if is_first else _TO_SAY)
    if not is_first:
        sys.exit(1)
    for rank, code in enumerate(codes, start=1):
        if code < 0:
            raise RankFailure(f"rank {rank} was killed by {signal.Signals(-code).name}") from error


def _wait(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> list[int]:
    """Return the exit codes of processes once they have ended; kill those that take too long."""
    deadline = time.monotonic() + seconds
    codes = []
    for process in processes:
        try:
            codes.append(process.wait(max(0.0, deadline - time.monotonic())))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            codes.append(0)  # it did not fail, it was made to end
    return codes

"""Communication between the ranks of a run, and how all ranks end if one fails."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional

from lightning_rl.validation import ExplainedError

# Seconds that the child ranks get before they are killed: to report their error, or to notice that this rank reports.
_SECONDS_TO_REPORT, _SECONDS_TO_NOTICE = 10.0, 2.0
# Process that started this one, if this is the rank of a subprocess launcher.
_PARENT = os.getppid()
_CLAIM = "lightning_rl/failed"
_GLOO_GROUPS: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""Gloo group of all ranks, by the default group."""


def _has_process_group() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _xla() -> Any:  # a module
    """Return `torch_xla` if this process computes on XLA devices without a process group, else None."""
    if torch.compiler.is_compiling():  # never on XLA devices; tracing `sys.modules` takes a sixth of a capture
        return None
    module: Any = sys.modules.get("torch_xla")
    # `_xla_runtime_is_initialized` is private (torch_xla 2.9). Without it, `runtime.world_size` would store a 1 in the
    # process that launches the ranks, and the ranks would inherit it.
    if module is None or _has_process_group() or not module._XLAC._xla_runtime_is_initialized():
        return None
    return module


def world_size() -> int:
    """Return the number of ranks: processes of a process group, or XLA devices."""
    if _has_process_group():
        return torch.distributed.get_world_size()
    return 1 if (xla := _xla()) is None else int(xla.runtime.world_size())


def global_rank() -> int:
    """Return the number of this rank, from 0; needs more than one rank."""
    return torch.distributed.get_rank() if _has_process_group() else int(_xla().runtime.global_ordinal())


def gather_ranks(state: Any) -> list[Any]:  # any picklable object
    """Return the `state` of every rank, in order; a collective call."""
    if world_size() == 1:
        return [state]
    if _has_process_group():
        states: list[Any] = [None] * world_size()
        torch.distributed.all_gather_object(states, state)
        return states
    data = torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)
    longest = int(all_reduce(torch.tensor(len(data)), "max"))
    # Each length is compiled, so there are few of them. `pickle` ignores the padding.
    padded = functional.pad(data, (0, 2 ** (longest - 1).bit_length() - len(data)))
    return [pickle.loads(one.numpy().tobytes()) for one in gather_tensors(padded)]


def gather_on_rank_zero(state: Any) -> list[Any]:  # any picklable object
    """Return the `state` of every rank, in order, on rank 0, and an empty list on other ranks; a collective call.

    Process groups send the state from CPU to CPU with Gloo: NCCL would need memory on every GPU for a large state.
    """
    if world_size() == 1:
        return [state]
    is_first = global_rank() == 0
    if not _has_process_group():
        states = gather_ranks(state)
        return states if is_first else []
    group: Any = torch.distributed.group.WORLD
    if torch.distributed.get_backend() != "gloo":
        if group not in _GLOO_GROUPS:
            _GLOO_GROUPS[group] = torch.distributed.new_group(backend="gloo")
        group = _GLOO_GROUPS[group]
    if not is_first:
        torch.distributed.send_object_list([state], dst=0, group=group)
        return []
    states = [state]
    for rank in range(1, world_size()):  # one by one: `gather_object` needs memory for several copies of all states
        torch.distributed.recv_object_list(received := [None], src=rank, group=group)
        states += received
    return states


def all_reduce(x: Tensor, operation: Literal["sum", "max"] = "sum") -> Tensor:
    """Return the sum or maximum of `x` over all ranks, on the device of `x`; a collective call."""
    if world_size() == 1:
        return x
    # Not `Trainer.strategy.reduce`, which waits at a barrier first, overwrites `x`, and has no maximum on XLA.
    if (xla := _xla()) is not None:
        result: Tensor = xla.core.xla_model.all_reduce(operation, x.detach().to(xla.device()))
        return result.to(x.device)
    result = x.detach().clone()
    torch.distributed.all_reduce(result, getattr(torch.distributed.ReduceOp, operation.upper()))
    return result


def average(x: Tensor) -> Tensor:
    """Return the mean of `x` over all ranks; a collective call."""
    return all_reduce(x) / world_size()


def mean_of_all_ranks(mean: Tensor) -> Tensor:
    """Return the mean over all ranks of `Batch.mean`, with the gradient of this rank's share.

    For terms that are not linear in a mean: the average of their gradients over ranks is the gradient of the term of
    the global mean.
    """
    if world_size() == 1:
        return mean
    return mean + (average(mean.detach()) - mean.detach())


def gather_tensors(x: Tensor) -> Tensor:
    """Return `x` of every rank, `[ranks, ...]`; a collective call."""
    if world_size() == 1:
        return x.unsqueeze(0)
    # The rank enters as a tensor, not as an index: XLA needs the same graph on every rank.
    is_own = (torch.arange(world_size()) == global_rank()).to(x.device)
    return all_reduce(torch.where(is_own.view(-1, *[1] * x.dim()), x, 0))


def gather_rows(x: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """Return the rows of all ranks by rank, `[M]`, and the number of rows of the ranks before and after this one.

    `x` are the rows of this rank, `[N]`, without gradient; N may differ between ranks.
    """
    if world_size() == 1:
        return x, (0, 0)
    rank = global_rank()
    counts = [int(count) for count in gather_tensors(torch.tensor(len(x), device=x.device)).tolist()]
    padded = gather_tensors(functional.pad(x, (0, max(counts) - len(x))))
    rows = torch.cat([row[:count] for row, count in zip(padded, counts, strict=True)])
    return rows, (sum(counts[:rank]), sum(counts[rank + 1 :]))


def moments(parts: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return number, mean and sum of squared deviations of the entries of each part over all ranks, `[parts]` each.

    Parts are `[N]`; N may differ between parts and ranks. One collective call (formula of Chan et al., 1979).
    """
    counts = parts[0].new_tensor([len(part) for part in parts])
    # An entry is subtracted first, so that equal entries give exact zeros although their mean is rounded.
    firsts = torch.stack([part[0] if len(part) else part.sum() for part in parts])
    shifted = [part - first for part, first in zip(parts, firsts, strict=True)]
    pairs = [torch.var_mean(part, correction=0) if len(part) else (part.sum(), part.sum()) for part in shifted]
    variances, means = map(torch.stack, zip(*pairs, strict=True))
    counts, means, squares = gather_tensors(torch.stack([counts, firsts + means, counts * variances])).unbind(1)
    total, origin = counts.sum(0), means.gather(0, counts.argmax(0, keepdim=True))
    deviation = (counts * (means - origin)).sum(0) / total.clamp(min=1)
    return total, origin[0] + deviation, (squares + counts * (means - origin - deviation).square()).sum(0)


def exact_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of statistics: float64, or float32 on devices without float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and its causes that no `from None` hides, each once: one raised twice may be its own cause."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        yield error
        seen.add(id(error))
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


class RankFailure(ExplainedError, RuntimeError):
    """Another rank has ended without reporting an error."""


def end_all_ranks(error: Exception, children: list[subprocess.Popen[bytes]]) -> None:
    """End this rank and its `children`, the ranks that it started; return only on the rank that reports the error.

    Returns at once without a process group. The first rank that fails reports. So an error of all ranks, such as a
    non-finite gradient, is reported once, and a lost connection only if the other rank was killed.

    Raises:
        SystemExit: Another rank reports.
        RankFailure: Another rank has ended without a report.
    """
    if not _has_process_group():
        return
    lost = "the connection to another rank was lost: it was killed, or its own error says more"
    everyone: Any = torch.distributed.group.WORLD
    store = everyone.get_group_store()  # the reference keeps the server of rank 0 alive
    started = list(children)
    children.clear()  # or Lightning's observer would kill this process as soon as a child ends
    if torch.distributed.get_rank() > 0 and os.getppid() != _PARENT:
        raise RankFailure(lost) from error  # calling the store of a killed rank prints pages
    try:
        is_first = store.add(_CLAIM, 1) == 1
    except RuntimeError:  # rank 0 has ended
        raise RankFailure(lost) from error
    codes = _wait(started, _SECONDS_TO_NOTICE if is_first else _SECONDS_TO_REPORT)
    if not is_first:
        sys.exit(1)
    for rank, code in enumerate(codes, start=1):
        if code < 0:
            raise RankFailure(f"rank {rank} was killed by {signal.Signals(-code).name}") from error
        if code > 1:  # 1 is the status of a rank that noticed this one's error
            raise RankFailure(f"rank {rank} ended with exit code {code}") from error


def leave_process_group() -> None:
    """End the threads of Gloo, which would abort the interpreter at its end and change the exit status."""
    if _has_process_group():
        torch.distributed.destroy_process_group()


def _wait(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> list[int]:
    deadline = time.monotonic() + seconds
    codes = []
    for process in processes:
        try:
            codes.append(process.wait(max(0.0, deadline - time.monotonic())))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            codes.append(0)
    return codes

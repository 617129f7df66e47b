"""Communication between the ranks of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

_ON_THE_CPU: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""Of each group of all ranks the one of the same ranks that has nothing to do with devices."""


def gather_ranks(state: Any) -> list[Any]:  # noqa: ANN401 - whatever ranks have to say
    """Return the `state` of every rank, in their order; a collective call."""
    if not _are_several():
        return [state]
    states: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(states, state)
    return states


def gather_on_rank_zero(state: Any) -> list[Any]:  # noqa: ANN401 - whatever a file may hold
    """Return the `state` of every rank, in their order, on rank 0, which writes files, and nothing on others.

    A collective call, for what may be large: it goes from CPU to CPU. With NCCL it would need room on every GPU, and
    `gather_ranks` room for that of all ranks.
    """
    if not _are_several():
        return [state]
    is_first = torch.distributed.get_rank() == 0
    states: list[Any] | None = [None] * torch.distributed.get_world_size() if is_first else None
    torch.distributed.gather_object(state, states, dst=0, group=_group_on_the_cpu())
    return states or []


def _are_several() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


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


def _identity(x: Tensor) -> Tensor:
    return x


def exact_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype to keep statistics in: float64, or float32 where a device has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64

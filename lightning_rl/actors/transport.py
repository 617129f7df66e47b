"""Rollouts on their way from one process to another, as one block of memory and a plain description of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_rl.nested import Nested, leaves, map_leaves
from lightning_rl.rollouts.rollout import EpisodeSummary, Rollout

# Up to here what a pipe costs is less than the handing over of shared memory, which takes a connection for each block.
_MAX_IN_PIPE = 2**18
_ALIGNMENT = 16


@dataclass(frozen=True)
class _Place:
    """Where in the block a tensor is."""

    begin: int
    end: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class PackedRollout:
    """A rollout that can be sent: a few plain objects, whatever number of tensors it has.

    Attributes:
        block: The bytes of all tensors; where they are many, in shared memory.
        fields: By name, nested as in the rollout, where each tensor is.
        plain: The attributes that are no tensors.
        episodes: Returns and lengths of the episodes that ended in it.
        actor: Which one collected it.
    """

    block: Tensor | bytearray
    fields: dict[str, Nested]
    plain: dict[str, Any]
    episodes: tuple[list[float], list[int]]
    actor: int


_PLAIN = ("policy_version", "burn_in", "infos", "info_names", "failures", "frames", "seconds", "parts_of_seconds")


def pack(rollout: Rollout, actor: int = 0, share: bool = True) -> PackedRollout:
    """Copy a rollout on the CPU into one block.

    Args:
        rollout: Whose storage may be used again afterwards.
        actor: Which one collected it.
        share: Put a large block into memory that processes of this machine share.
    """
    tensors, end = rollout.tensors(), 0

    def place(x: Tensor) -> _Place:
        nonlocal end
        begin = -(-end // _ALIGNMENT) * _ALIGNMENT
        end = begin + x.numel() * x.element_size()
        return _Place(begin, end, tuple(x.shape), x.dtype)

    fields = map_leaves(place, tensors)
    block: Tensor | bytearray = bytearray(end)
    if share and end > _MAX_IN_PIPE:
        block = torch.empty(end, dtype=torch.uint8).share_memory_()  # type: ignore[no-untyped-call]
    flat = _flat(block)
    for there, x in zip(leaves(fields), leaves(tensors), strict=True):
        _view(flat, there).copy_(x)
    plain = {name: getattr(rollout, name) for name in _PLAIN}
    return PackedRollout(block, fields, plain, (rollout.episodes.returns, rollout.episodes.lengths), actor)


def unpack(packed: PackedRollout) -> Rollout:
    """Return the rollout that was packed; its tensors are views of the block."""
    flat, plain = _flat(packed.block), dict(packed.plain)
    late = {name: plain.pop(name) for name in ("info_names", "failures", "frames", "parts_of_seconds")}
    fields = map_leaves(lambda place: _view(flat, place), packed.fields)
    rollout = Rollout(**fields, **plain, episodes=EpisodeSummary(*packed.episodes))
    for name, value in late.items():
        setattr(rollout, name, value)
    rollout.actor = packed.actor
    return rollout


def _flat(block: Tensor | bytearray) -> Tensor:
    return block if isinstance(block, Tensor) else torch.frombuffer(block, dtype=torch.uint8)


def _view(flat: Tensor, place: _Place) -> Tensor:
    return flat[place.begin : place.end].view(place.dtype).view(place.shape)

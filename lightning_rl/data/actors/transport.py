"""Rollouts and weights in shared memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from multiprocessing.context import BaseContext
from typing import Any

import torch
from torch import Tensor, nn

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


# Where PyTorch's own allocator would begin a tensor, at the least.
_WEIGHT_ALIGNMENT = 64
# Seconds for which an actor may keep the learner from publishing: it copies one block of memory meanwhile.
_PATIENCE = 30.0
# Seconds after which a learner that waits for the lock checks its actors again.
_LOOK_EVERY = 0.5


class WeightsLocked(RuntimeError):
    """The weights cannot be published, since an actor that was reading them never finished."""


class SharedWeights:
    """Parameters and buffers of a policy in one block of shared memory, with the version they are of.

    A lock keeps readers from seeing a block that is only half written. Neither side holds it for longer than one copy
    of the block takes.

    Args:
        policy: Whose tensors there is room for.
        context: In which the actors' processes are started.
    """

    def __init__(self, policy: nn.Module, context: BaseContext) -> None:
        self._block = torch.zeros(_places(policy)[1], dtype=torch.uint8).share_memory_()  # type: ignore[no-untyped-call]
        self._version = torch.full((1,), -1).share_memory_()  # type: ignore[no-untyped-call]
        self._lock = context.Lock()
        # What the learner gathers the weights in; made at the first use, and the learner's alone.
        self._gathered: WeightsCopy | None = None

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_gathered": None}

    def publish(self, policy: nn.Module, version: int, while_locked: Callable[[], None] = lambda: None) -> None:
        """Make a policy, on any device, the one that actors act with from their next rollout on.

        Args:
            policy: Like the one that this was made for.
            version: Number of updates it has seen.
            while_locked: Called about twice a second while an actor holds the lock; what it raises ends the wait.

        Raises:
            WeightsLocked: An actor died while it was reading.
        """
        if self._gathered is None:
            self._gathered = WeightsCopy(policy)
        block = self._gathered.take(policy)
        deadline = time.monotonic() + _PATIENCE
        while not self._lock.acquire(timeout=min(_LOOK_EVERY, _PATIENCE)):
            while_locked()
            if time.monotonic() > deadline:
                raise WeightsLocked(f"the policy could not be published within {_PATIENCE:g} seconds")
        try:
            self._block.copy_(block)
            self._version.fill_(version)
        finally:
            self._lock.release()

    def reader(self, policy: nn.Module) -> WeightsReader:
        """Return what keeps a policy of this process up to date.

        Args:
            policy: On the CPU; its tensors are moved into one block of their own.
        """
        return WeightsReader(self, policy)

    def read(self, block: Tensor) -> int:
        """Copy what was published last, and return its version."""
        with self._lock:
            block.copy_(self._block)
            return int(self._version)


class WeightsReader:
    """Keeps a policy in this process at what the learner has published.

    Args:
        weights: To read from.
        policy: Whose tensors become views of one block, so that a copy of the block changes them all.
    """

    def __init__(self, weights: SharedWeights, policy: nn.Module) -> None:
        self._weights = weights
        self._block = move_into_one_block(policy)

    def refresh(self) -> int:
        """Take over the weights of the newest version, all of them, and return that version."""
        return self._weights.read(self._block)


class WeightsCopy:
    """Room for the parameters and buffers of a policy, one after another in one block of this process's memory.

    Args:
        policy: Whose tensors there is room for.
    """

    def __init__(self, policy: nn.Module) -> None:
        self._block = torch.zeros(_places(policy)[1], dtype=torch.uint8)
        self._views = _views(policy, self._block)

    def take(self, policy: nn.Module) -> Tensor:
        """Copy the weights of such a policy, on any device, and return the block: bytes, the same ones each time."""
        with torch.no_grad():
            for view, x in zip(self._views, _tensors(policy), strict=True):
                view.copy_(x)
        return self._block


def move_into_one_block(policy: nn.Module) -> Tensor:
    """Make the tensors of a policy on the CPU parts of one block, laid out as in `WeightsCopy`, and return that."""
    block = torch.zeros(_places(policy)[1], dtype=torch.uint8)
    for view, x in zip(_views(policy, block), _tensors(policy), strict=True):
        view.copy_(x.detach())
        x.data = view
    return block


def _tensors(policy: nn.Module) -> list[Tensor]:
    return list(chain(policy.parameters(), policy.buffers()))


def _places(policy: nn.Module) -> tuple[list[int], int]:
    """Return where in a block each tensor begins, and how many bytes the block has."""
    places, end = [], 0
    for x in _tensors(policy):
        places.append(end)
        size = x.numel() * x.element_size()
        end += -(-size // _WEIGHT_ALIGNMENT) * _WEIGHT_ALIGNMENT
    return places, end


def _views(policy: nn.Module, block: Tensor) -> list[Tensor]:
    """Return the parts of a block, each with shape and dtype of the tensor that it is for."""
    parts = zip(_places(policy)[0], _tensors(policy), strict=True)
    return [block[at : at + x.numel() * x.element_size()].view(x.dtype).view(x.shape) for at, x in parts]

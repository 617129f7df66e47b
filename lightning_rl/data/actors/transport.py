"""Blocks of memory that carry rollouts and policy weights between processes."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.context import BaseContext

import torch
from torch import Tensor, nn

from lightning_rl.environments import EnvironmentFailure
from lightning_rl.nested import leaves, map_leaves
from lightning_rl.rollouts.rollout import Rollout

# Seconds after which the learner, while it waits, checks its actors again.
POLL_SECONDS = 0.5
# Seconds that the learner waits for an actor to finish reading the weights.
_PATIENCE = 30.0
# Smaller blocks go through the pipe: shared memory costs a connection for each block.
_MAX_IN_PIPE = 2**18
_ALIGNMENT = 64  # as PyTorch's allocator


@dataclass(frozen=True)  # a tuple would be nested data to `map_leaves`
class _Place:
    begin: int
    end: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def view(self, block: Tensor) -> Tensor:
        return block[self.begin : self.end].view(self.dtype).view(self.shape)


def _places(tensors: Sequence[Tensor]) -> tuple[list[_Place], int]:
    places, end = [], 0
    for x in tensors:
        begin = -(-end // _ALIGNMENT) * _ALIGNMENT
        end = begin + x.nbytes
        places.append(_Place(begin, end, tuple(x.shape), x.dtype))
    return places, end


@torch.no_grad()
def _fill(block: Tensor, tensors: Sequence[Tensor]) -> None:
    for place, x in zip(_places(tensors)[0], tensors, strict=True):
        place.view(block).copy_(x)


@dataclass(frozen=True)
class PackedRollout:
    """A rollout whose tensors are in one block of bytes, which is faster to send; a large block is in shared memory.

    `rollout` has the place of each tensor instead of the tensor.
    """

    block: Tensor | bytearray
    rollout: Rollout


def pack(rollout: Rollout, actor: int = 0, share: bool = True) -> PackedRollout:
    """Copy a rollout of an actor on the CPU into one block, by default into shared memory if it is large."""
    fields = rollout.tensors()
    tensors = [*leaves(fields)]
    places, size = _places(tensors)
    block: Tensor | bytearray = bytearray(size)
    if share and size > _MAX_IN_PIPE:
        block = torch.empty(size, dtype=torch.uint8).share_memory_()  # type: ignore[no-untyped-call]
    _fill(_as_tensor(block), tensors)
    each = iter(places)
    packed = copy.copy(rollout)
    vars(packed).update(map_leaves(lambda _: next(each), fields), actor=actor)
    return PackedRollout(block, packed)


def unpack(packed: PackedRollout) -> Rollout:
    """Return the rollout; its tensors are views of the block."""
    block, rollout = _as_tensor(packed.block), copy.copy(packed.rollout)
    vars(rollout).update(map_leaves(lambda place: place.view(block), rollout.tensors()))
    return rollout


def _as_tensor(block: Tensor | bytearray) -> Tensor:
    return block if isinstance(block, Tensor) else torch.frombuffer(block, dtype=torch.uint8)


class SharedWeights:
    """Parameters and buffers of a policy, and its version, in shared memory.

    A lock, held for one copy of the weights, prevents actors from reading half-written weights.
    """

    def __init__(self, policy: nn.Module, context: BaseContext) -> None:
        self._block = torch.zeros_like(gather_weights(policy)).share_memory_()  # type: ignore[no-untyped-call]
        self._version = torch.full((1,), -1).share_memory_()  # type: ignore[no-untyped-call]
        self._lock = context.Lock()

    def publish(self, policy: nn.Module, version: int, while_locked: Callable[[], None] = lambda: None) -> None:
        """Make the weights of a policy, on any device, the ones that actors use from their next rollout on.

        While an actor holds the lock, `while_locked` is called twice a second, and its exceptions end the wait. An
        actor that does not release the lock raises an `EnvironmentFailure`.
        """
        # Before the lock is taken: copies from another device wait for its queue.
        weights = [x.detach().cpu() for x in _weights(policy)]
        deadline = time.monotonic() + _PATIENCE
        while not self._lock.acquire(timeout=min(POLL_SECONDS, _PATIENCE)):
            while_locked()
            if time.monotonic() > deadline:
                raise EnvironmentFailure(
                    f"the policy could not be published within {_PATIENCE:g} seconds: an actor holds the lock"
                )
        try:
            _fill(self._block, weights)
            self._version.fill_(version)
        finally:
            self._lock.release()

    def reader(self, policy: nn.Module) -> Callable[[], int]:
        """Return a function that copies the newest weights into `policy`, on the CPU, and returns their version."""
        return partial(self._read, move_into_one_block(policy))

    def _read(self, block: Tensor) -> int:
        with self._lock:
            block.copy_(self._block)
            return int(self._version)


def gather_weights(policy: nn.Module) -> Tensor:
    """Return a copy of parameters and buffers of a policy, on any device, as one block of bytes on the CPU."""
    weights = _weights(policy)
    block = torch.zeros(_places(weights)[1], dtype=torch.uint8)
    _fill(block, weights)
    return block


def move_into_one_block(policy: nn.Module) -> Tensor:
    """Make parameters and buffers on the CPU views of one block as of `gather_weights`, and return the block."""
    weights, block = _weights(policy), gather_weights(policy)
    for place, x in zip(_places(weights)[0], weights, strict=True):
        x.data = place.view(block)
    return block


def _weights(policy: nn.Module) -> list[Tensor]:
    return [*policy.parameters(), *policy.buffers()]

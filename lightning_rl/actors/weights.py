"""The weights that a learner publishes and actors in other processes act with."""

from __future__ import annotations

from itertools import chain
from multiprocessing.context import BaseContext
from typing import Any

import torch
from torch import Tensor, nn

# Where PyTorch's own allocator would begin a tensor, at the least.
_WEIGHT_ALIGNMENT = 64
# Seconds for which an actor may keep the learner from publishing: it copies one block of memory meanwhile.
_PATIENCE = 30.0


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

    def publish(self, policy: nn.Module, version: int) -> None:
        """Make a policy, on any device, the one that actors act with from their next rollout on.

        Args:
            policy: Like the one that this was made for.
            version: Number of updates it has seen.

        Raises:
            WeightsLocked: An actor died while it was reading.
        """
        if self._gathered is None:
            self._gathered = WeightsCopy(policy)
        block = self._gathered.take(policy)
        if not self._lock.acquire(timeout=_PATIENCE):
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
            torch._foreach_copy_(self._views, _tensors(policy))
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

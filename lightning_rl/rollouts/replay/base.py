"""Base class of replay memories, and the layout of the rollouts in them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

from lightning.pytorch.utilities.rank_zero import rank_zero_info  # type: ignore[attr-defined]
from torch import Tensor

from lightning_rl.nested import Nested, first_leaf, leaves

Fields = dict[str, Nested]
"""Tensors with the same leading dimensions by name, nested or not."""


class Replay(ABC):
    """A bounded memory of earlier steps that an update can change and roll back."""

    _before: Any = None

    def begin(self) -> None:
        """Start to record changes for `rollback`, without copying steps."""
        self._before = self._snapshot()

    def commit(self) -> None:
        """Keep all changes since `begin`."""
        self._before = None

    def rollback(self) -> None:
        """Undo all changes since `begin`; without `begin`, do nothing."""
        if self._before is not None:
            self._restore(self._before)
            self._before = None

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Size of all tensors."""

    @property
    def layout(self) -> Layout | None:
        """Layout of all rollouts; None if there are none."""
        return None

    @abstractmethod
    def clear(self) -> None:
        """Remove everything."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the content as tensors and plain values."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the content that `state_dict` returned; the oldest steps are dropped if they do not fit."""

    @abstractmethod
    def _snapshot(self) -> Any: ...  # noqa: ANN401

    @abstractmethod
    def _restore(self, snapshot: Any) -> None: ...  # noqa: ANN401


class Layout(NamedTuple):
    """Properties that rollouts in one memory must share: `shape` is `(T, B)`, or `(T, 1)` for a single unroll.

    For a recurrent policy, `num_states` is the number of stored states of each environment, and `burn_in` the number of
    steps between these states and the sequences; else 0.
    """

    shape: tuple[int, int]
    num_states: int = 0
    burn_in: int = 0

    @classmethod
    def of(cls, shape: tuple[int, int], states: Nested | None, burn_in: int) -> Layout:
        """Return the layout of a rollout with the stored states `[K, B, ...]`, if there are any."""
        return cls(shape, 0 if states is None else len(first_leaf(states)), burn_in)

    def __str__(self) -> str:
        of_memory = f" with {self.num_states} stored states and a burn-in of {self.burn_in}" if self.num_states else ""
        return f"shape {self.shape}{of_memory}"


def drop_unless_alike(memory: Replay, layout: Layout, name: str) -> None:
    """Clear a memory whose rollouts differ from the next one in `layout`, and log that `name` restarts without them."""
    if memory.layout not in (None, layout):
        rank_zero_info(f"Stored rollouts have {memory.layout}, new ones {layout}: {name} drops the stored ones")
        memory.clear()


def num_bytes(x: Nested) -> int:
    """Return the size of all leaves."""
    return sum(int(leaf.nbytes) for leaf in leaves(x))


def copy_to_memory(x: Tensor) -> Tensor:
    """Return a copy on the CPU."""
    return x.detach().to("cpu", copy=True).contiguous()

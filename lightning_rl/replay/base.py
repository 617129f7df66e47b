"""What all bounded memories have in common."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from lightning_rl.nested import Nested, leaves

Fields = dict[str, Nested]
"""Tensors with the same leading dimensions by name, nested or not."""


class Replay(Protocol):
    """What checkpoints need of a bounded memory, and logs, and updates that may turn out not to be wanted.

    Between `begin` and `commit`, `rollback` makes it what it was.
    """

    @property
    def num_bytes(self) -> int:
        """Size of all tensors."""
        ...

    def begin(self) -> None:
        """Remember how the memory is."""
        ...

    def commit(self) -> None:
        """Forget how it was."""
        ...

    def rollback(self) -> None:
        """Make it what it was."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the content as tensors and plain values."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        ...


def num_bytes(x: Nested) -> int:
    """Return the size of all leaves."""
    return sum(int(leaf.numel() * leaf.element_size()) for leaf in leaves(x))


def copy_to_memory(x: Tensor) -> Tensor:
    """Return a copy on the CPU."""
    return x.detach().to("cpu", copy=True).contiguous()

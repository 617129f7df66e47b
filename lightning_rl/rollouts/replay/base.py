"""What all bounded memories have in common."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from lightning.pytorch.utilities.rank_zero import rank_zero_info  # type: ignore[attr-defined]
from torch import Tensor

from lightning_rl.nested import Nested, first_leaf, leaves

Fields = dict[str, Nested]
"""Tensors with the same leading dimensions by name, nested or not."""


class Replay(Protocol):
    """What checkpoints need of a bounded memory, and logs, and updates that may turn out not to be wanted.

    Between `begin` and `commit`, `rollback` makes it what it was; at other times it does nothing.
    """

    @property
    def num_bytes(self) -> int:
        """Size of all tensors."""
        ...

    def clear(self) -> None:
        """Remove everything."""
        ...

    def begin(self) -> None:
        """Remember how the memory is."""
        ...

    def commit(self) -> None:
        """Forget how it was."""
        ...

    def rollback(self) -> None:
        """Make it what it was, if that is remembered."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the content as tensors and plain values."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        ...


class Layout(NamedTuple):
    """What rollouts that are learned from together have in common.

    Attributes:
        shape: `(T, B)`; of the unroll of one environment `(T, 1)`.
        num_states: For a policy with memory, how many states each environment has in it; 0 without.
        burn_in: How many steps before the sequences that are learned from these states are.
    """

    shape: tuple[int, int]
    num_states: int = 0
    burn_in: int = 0

    @classmethod
    def of(cls, shape: tuple[int, int], states: Nested | None, burn_in: int) -> Layout:
        """Return that of a rollout with some stored states `[K, B, ...]`."""
        return cls(shape, 0 if states is None else len(first_leaf(states)), burn_in)

    def __str__(self) -> str:
        of_memory = f" with {self.num_states} stored states and a burn-in of {self.burn_in}" if self.num_states else ""
        return f"shape {self.shape}{of_memory}"


class LaidOut(Protocol):
    """A memory of rollouts of one layout."""

    @property
    def layout(self) -> Layout | None:
        """What they have in common; None if there is none."""
        ...

    def clear(self) -> None:
        """Remove all of them."""
        ...


def drop_unless_alike(memory: LaidOut, layout: Layout, begins_anew: str) -> None:
    """Clear a memory whose rollouts are laid out otherwise than the next one, and say so.

    Args:
        memory: Has rollouts, or none.
        layout: Of the next one.
        begins_anew: What does then.
    """
    if memory.layout not in (None, layout):
        rank_zero_info(f"What is kept has {memory.layout}, and what comes now {layout}: {begins_anew} begins anew")
        memory.clear()


def num_bytes(x: Nested) -> int:
    """Return the size of all leaves."""
    return sum(int(leaf.numel() * leaf.element_size()) for leaf in leaves(x))


def copy_to_memory(x: Tensor) -> Tensor:
    """Return a copy on the CPU."""
    return x.detach().to("cpu", copy=True).contiguous()

"""Bounded memories of what was collected, kept on the CPU: rows come to the device by the minibatch.

Everything is stored once, in the type it came with, so that images stay bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_rl.nested import Nested, first_leaf, leaves, map_leaves

Fields = dict[str, Nested]
"""Tensors with the same leading dimensions by name, nested or not."""


class Memory(Protocol):
    """What checkpoints need of a memory, and logs, and updates that may turn out not to be wanted.

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


class RolloutMemory:
    """The last few rollouts `[T, B, ...]`, all of one shape, addressed by step or by sequence.

    A sequence is what one environment did in one rollout: `T` steps in a row.

    Args:
        capacity: Number of rollouts.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._rollouts: list[Fields] = []
        self._valid: list[Tensor | None] = []
        self._before: tuple[list[Fields], list[Tensor | None]] = [], []

    def __len__(self) -> int:
        return len(self._rollouts)

    @property
    def is_full(self) -> bool:
        """Whether there is no room for another rollout."""
        return len(self) >= self.capacity

    @property
    def shape(self) -> tuple[int, int]:
        """`(T, B)` of each rollout; `(0, 0)` if there is none."""
        if not self._rollouts:
            return 0, 0
        length, num_envs = first_leaf(self._rollouts[0]).shape[:2]
        return int(length), int(num_envs)

    @property
    def num_bytes(self) -> int:
        """Size of all tensors."""
        return _num_bytes((*self._rollouts, *(valid for valid in self._valid if valid is not None)))

    def append(self, fields: Fields, valid: Tensor | None = None) -> None:
        """Copy one rollout into the memory, which must have room for it.

        Args:
            fields: Tensors `[T, B, ...]`.
            valid: Which steps are real, `[T, B]`; None: all of them.

        Raises:
            ValueError: There is no room, or the rollout has another shape than those before it.
        """
        shape = tuple(first_leaf(fields).shape[:2])
        if self.is_full:
            raise ValueError(f"the memory holds {len(self)} rollouts already, expected fewer than {self.capacity}")
        if self._rollouts and shape != self.shape:
            raise ValueError(f"the rollout has shape {shape}, expected {self.shape} like those before it")
        self._rollouts.append(map_leaves(_copy, fields))
        self._valid.append(None if valid is None else _copy(valid))

    def clear(self) -> None:
        """Remove all rollouts."""
        self._rollouts, self._valid = [], []

    def annotate(self, name: str, compute: Callable[[Fields], Nested]) -> None:
        """Give every rollout one more field, `[T, B, ...]`, that is computed from its others."""
        self._rollouts = [{**fields, name: map_leaves(_copy, compute(fields))} for fields in self._rollouts]

    def steps(self) -> Tensor:
        """Return the addresses of all real steps, `[N]`."""
        valid = [torch.ones(self.shape, dtype=torch.bool) if v is None else v for v in self._valid]
        return torch.stack(valid).flatten().nonzero().squeeze(-1) if valid else torch.zeros(0, dtype=torch.long)

    def sequences(self) -> Tensor:
        """Return the addresses of the first steps of all sequences, `[len(self) * B]`."""
        length, num_envs = self.shape
        return (torch.arange(len(self))[:, None] * length * num_envs + torch.arange(num_envs)).flatten()

    def along(self, sequences: Tensor) -> Tensor:
        """Return the addresses `[T, S]` of all steps, real or not, of some sequences `[S]`."""
        length, num_envs = self.shape
        return sequences + num_envs * torch.arange(length)[:, None]

    def is_real(self, addresses: Tensor) -> Tensor:
        """Return which steps are real, in the shape of their addresses."""
        result = torch.ones(addresses.shape, dtype=torch.bool)
        for index, (mask, local) in self._by_rollout(addresses).items():
            if (valid := self._valid[index]) is not None:
                result[mask] = valid.flatten()[local]
        return result

    def gather(self, addresses: Tensor) -> Fields:
        """Return copies of the steps at some addresses, each field of shape `[*addresses.shape, ...]`."""
        parts = self._by_rollout(addresses)

        def collect(*leaves_of_rollouts: Tensor) -> Tensor:
            first = leaves_of_rollouts[0]
            result = torch.empty(*addresses.shape, *first.shape[2:], dtype=first.dtype)
            for index, (mask, local) in parts.items():
                result[mask] = leaves_of_rollouts[index].flatten(0, 1)[local]
            return result

        fields: Fields = map_leaves(collect, *self._rollouts)
        return fields

    def _by_rollout(self, addresses: Tensor) -> dict[int, tuple[Tensor, Tensor]]:
        """Return, for each rollout that has some of the addresses, which of them, and where in it they are."""
        length, num_envs = self.shape
        rollouts, local = addresses // (length * num_envs), addresses % (length * num_envs)
        masks = {index: rollouts == index for index in set(rollouts.flatten().tolist())}
        return {index: (mask, local[mask]) for index, mask in masks.items()}

    def begin(self) -> None:
        """Remember how the memory is; no rollout is copied."""
        self._before = list(self._rollouts), list(self._valid)

    def commit(self) -> None:
        """Forget how it was."""
        self._before = [], []

    def rollback(self) -> None:
        """Make it what it was."""
        self._rollouts, self._valid = self._before
        self.commit()

    def state_dict(self) -> dict[str, Any]:
        """Return the rollouts as tensors; they are not copied, since none is ever changed."""
        return {"rollouts": [dict(fields) for fields in self._rollouts], "valid": list(self._valid)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned: of as many rollouts as there is room for, or more, all but one."""
        excess = len(state["rollouts"]) - self.capacity
        kept = slice(excess + 1 if excess >= 0 else 0, None)
        self._rollouts = [dict(fields) for fields in state["rollouts"][kept]]
        self._valid = list(state["valid"][kept])


class UseLimitedBuffer:
    """A ring of rows, each of which is sampled a limited number of times.

    New rows take the place of the oldest. A batch is drawn uniformly without replacement, so that none has a row twice;
    a row that has been used `max_use` times is gone.

    Args:
        size: Number of rows that there is room for.
        max_use: How often a row may be sampled; None: until it is overwritten.
    """

    def __init__(self, size: int, max_use: int | None = None) -> None:
        self.size = size
        self.max_use = max_use
        self._fields: Fields | None = None
        self._uses = torch.full((size,), -1)  # negative: nothing is there
        self._next = 0
        # How often rows were used, which place was next, and the rows that were overwritten since.
        self._before: tuple[Tensor, int, list[tuple[Tensor, Fields]]] | None = None

    def __len__(self) -> int:
        return int((self._uses >= 0).sum())

    @property
    def uses(self) -> Tensor:
        """How often the row in each place was sampled, `[size]`; -1 where there is none."""
        return self._uses.clone()

    @property
    def num_bytes(self) -> int:
        """Size of all tensors, places without a row included."""
        return _num_bytes(self._fields or {})

    def append(self, fields: Fields) -> None:
        """Copy rows `[N, ...]` into the ring; of more than fit, the last ones stay."""
        num_rows = len(first_leaf(fields))
        if self._fields is None:
            self._fields = map_leaves(lambda x: x.new_zeros(self.size, *x.shape[1:], device="cpu"), fields)
        kept = slice(max(0, num_rows - self.size), num_rows)
        places = (self._next + torch.arange(kept.start, kept.stop)) % self.size

        if self._before is not None:
            self._before[2].append((places, map_leaves(itemgetter(places), self._fields)))
        self._put(places, map_leaves(itemgetter(kept), fields))
        self._uses[places] = 0
        self._next = (self._next + num_rows) % self.size

    def _put(self, places: Tensor, rows: Fields) -> None:
        def put(storage: Tensor, x: Tensor) -> None:
            storage[places] = x.detach().cpu()

        map_leaves(put, self._fields, rows)

    def begin(self) -> None:
        """Remember how the buffer is; no row is copied before it is overwritten."""
        self._before = self.uses, self._next, []

    def commit(self) -> None:
        """Forget how it was."""
        self._before = None

    def rollback(self) -> None:
        """Make it what it was, uses included."""
        assert self._before is not None
        self._uses, self._next, overwritten = self._before
        for places, rows in reversed(overwritten):
            self._put(places, rows)
        self.commit()

    def sample(self, num_rows: int, generator: torch.Generator | None = None) -> Fields | None:
        """Return `num_rows` random rows, or None, which counts as no use, if there are fewer."""
        there = (self._uses >= 0).nonzero().squeeze(-1)
        if len(there) < num_rows:
            return None
        return self.take(there[torch.randperm(len(there), generator=generator)[:num_rows]])

    def take(self, places: Tensor) -> Fields:
        """Return copies of the rows in some places `[N]`, all different, and count that as a use of each.

        Raises:
            ValueError: A place has no row, or is there twice.
        """
        if self._fields is None or (self._uses[places] < 0).any() or len(set(places.tolist())) < len(places):
            raise ValueError(f"expected different places that have a row, got {places.tolist()}")
        rows: Fields = map_leaves(itemgetter(places), self._fields)
        self._uses[places] += 1
        if self.max_use is not None:
            self._uses[self._uses >= self.max_use] = -1
        return rows

    def state_dict(self) -> dict[str, Any]:
        """Return copies of all rows, in tensors."""
        fields = None if self._fields is None else map_leaves(torch.clone, self._fields)
        return {"fields": fields, "uses": self.uses, "next": self._next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` of a buffer of any size returned: of more rows than fit, the newest."""
        self._fields, self._next = None, 0
        self._uses.fill_(-1)
        if state["fields"] is None:
            return
        size, first = len(state["uses"]), state["next"]
        oldest_first = (first + torch.arange(size)) % size
        oldest_first = oldest_first[state["uses"][oldest_first] >= 0]
        if size == self.size:  # as it was, holes included
            self._fields = map_leaves(torch.clone, state["fields"])
            self._uses, self._next = state["uses"].clone(), first
        elif len(oldest_first):
            self.append(map_leaves(itemgetter(oldest_first), state["fields"]))
            kept = oldest_first[-self.size :]
            self._uses[(self._next - len(kept) + torch.arange(len(kept))) % self.size] = state["uses"][kept]


def _num_bytes(x: Nested) -> int:
    return sum(int(leaf.numel() * leaf.element_size()) for leaf in leaves(x))


def _copy(x: Tensor) -> Tensor:
    return x.detach().to("cpu", copy=True).contiguous()

"""Single steps that are used more than once."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from lightning_rl.nested import first_leaf, map_leaves
from lightning_rl.rollouts.replay.base import Fields, num_bytes


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
        return num_bytes(self._fields or {})

    def append(self, fields: Fields) -> None:
        """Copy rows `[N, ...]` into the ring; of more than fit, the last ones stay."""
        num_rows = len(first_leaf(fields))
        if self._fields is None:
            self._fields = map_leaves(lambda x: x.new_zeros(self.size, *x.shape[1:], device="cpu"), fields)
        kept = slice(max(0, num_rows - self.size), num_rows)
        indices = (self._next + torch.arange(kept.start, kept.stop)) % self.size

        if self._before is not None:
            self._before[2].append((indices, map_leaves(itemgetter(indices), self._fields)))
        self._put(indices, map_leaves(itemgetter(kept), fields))
        self._uses[indices] = 0
        self._next = (self._next + num_rows) % self.size

    def _put(self, indices: Tensor, rows: Fields) -> None:
        def put(storage: Tensor, x: Tensor) -> None:
            storage[indices] = x.detach().cpu()

        map_leaves(put, self._fields, rows)

    def clear(self) -> None:
        """Remove all rows."""
        self._fields, self._next = None, 0
        self._uses.fill_(-1)

    def begin(self) -> None:
        """Remember how the buffer is; no row is copied before it is overwritten."""
        self._before = self.uses, self._next, []

    def commit(self) -> None:
        """Forget how it was."""
        self._before = None

    def rollback(self) -> None:
        """Make it what it was, uses included, if that is remembered."""
        if self._before is None:
            return
        self._uses, self._next, overwritten = self._before
        for indices, rows in reversed(overwritten):
            self._put(indices, rows)
        self.commit()

    def sample(self, num_rows: int, generator: torch.Generator | None = None) -> Fields | None:
        """Return `num_rows` random rows, or None, which counts as no use, if there are fewer."""
        there = (self._uses >= 0).nonzero().squeeze(-1)
        if len(there) < num_rows:
            return None
        return self.gather(there[torch.randperm(len(there), generator=generator)[:num_rows]])

    def gather(self, indices: Tensor) -> Fields:
        """Return copies of the rows in some places `[N]`, all different, and count that as a use of each.

        Raises:
            ValueError: A place has no row, or is there twice.
        """
        if self._fields is None or (self._uses[indices] < 0).any() or len(set(indices.tolist())) < len(indices):
            raise ValueError(f"expected different places that have a row, got {indices.tolist()}")
        rows: Fields = map_leaves(itemgetter(indices), self._fields)
        self._uses[indices] += 1
        if self.max_use is not None:
            self._uses[self._uses >= self.max_use] = -1
        return rows

    def state_dict(self) -> dict[str, Any]:
        """Return copies of all rows, in tensors."""
        fields = None if self._fields is None else map_leaves(torch.clone, self._fields)
        return {"fields": fields, "uses": self.uses, "next": self._next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` of a buffer of any size returned: of more rows than fit, the newest."""
        self.clear()
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

"""Memory of single steps that are used more than once."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from lightning_rl.nested import first_leaf, map_leaves
from lightning_rl.rollouts.replay.base import Fields, Replay, num_bytes


class UseLimitedBuffer(Replay):
    """A ring buffer of `size` rows; a row that has been sampled `max_use` times is removed (None: never).

    New rows overwrite the oldest. Batches are drawn uniformly without replacement.
    """

    def __init__(self, size: int, max_use: int | None = None) -> None:
        self.size = size
        self.max_use = max_use
        self._fields: Fields | None = None
        self._uses = torch.full((size,), -1)  # -1 marks an empty place
        self._next = 0

    def __len__(self) -> int:
        return int((self._uses >= 0).sum())

    @property
    def uses(self) -> Tensor:
        """Number of samples of the row in each place, `[size]`; -1 for an empty place."""
        return self._uses.clone()

    @property
    def num_bytes(self) -> int:
        """Size of all tensors, empty places included."""
        return num_bytes(self._fields or {})

    def append(self, fields: Fields) -> None:
        """Copy rows `[N, ...]` into the buffer; if there are more than `size`, the last ones."""
        num_rows = len(first_leaf(fields))
        if self._fields is None:
            self._fields = map_leaves(lambda x: x.new_zeros(self.size, *x.shape[1:], device="cpu"), fields)
        kept = slice(max(0, num_rows - self.size), num_rows)
        places = (self._next + torch.arange(kept.start, kept.stop)) % self.size
        if self._before is not None:  # for `rollback`
            self._before[2].append((places, map_leaves(itemgetter(places), self._fields)))
        self._put(places, map_leaves(itemgetter(kept), fields))
        self._uses[places] = 0
        self._next = (self._next + num_rows) % self.size

    def _put(self, places: Tensor, rows: Fields) -> None:
        def put(storage: Tensor, x: Tensor) -> None:
            storage[places] = x.detach().cpu()

        map_leaves(put, self._fields, rows)

    def clear(self) -> None:
        self._fields, self._next = None, 0
        self._uses.fill_(-1)

    def _snapshot(self) -> tuple[Tensor, int, list[tuple[Tensor, Fields]]]:
        """Return uses and next place, and a list for the rows that `append` overwrites."""
        return self.uses, self._next, []

    def _restore(self, snapshot: tuple[Tensor, int, list[tuple[Tensor, Fields]]]) -> None:
        self._uses, self._next, overwritten = snapshot
        for places, rows in reversed(overwritten):
            self._put(places, rows)

    def sample(self, num_rows: int, generator: torch.Generator | None = None) -> Fields | None:
        """Return `num_rows` random rows; None, without counting a use, if there are fewer."""
        filled = (self._uses >= 0).nonzero().squeeze(-1)
        if len(filled) < num_rows:
            return None
        return self.gather(filled[torch.randperm(len(filled), generator=generator)[:num_rows]])

    def gather(self, places: Tensor) -> Fields:
        """Return copies of the rows in different places, `[N]`, and count a use of each.

        An empty or repeated place raises a `ValueError`.
        """
        if self._fields is None or (self._uses[places] < 0).any() or len(set(places.tolist())) < len(places):
            raise ValueError(f"expected different places that have a row, got {places.tolist()}")
        rows: Fields = map_leaves(itemgetter(places), self._fields)
        self._uses[places] += 1
        if self.max_use is not None:
            self._uses[self._uses >= self.max_use] = -1
        return rows

    def state_dict(self) -> dict[str, Any]:
        fields = None if self._fields is None else map_leaves(torch.clone, self._fields)
        return {"fields": fields, "uses": self.uses, "next": self._next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the rows of a buffer of any size; if they do not fit, the newest."""
        self.clear()
        if state["fields"] is None:
            return
        size, first = len(state["uses"]), state["next"]
        oldest_first = (first + torch.arange(size)) % size
        oldest_first = oldest_first[state["uses"][oldest_first] >= 0]
        if size == self.size:  # the same places, empty ones included
            self._fields = map_leaves(torch.clone, state["fields"])
            self._uses, self._next = state["uses"].clone(), first
        elif len(oldest_first):
            self.append(map_leaves(itemgetter(oldest_first), state["fields"]))
            kept = oldest_first[-self.size :]
            self._uses[(self._next - len(kept) + torch.arange(len(kept))) % self.size] = state["uses"][kept]

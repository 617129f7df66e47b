"""Bounded memories of earlier steps, on the CPU and in the dtypes of the rollouts."""

from __future__ import annotations

import copy
import heapq
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter, setitem
from typing import Any, Literal, NamedTuple

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info  # type: ignore[attr-defined]
from torch import Tensor

from lightning_rl.nested import Nested, first_leaf, leaves, map_leaves, map_stacked
from lightning_rl.rollouts.rollout import Rollout
from lightning_rl.rollouts.sequences import Sequences, cut
from lightning_rl.validation import check

Fields = dict[str, Nested]
"""Tensors with the same leading dimensions by name, nested or not."""


class Replay(ABC):
    """A bounded memory of earlier steps that an update can change and roll back."""

    layout: Layout | None = None
    """Layout of all rollouts; None if there are none."""
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

    def begin_layout(self, layout: Layout) -> None:
        """Remove rollouts of another layout than the next ones, which have this one, and log it."""
        if self.layout not in (None, layout):
            rank_zero_info(f"Stored rollouts have {self.layout}, new ones {layout}: the stored ones are dropped")
            self.clear()
        self.layout = layout

    @abstractmethod
    def clear(self) -> None:
        """Remove everything."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the content as tensors and plain values."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the content that `state_dict` returned; the oldest steps are dropped if they do not fit."""

    def _snapshot(self) -> Any:
        return {name: copy.copy(x) for name, x in vars(self).items()}

    def _restore(self, snapshot: Any) -> None:
        vars(self).update(snapshot)


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


def num_bytes(x: Nested) -> int:
    """Return the size of all leaves."""
    return sum(int(leaf.nbytes) for leaf in leaves(x))


def add_missing_weights(parts: Sequence[Fields]) -> list[Fields]:
    """Return the fields of rollouts or unrolls of one shape; if some have `weights`, add ones to the others."""
    known = [fields["weights"] for fields in parts if "weights" in fields]
    return [{"weights": torch.ones_like(known[0]), **fields} for fields in parts] if known else [*parts]


def copy_to_memory(x: Tensor) -> Tensor:
    """Return a copy on the CPU."""
    return x.detach().to("cpu", copy=True).contiguous()


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
        return num_bytes(self._fields or {})

    def append(self, fields: Fields) -> None:
        """Copy rows `[N, ...]` into the buffer; if there are more than `size`, the last ones.

        Rows without `weights` get weight 1 if other rows have `weights`.
        """
        num_rows = len(first_leaf(fields))
        if self._fields is None:
            self._fields = map_leaves(lambda x: x.new_zeros(self.size, *x.shape[1:], device="cpu"), fields)
        if "weights" in fields and "weights" not in self._fields:
            self._fields["weights"] = fields["weights"].new_ones(self.size, device="cpu")
        if "weights" in self._fields and "weights" not in fields:
            fields = {**fields, "weights": self._fields["weights"].new_ones(num_rows)}
        kept = slice(max(0, num_rows - self.size), num_rows)
        places = (self._next + torch.arange(kept.start, kept.stop)) % self.size
        begin = (self._next + kept.start) % self.size
        if self._before is not None:  # for `rollback`
            self._before[2].append((begin, map_leaves(itemgetter(places), self._fields)))
        self._put(begin, map_leaves(itemgetter(kept), fields))
        self._uses[places] = 0
        self._next = (self._next + num_rows) % self.size

    def _put(self, begin: int, rows: Fields) -> None:
        def put(x: Tensor, storage: Tensor) -> None:
            x, until_end = x.detach(), self.size - begin
            storage[begin : begin + len(x)].copy_(x[:until_end])  # by an index, PyTorch writes no unsigned integers
            storage[: max(0, len(x) - until_end)].copy_(x[until_end:])

        map_leaves(put, rows, self._fields)

    def clear(self) -> None:
        self._fields, self._next = None, 0
        self._uses.fill_(-1)

    def _snapshot(self) -> tuple[Tensor, int, list[tuple[int, Fields]]]:
        """Return uses and next place, and a list for the rows that `append` overwrites."""
        return self.uses, self._next, []

    def _restore(self, snapshot: tuple[Tensor, int, list[tuple[int, Fields]]]) -> None:
        self._uses, self._next, overwritten = snapshot
        for begin, rows in reversed(overwritten):
            self._put(begin, rows)

    def sample(self, num_rows: int, generator: torch.Generator | None = None) -> Fields | None:
        """Return `num_rows` random rows; None, without counting a use, if there are fewer."""
        filled = (self._uses >= 0).nonzero().squeeze(-1)
        if len(filled) < num_rows:
            return None
        return self.gather(filled[torch.randperm(len(filled), generator=generator)[:num_rows]])

    def gather(self, places: Tensor) -> Fields:
        """Return copies of the rows in different places, `[N]`, and count uses; other places raise a `ValueError`."""
        if (self._uses[places] < 0).any() or len(set(places.tolist())) < len(places):
            raise ValueError(f"expected different places that have a row, got {places.tolist()}")
        rows: Fields = map_leaves(itemgetter(places), self._fields)
        self._uses[places] += 1
        self._remove_used()
        return rows

    def _remove_used(self) -> None:
        if self.max_use is not None:
            self._uses[self._uses >= self.max_use] = -1

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
        self._remove_used()  # `max_use` may be smaller now


class RolloutMemory(Replay):
    """The latest rollouts `[T, B, ...]`, all of one layout; `capacity` is their maximum number.

    Each step has an address: rollout · T · B + t · B + b.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.layout = None
        # `fields`, and what `append` got of `valid`, `starts` and `states`.
        self._kept: list[dict[str, Nested]] = []

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def is_full(self) -> bool:
        return len(self) >= self.capacity

    @property
    def shape(self) -> tuple[int, int]:
        """`(T, B)` of each rollout; `(0, 0)` if there are none."""
        return (0, 0) if self.layout is None else self.layout.shape

    @property
    def num_bytes(self) -> int:
        return sum(map(num_bytes, self._kept))

    def append(
        self,
        fields: Fields,
        valid: Tensor | None = None,
        starts: Tensor | None = None,
        states: Nested | None = None,
        burn_in: int = 0,
    ) -> None:
        """Copy fields `[T, B, ...]` of one rollout into the memory; the other arguments are attributes of `Rollout`.

        Earlier rollouts of another layout are removed; a full memory raises a `ValueError`.
        """
        length, num_envs = first_leaf(fields).shape[:2]
        self.begin_layout(Layout.of((length, num_envs), states, burn_in))
        if self.is_full:
            raise ValueError(f"the memory holds {len(self)} rollouts already, expected fewer than {self.capacity}")
        given = {"fields": fields, "valid": valid, "starts": starts, "states": states}
        self._kept.append(map_leaves(copy_to_memory, {name: x for name, x in given.items() if x is not None}))

    def clear(self) -> None:
        self._kept, self.layout = [], None

    def write(self, name: str, addresses: Tensor, values: Nested) -> None:
        """Write one field of the steps at `addresses`, `[N]`; a new field is 0 elsewhere."""
        if name not in self._kept[0]["fields"]:
            zeros = map_leaves(lambda x: x.new_zeros(*self.shape, *x.shape[1:], device="cpu"), values)
            self._kept = [
                kept | {"fields": {**kept["fields"], name: map_leaves(torch.clone, zeros)}} for kept in self._kept
            ]
        values = map_leaves(lambda x: x.detach().cpu(), values)
        for kept, (rows, steps) in zip(self._kept, self._by_rollout(addresses), strict=True):
            own = map_leaves(itemgetter(rows), values)
            map_leaves(lambda storage, x, at=steps: setitem(storage.flatten(0, 1), at, x), kept["fields"][name], own)

    def steps(self) -> Tensor:
        valid = self._all_valid()
        return torch.arange(valid.numel())[valid.flatten()]

    def cut(self) -> tuple[Tensor, Sequences]:
        """Cut the rollouts into the sequences of a recurrent policy, or else into one for each environment.

        Return addresses of the real steps in the order of sequences, and sequences with addresses for burn-in.
        """
        length, num_envs = self.shape
        first_steps = torch.arange(len(self)).unsqueeze(1) * length * num_envs + torch.arange(num_envs)
        addresses = first_steps.flatten() + num_envs * torch.arange(length).unsqueeze(1)
        valid = torch.cat(list(self._all_valid()), 1)
        no_starts, no_states = torch.zeros(length, num_envs, dtype=torch.bool), torch.zeros(1, num_envs)
        starts = torch.cat([kept.get("starts", no_starts) for kept in self._kept], 1)
        states = map_stacked(lambda xs: torch.cat(xs, 1), [kept.get("states", no_states) for kept in self._kept])
        assert self.layout is not None
        rows, sequences = cut(valid, starts, states, self.layout.burn_in, addresses)
        return addresses.flatten()[rows], sequences

    def _all_valid(self) -> Tensor:
        everything = torch.ones(self.shape, dtype=torch.bool)
        return torch.stack([kept.get("valid", everything) for kept in self._kept] or [everything])

    def gather(self, addresses: Tensor, only: str | None = None) -> Fields:
        """Return copies of steps, each field of shape `[*addresses.shape, ...]`; with `only`, at most that field."""
        every = add_missing_weights([kept["fields"] for kept in self._kept])
        wanted = [{n: x for n, x in fields.items() if only in (None, n)} for fields in every]
        if not wanted[0]:
            return {}
        parts = self._by_rollout(addresses)
        places = torch.cat([rows for rows, _ in parts]).argsort()

        def collect(*rollouts: Tensor) -> Tensor:
            found = [x.flatten(0, 1).index_select(0, steps) for x, (_, steps) in zip(rollouts, parts, strict=True)]
            rows = torch.cat(found).index_select(0, places)
            return rows.view(*addresses.shape, *rows.shape[1:])

        fields: Fields = map_leaves(collect, *wanted)
        return fields

    def _by_rollout(self, addresses: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return for each rollout which of the addresses are in it, by their places, and their steps t · B + b."""
        size = self.shape[0] * self.shape[1]
        rollouts, order = (addresses.flatten() // size).sort(stable=True)
        counts = rollouts.bincount(minlength=len(self)).tolist()
        steps = addresses.flatten()[order] % size
        return [*zip(torch.split(order, counts), torch.split(steps, counts), strict=True)]

    def state_dict(self) -> dict[str, Any]:
        """Return the rollouts as tensors, without copies: stored rollouts do not change."""
        return {"rollouts": [*self._kept], "layout": self.layout and tuple(self.layout)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore rollouts. If they fill the memory, the oldest are dropped, so that the next rollout fits."""
        excess = len(state["rollouts"]) - self.capacity
        self._kept = state["rollouts"][excess + 1 if excess >= 0 else 0 :]
        self.layout = Layout(*state["layout"]) if self._kept else None


ReplayPolicy = Literal["reservoir", "fifo"]
_NOT_BY_TIME = ("next_values", "final_indices", "final_observations", "infos")
_OTHERS = ("final_steps", "final_observations")


class _KeptUnroll(NamedTuple):
    """One unroll; the unrolls with the smallest rank are dropped first: `draw`, a random number, or `number`."""

    rank: float
    number: int
    draw: float
    fields: Fields


class UnrollMemory(Replay):
    """Unrolls of single environments from earlier rollouts, up to `max_bytes` for all tensors.

    The `policy` `fifo` drops the oldest unrolls; `reservoir` keeps each appended unroll with equal probability.
    """

    def __init__(self, max_bytes: int, policy: ReplayPolicy = "reservoir") -> None:
        self.max_bytes = max_bytes
        self.policy = policy
        self.layout = None
        self._kept: list[_KeptUnroll] = []  # a heap
        self._bytes = 0
        self._number = 0

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def num_bytes(self) -> int:
        return self._bytes

    def append(self, rollout: Rollout, generator: torch.Generator | None = None, **per_step: Nested) -> None:
        """Copy the unroll of each environment, with further tensors `[T, B, ...]`, and drop unrolls that do not fit.

        Earlier unrolls of another layout are removed. An unroll without room raises a `ConfigurationError`.
        """
        self.begin_layout(layout_of_unrolls(rollout))
        unrolls = _columns(rollout, per_step)
        largest = max(map(num_bytes, unrolls))
        expected = f"at least {largest / 2**30:.3g}: the unroll of one environment takes {largest} bytes"
        check(largest <= self.max_bytes, "replay_memory_gib", self.max_bytes / 2**30, expected)
        draws = torch.rand(len(unrolls), generator=generator, dtype=torch.float64).tolist()
        for draw, fields in zip(draws, unrolls, strict=True):
            self._push(self._number, draw, fields)
            self._number += 1
        self._drop_excess()

    def _push(self, number: int, draw: float, fields: Fields) -> None:
        rank = draw if self.policy == "reservoir" else number
        heapq.heappush(self._kept, _KeptUnroll(rank, number, draw, fields))
        self._bytes += num_bytes(fields)

    def _drop_excess(self) -> None:
        while self._bytes > self.max_bytes:
            self._bytes -= num_bytes(heapq.heappop(self._kept).fields)

    def gather(self, indices: Tensor) -> tuple[Rollout, Fields]:
        """Return copies of the unrolls `[N]`: a rollout `[T, N]`, its `next_values` NaN, and the `per_step` tensors."""
        assert self.layout is not None
        return _together([self._kept[index].fields for index in indices.tolist()], self.layout.burn_in)

    def draw(self, count: float, generator: torch.Generator) -> Tensor:
        """Return random indices of about `count` unrolls, at least one, with replacement."""
        return torch.randint(len(self), (max(1, round(count)),), generator=generator)

    def beside(self, rollout: Rollout, indices: Tensor) -> Rollout:
        """Return a copy of a rollout on the CPU, with the unrolls with indices `[N]` as further environments."""
        columns = [*_columns(rollout, {}), *(self._kept[index].fields for index in indices.tolist())]
        return _together(columns, rollout.burn_in)[0]

    def clear(self) -> None:
        self._kept, self._bytes, self.layout = [], 0, None

    def state_dict(self) -> dict[str, Any]:
        """Return the unrolls as tensors and numbers; only small ones are copied, many into one tensor."""
        kept = []
        for part in self._parts():
            fields = part[0].fields
            if len(part) > 1:
                rollout, per_step = _together([one.fields for one in part], 0)
                fields = rollout.tensors() | {"per_step": per_step}
                del fields["next_values"]  # NaN, which `_columns` does not use
            kept.append({"numbers": [x.number for x in part], "draws": [x.draw for x in part], "fields": fields})
        return {"kept": kept, "number": self._number, "layout": self.layout and tuple(self.layout)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the unrolls of a memory of any size and policy; those that do not fit are dropped."""
        self.clear()
        for part in state["kept"]:
            numbers, draws, fields = part["numbers"], part["draws"], part["fields"]
            unrolls = [fields]
            if len(numbers) > 1:
                tensors = {name: x for name, x in fields.items() if name != "per_step"}
                unrolls = _columns(Rollout(**tensors, next_values=fields["values"]), fields["per_step"])
            for number, draw, unroll in zip(numbers, draws, unrolls, strict=True):
                self._push(number, draw, unroll)
        self._number, self.layout = state["number"], state["layout"] and Layout(*state["layout"])
        self._drop_excess()

    def _parts(self) -> Iterator[list[_KeptUnroll]]:
        # Parts of about a MiB, since a checkpoint takes 100 µs and 250 bytes for each tensor.
        count = max(1, 2**20 * len(self._kept) // max(1, self._bytes))
        for _, of_one_kind in groupby(self._kept, key=lambda kept: "weights" in kept.fields):
            unrolls = [*of_one_kind]
            yield from (unrolls[start : start + count] for start in range(0, len(unrolls), count))


def layout_of_unrolls(rollout: Rollout) -> Layout:
    """Return the layout of the unrolls of a rollout."""
    return Layout.of((rollout.shape[0], 1), rollout.memory, rollout.burn_in)


def _columns(rollout: Rollout, per_step: Fields) -> list[Fields]:
    """Return a copy of the unroll of each environment, with the final observations of its truncated steps."""
    present = {name: x for name, x in rollout.tensors().items() if name not in _NOT_BY_TIME}
    by_time = map_leaves(copy_to_memory, present | {"per_step": per_step})
    by_time.setdefault("valid", torch.ones(rollout.shape, dtype=torch.bool))
    steps, environments = rollout.final_indices.cpu().unbind(1)
    finals = map_leaves(copy_to_memory, rollout.final_observations)
    columns: list[Fields] = []
    for index in range(rollout.shape[1]):
        own = environments == index
        column: Fields = map_leaves(lambda x, index=index: x[:, index].clone(), by_time)
        column |= {"final_steps": steps[own], "final_observations": map_leaves(itemgetter(own), finals)}
        columns.append(column)
    return columns


def _together(columns: Sequence[Fields], burn_in: int) -> tuple[Rollout, Fields]:
    by_time = add_missing_weights([{n: x for n, x in column.items() if n not in _OTHERS} for column in columns])
    fields = map_stacked(lambda xs: torch.stack(xs, 1), by_time)
    per_step: Fields = fields.pop("per_step")
    steps = torch.cat([column["final_steps"] for column in columns])
    counts = torch.tensor([len(column["final_steps"]) for column in columns])
    environments = torch.arange(len(columns)).repeat_interleave(counts)
    finals = map_stacked(torch.cat, [column["final_observations"] for column in columns])
    rollout = Rollout(
        **fields,
        next_values=torch.full_like(fields["values"], torch.nan),
        final_indices=torch.stack([steps, environments], 1),
        final_observations=finals,
        burn_in=burn_in,
        policy_version=-1,
    )
    return rollout, per_step

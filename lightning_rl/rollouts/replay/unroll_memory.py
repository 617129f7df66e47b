"""Memory of unrolls of single environments."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from operator import itemgetter
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lightning_rl.nested import Nested, first_leaf, map_leaves, map_stacked
from lightning_rl.rollouts.replay.base import Fields, Layout, Replay, copy_to_memory, num_bytes
from lightning_rl.rollouts.rollout import Rollout

ReplayPolicy = Literal["reservoir", "fifo"]
_PER_STEP = (
    *("observations", "actions", "rewards", "terminated", "truncated", "log_probs", "values"),
    *("valid", "starts", "repeats", "weights"),
)
_OTHERS = ("final_steps", "final_observations", "burn_in")


class _Kept(NamedTuple):
    """One unroll; the unrolls with the smallest rank are dropped first."""

    rank: float
    number: int
    fields: Fields


class UnrollMemory(Replay):
    """Unrolls of single environments from earlier rollouts, up to `max_bytes` for all tensors.

    The `policy` `fifo` drops the oldest unrolls; `reservoir` keeps each appended unroll with equal probability.
    """

    def __init__(self, max_bytes: int, policy: ReplayPolicy = "reservoir") -> None:
        self.max_bytes = max_bytes
        self.policy = policy
        self._kept: list[_Kept] = []  # a heap
        self._bytes = 0
        self._number = 0

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def num_bytes(self) -> int:
        return self._bytes

    @property
    def numbers(self) -> list[int]:
        """Numbers of the unrolls, counted from 0 over all unrolls ever appended."""
        return sorted(kept.number for kept in self._kept)

    @property
    def layout(self) -> Layout | None:
        if not self._kept:
            return None
        fields = self._kept[0].fields
        return Layout.of((len(first_leaf(fields["actions"])), 1), fields.get("memory"), fields["burn_in"])

    def append(self, rollout: Rollout, generator: torch.Generator | None = None, **per_step: Nested) -> None:
        """Copy the unroll of each environment, with further tensors `[T, B, ...]`, and drop unrolls that do not fit.

        Another layout than that of earlier unrolls raises a `ValueError`.
        """
        if self.layout not in (None, layout := layout_of_unrolls(rollout)):
            raise ValueError(f"the unrolls have {layout}, expected {self.layout} like those before them")
        unrolls = _columns(rollout, per_step)
        draws = torch.rand(len(unrolls), generator=generator, dtype=torch.float64).tolist()
        for draw, fields in zip(draws, unrolls, strict=True):
            rank = draw if self.policy == "reservoir" else float(self._number)
            heapq.heappush(self._kept, _Kept(rank, self._number, fields))
            self._bytes += _size(fields)
            self._number += 1
        self._drop_excess()

    def _drop_excess(self) -> None:
        while self._bytes > self.max_bytes:
            self._bytes -= _size(heapq.heappop(self._kept).fields)

    def gather(self, indices: Tensor) -> tuple[Rollout, Fields]:
        """Return copies of the unrolls with indices `[N]`, as a rollout `[T, N]` and the `per_step` tensors."""
        return _together([self._kept[index].fields for index in indices.tolist()])

    def draw(self, count: float, generator: torch.Generator) -> Tensor:
        """Return random indices of about `count` unrolls, at least one, with replacement."""
        return torch.randint(len(self), (max(1, round(count)),), generator=generator)

    def beside(self, rollout: Rollout, indices: Tensor) -> Rollout:
        """Return a copy of a rollout on the CPU, with the unrolls with indices `[N]` as further environments."""
        both, _ = _together([*_columns(rollout, {}), *(self._kept[index].fields for index in indices.tolist())])
        both.policy_version = rollout.policy_version
        return both

    def clear(self) -> None:
        self._kept, self._bytes = [], 0

    def _snapshot(self) -> tuple[list[_Kept], int, int]:
        return [*self._kept], self._bytes, self._number

    def _restore(self, snapshot: tuple[list[_Kept], int, int]) -> None:
        self._kept, self._bytes, self._number = snapshot

    def state_dict(self) -> dict[str, Any]:
        """Return the unrolls as tensors and numbers, without copies: stored unrolls do not change."""
        return {"kept": [kept._asdict() for kept in self._kept], "number": self._number, "policy": self.policy}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the unrolls of a memory of any size and policy; those that do not fit are dropped."""
        self._kept, self._number = [_Kept(**kept) for kept in state["kept"]], state["number"]
        if state["policy"] != self.policy:
            generator = torch.Generator().manual_seed(self._number)
            draws = torch.rand(len(self._kept), generator=generator, dtype=torch.float64).tolist()
            ranks = draws if self.policy == "reservoir" else [float(kept.number) for kept in self._kept]
            self._kept = [kept._replace(rank=rank) for kept, rank in zip(self._kept, ranks, strict=True)]
            heapq.heapify(self._kept)
        self._bytes = sum(_size(kept.fields) for kept in self._kept)
        self._drop_excess()


def layout_of_unrolls(rollout: Rollout) -> Layout:
    """Return the layout of the unrolls of a rollout."""
    return Layout.of((rollout.shape[0], 1), rollout.memory, rollout.burn_in)


def _size(fields: Fields) -> int:
    return num_bytes({name: x for name, x in fields.items() if name != "burn_in"})


def _columns(rollout: Rollout, per_step: Fields) -> list[Fields]:
    """Return a copy of the unroll of each environment, with the final observations of its truncated steps."""
    present = {name: getattr(rollout, name) for name in _PER_STEP if getattr(rollout, name) is not None}
    if rollout.memory is not None:
        present["memory"] = rollout.memory
    by_time = map_leaves(copy_to_memory, present | {"per_step": per_step})
    by_time.setdefault("valid", torch.ones(rollout.shape, dtype=torch.bool))
    steps, environments = rollout.final_indices.cpu().unbind(1)
    finals = map_leaves(copy_to_memory, rollout.final_observations)
    columns: list[Fields] = []
    for index in range(rollout.shape[1]):
        own = environments == index
        column: Fields = map_leaves(lambda x, index=index: x[:, index].clone(), by_time)
        column |= {"final_steps": steps[own], "final_observations": map_leaves(itemgetter(own), finals)}
        columns.append(column | {"burn_in": rollout.burn_in})
    return columns


def _together(columns: Sequence[Fields]) -> tuple[Rollout, Fields]:
    by_time = [{name: x for name, x in column.items() if name not in _OTHERS} for column in columns]
    fields = map_stacked(lambda xs: torch.stack(xs, 1), by_time)
    per_step: Fields = fields.pop("per_step")
    steps = torch.cat([column["final_steps"] for column in columns])
    counts = torch.tensor([len(column["final_steps"]) for column in columns])
    environments = torch.arange(len(columns)).repeat_interleave(counts)
    finals = map_stacked(torch.cat, [column["final_observations"] for column in columns])
    rollout = Rollout(
        **fields,
        next_values=torch.zeros_like(fields["values"]),
        final_indices=torch.stack([steps, environments], 1),
        final_observations=finals,
        burn_in=columns[0]["burn_in"],
        policy_version=-1,
    )
    return rollout, per_step

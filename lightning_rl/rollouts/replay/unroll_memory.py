"""Unrolls of single environments, of any age."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from operator import itemgetter
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lightning_rl.nested import Nested, first_leaf, map_leaves, map_stacked
from lightning_rl.rollouts.replay.base import Fields, Layout, copy_to_memory, num_bytes
from lightning_rl.rollouts.rollout import Rollout

ReplayPolicy = Literal["reservoir", "fifo"]
_PER_STEP = (
    *("observations", "actions", "rewards", "terminated", "truncated", "log_probs", "values"),
    *("valid", "starts", "repeats"),
)


class _Kept(NamedTuple):
    """One unroll: those that are compared first leave first."""

    rank: float
    number: int
    fields: Fields


class UnrollMemory:
    """What single environments did in earlier rollouts, up to a number of bytes.

    Args:
        max_bytes: Size of all tensors that there is room for.
        policy: Which unrolls leave when there is too little: with `reservoir` each that was ever seen is as likely to
            be still there as any other, with `fifo` the oldest leaves.
    """

    def __init__(self, max_bytes: int, policy: ReplayPolicy = "reservoir") -> None:
        self.max_bytes = max_bytes
        self.policy = policy
        # A heap, so that the next one to leave is found at once.
        self._kept: list[_Kept] = []
        self._bytes = 0
        self._number = 0
        self._before: tuple[list[_Kept], int, int] | None = None

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def num_bytes(self) -> int:
        """Size of all tensors."""
        return self._bytes

    @property
    def numbers(self) -> list[int]:
        """Which of all unrolls that were ever appended are there, counted from 0."""
        return sorted(kept.number for kept in self._kept)

    @property
    def layout(self) -> Layout | None:
        """What all unrolls have in common; None if there is none."""
        if not self._kept:
            return None
        fields = self._kept[0].fields
        return Layout.of((len(first_leaf(fields["actions"])), 1), fields.get("memory"), fields["burn_in"])

    def append(self, rollout: Rollout, generator: torch.Generator | None = None, **per_step: Nested) -> None:
        """Copy the unroll of each environment into the memory, and drop what there is no room for then.

        Args:
            rollout: Laid out as those of the unrolls that are there.
            generator: Decides what a reservoir drops.
            **per_step: More tensors `[T, B, ...]`.

        Raises:
            ValueError: It is not.
        """
        if self.layout not in (None, layout := layout_of_unrolls(rollout)):
            raise ValueError(f"the unrolls have {layout}, expected {self.layout} like those before them")
        unrolls = _columns(rollout, per_step)
        draws = torch.rand(len(unrolls), generator=generator, dtype=torch.float64).tolist()
        for draw, fields in zip(draws, unrolls, strict=True):
            rank = draw if self.policy == "reservoir" else float(self._number)
            heapq.heappush(self._kept, _Kept(rank, self._number, fields))
            self._bytes += num_bytes(_tensors(fields))
            self._number += 1
        while self._bytes > self.max_bytes:
            self._bytes -= num_bytes(_tensors(heapq.heappop(self._kept).fields))

    def gather(self, indices: Tensor) -> tuple[Rollout, Fields]:
        """Return copies of the unrolls in some places `[N]`, as a rollout `[T, N]` and what was appended besides."""
        return _together([self._kept[place].fields for place in indices.tolist()])

    def clear(self) -> None:
        """Remove all unrolls."""
        self._kept, self._bytes = [], 0

    def begin(self) -> None:
        """Remember how the memory is; no unroll is copied."""
        self._before = [*self._kept], self._bytes, self._number

    def commit(self) -> None:
        """Forget how it was."""
        self._before = None

    def rollback(self) -> None:
        """Make it what it was, if that is remembered."""
        if self._before is not None:
            self._kept, self._bytes, self._number = self._before
            self.commit()

    def state_dict(self) -> dict[str, Any]:
        """Return the unrolls as tensors and numbers; they are not copied, since none is ever changed."""
        return {"kept": [kept._asdict() for kept in self._kept], "number": self._number, "policy": self.policy}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned; what there is no room for is dropped."""
        self._kept, self._number = [_Kept(**kept) for kept in state["kept"]], state["number"]
        if state["policy"] != self.policy:
            generator = torch.Generator().manual_seed(self._number)
            draws = torch.rand(len(self._kept), generator=generator, dtype=torch.float64).tolist()
            ranks = draws if self.policy == "reservoir" else [float(kept.number) for kept in self._kept]
            self._kept = [kept._replace(rank=rank) for kept, rank in zip(self._kept, ranks, strict=True)]
            heapq.heapify(self._kept)
        self._bytes = sum(num_bytes(_tensors(kept.fields)) for kept in self._kept)
        while self._bytes > self.max_bytes:
            self._bytes -= num_bytes(_tensors(heapq.heappop(self._kept).fields))


def layout_of_unrolls(rollout: Rollout) -> Layout:
    """Return that of what each environment did in a rollout."""
    return Layout.of((rollout.shape[0], 1), rollout.memory, rollout.burn_in)


def _tensors(fields: Fields) -> Fields:
    return {name: x for name, x in fields.items() if name != "burn_in"}


def _columns(rollout: Rollout, per_step: Fields) -> list[Fields]:
    """Return copies of what each environment did, and of the observations that its truncated steps reached."""
    present = {name: getattr(rollout, name) for name in _PER_STEP if getattr(rollout, name) is not None}
    by_time = map_leaves(copy_to_memory, present | {"per_step": per_step})
    by_time["valid"] = by_time.get("valid", torch.ones(rollout.shape, dtype=torch.bool))
    if rollout.memory is not None:
        by_time["memory"] = map_leaves(copy_to_memory, rollout.memory)
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
    """Return unrolls side by side."""
    by_time = [
        {n: x for n, x in c.items() if n not in ("final_steps", "final_observations", "burn_in")} for c in columns
    ]
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

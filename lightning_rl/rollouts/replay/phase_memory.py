"""Memory of the rollouts of a phase."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_rl.nested import Nested, first_leaf, map_leaves, map_stacked
from lightning_rl.rollouts.replay.base import Fields, Layout, Replay, copy_to_memory, num_bytes
from lightning_rl.rollouts.sequences import Sequences, cut


class _Kept(NamedTuple):
    fields: Any
    valid: Any
    starts: Any
    states: Any
    burn_in: int = 0

    @property
    def layout(self) -> Layout:
        length, num_envs = first_leaf(self.fields).shape[:2]
        return Layout.of((int(length), int(num_envs)), self.states, self.burn_in)


class RolloutMemory(Replay):
    """The latest rollouts `[T, B, ...]`, all of one layout; `capacity` is their maximum number.

    Each step has an address: rollout · T · B + t · B + b.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._kept: list[_Kept] = []

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
    def layout(self) -> Layout | None:
        return self._kept[0].layout if self._kept else None

    @property
    def num_bytes(self) -> int:
        return sum(num_bytes(x) for kept in self._kept for x in kept[:-1] if x is not None)

    def append(
        self,
        fields: Fields,
        valid: Tensor | None = None,
        starts: Tensor | None = None,
        states: Nested | None = None,
        burn_in: int = 0,
    ) -> None:
        """Copy fields `[T, B, ...]` of one rollout into the memory; the other arguments are attributes of `Rollout`.

        A full memory, or another layout than that of earlier rollouts, raises a `ValueError`.
        """
        if self.is_full:
            raise ValueError(f"the memory holds {len(self)} rollouts already, expected fewer than {self.capacity}")
        given = _Kept(fields, valid, starts, states, burn_in)
        if self.layout not in (None, given.layout):
            raise ValueError(f"the rollout has {given.layout}, expected {self.layout} like those before it")
        parts = {name: x for name, x in given._asdict().items() if name != "burn_in" and x is not None}
        self._kept.append(given._replace(**map_leaves(copy_to_memory, parts)))

    def clear(self) -> None:
        self._kept = []

    def write(self, name: str, addresses: Tensor, values: Nested) -> None:
        """Write one field of the steps at `addresses`, `[N]`; a new field is 0 elsewhere."""
        if name not in self._kept[0].fields:
            zeros = map_leaves(lambda x: x.new_zeros(*self.shape, *x.shape[1:], device="cpu"), values)
            self._kept = [
                kept._replace(fields={**kept.fields, name: map_leaves(torch.clone, zeros)}) for kept in self._kept
            ]
        for index, (mask, local) in self._by_rollout(addresses).items():

            def put(storage: Tensor, x: Tensor, mask: Tensor = mask, local: Tensor = local) -> None:
                storage.flatten(0, 1)[local] = x.detach().cpu()[mask]

            map_leaves(put, self._kept[index].fields[name], values)

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
        starts = torch.cat([no_starts if kept.starts is None else kept.starts for kept in self._kept], 1)
        states = [no_states if kept.states is None else kept.states for kept in self._kept]
        together = map_stacked(lambda xs: torch.cat(xs, 1), states)
        rows, sequences = cut(valid, starts, together, self._kept[0].burn_in, addresses)
        return addresses.flatten()[rows], sequences

    def _all_valid(self) -> Tensor:
        everything = torch.ones(self.shape, dtype=torch.bool)
        return torch.stack([everything if k.valid is None else k.valid for k in self._kept] or [everything])

    def gather(self, addresses: Tensor, only: str | None = None) -> Fields:
        """Return copies of steps, each field of shape `[*addresses.shape, ...]`; with `only`, at most that field."""
        wanted = [{n: x for n, x in kept.fields.items() if only in (None, n)} for kept in self._kept]
        if not wanted or not wanted[0]:
            return {}
        parts = self._by_rollout(addresses)

        def collect(*leaves_of_rollouts: Tensor) -> Tensor:
            first = leaves_of_rollouts[0]
            result = torch.empty(*addresses.shape, *first.shape[2:], dtype=first.dtype)
            for index, (mask, local) in parts.items():
                result[mask] = leaves_of_rollouts[index].flatten(0, 1)[local]
            return result

        fields: Fields = map_leaves(collect, *wanted)
        return fields

    def _by_rollout(self, addresses: Tensor) -> dict[int, tuple[Tensor, Tensor]]:
        """Return for each rollout which addresses are in it, and their steps t · B + b."""
        length, num_envs = self.shape
        rollouts, local = addresses // (length * num_envs), addresses % (length * num_envs)
        masks = {index: rollouts == index for index in set(rollouts.flatten().tolist())}
        return {index: (mask, local[mask]) for index, mask in masks.items()}

    def _snapshot(self) -> list[_Kept]:
        return [*self._kept]

    def _restore(self, snapshot: list[_Kept]) -> None:
        self._kept = snapshot

    def state_dict(self) -> dict[str, Any]:
        """Return the rollouts as tensors, without copies: stored rollouts do not change."""
        return {"rollouts": [kept._asdict() for kept in self._kept]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore rollouts. If they fill the memory, the oldest are dropped, so that the next rollout fits."""
        excess = len(state["rollouts"]) - self.capacity
        self._kept = [_Kept(**kept) for kept in state["rollouts"][excess + 1 if excess >= 0 else 0 :]]

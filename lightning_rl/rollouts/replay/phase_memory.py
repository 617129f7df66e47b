"""The rollouts of a phase."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_rl.nested import Nested, first_leaf, map_leaves, map_stacked
from lightning_rl.rollouts.replay.base import Fields, Layout, copy_to_memory, num_bytes
from lightning_rl.rollouts.sequences import Sequences, cut


class _Kept(NamedTuple):
    """One rollout; see `RolloutMemory.append`."""

    fields: Any
    valid: Any
    starts: Any
    states: Any
    burn_in: int = 0

    @property
    def parts(self) -> tuple[Any, ...]:
        return self.fields, self.valid, self.starts, self.states

    @property
    def layout(self) -> Layout:
        length, num_envs = first_leaf(self.fields).shape[:2]
        return Layout.of((int(length), int(num_envs)), self.states, self.burn_in)


class RolloutMemory:
    """The last few rollouts `[T, B, ...]`, all of one layout, addressed by step or by sequence.

    Args:
        capacity: Number of rollouts.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._kept: list[_Kept] = []
        self._before: list[_Kept] | None = None

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def is_full(self) -> bool:
        """Whether there is no room for another rollout."""
        return len(self) >= self.capacity

    @property
    def shape(self) -> tuple[int, int]:
        """`(T, B)` of each rollout; `(0, 0)` if there is none."""
        return (0, 0) if self.layout is None else self.layout.shape

    @property
    def layout(self) -> Layout | None:
        """What all of them have in common; None if there is none."""
        return self._kept[0].layout if self._kept else None

    @property
    def num_bytes(self) -> int:
        """Size of all tensors."""
        return sum(num_bytes(x) for kept in self._kept for x in kept.parts if x is not None)

    def append(
        self,
        fields: Fields,
        valid: Tensor | None = None,
        starts: Tensor | None = None,
        states: Nested | None = None,
        burn_in: int = 0,
    ) -> None:
        """Copy one rollout into the memory, which must have room for it.

        Args:
            fields: Tensors `[T, B, ...]`.
            valid: Which steps are real, `[T, B]`; None: all of them.
            starts: For a policy with memory, whether an observation is the first one of an episode, `[T, B]`.
            states: For a policy with memory, those that its sequences are unrolled from, `[K, B, ...]`.
            burn_in: How many steps before these sequences that is.

        Raises:
            ValueError: There is no room, or the rollout is laid out otherwise than those before it.
        """
        if self.is_full:
            raise ValueError(f"the memory holds {len(self)} rollouts already, expected fewer than {self.capacity}")
        given = _Kept(fields, valid, starts, states, burn_in)
        if self.layout not in (None, given.layout):
            raise ValueError(f"the rollout has {given.layout}, expected {self.layout} like those before it")
        copies = [None if x is None else map_leaves(copy_to_memory, x) for x in given.parts]
        self._kept.append(_Kept(copies[0], copies[1], copies[2], copies[3], burn_in))

    def clear(self) -> None:
        """Remove all rollouts."""
        self._kept = []

    def write(self, name: str, addresses: Tensor, values: Nested) -> None:
        """Give the steps at some addresses `[N]` one more field, or change it; elsewhere it begins with 0."""
        if name not in self._kept[0].fields:
            for index, kept in enumerate(self._kept):
                zeros = map_leaves(lambda x: x.new_zeros(*self.shape, *x.shape[1:], device="cpu"), values)
                self._kept[index] = kept._replace(fields={**kept.fields, name: zeros})
        for index, (mask, local) in self._by_rollout(addresses).items():

            def put(storage: Tensor, x: Tensor, mask: Tensor = mask, local: Tensor = local) -> None:
                storage.flatten(0, 1)[local] = x.detach().cpu()[mask]

            map_leaves(put, self._kept[index].fields[name], values)

    def steps(self) -> Tensor:
        """Return the addresses of all real steps, `[N]`."""
        valid = self._all_valid()
        return torch.arange(valid.numel())[valid.flatten()]

    def cut(self) -> tuple[Tensor, Sequences]:
        """Cut what is kept into the sequences that a policy with memory learned from, or else one for each environment.

        Returns:
            The addresses of the real steps, in the order of sequences, and the sequences, in whose
            `burn_in_observations` there are addresses too.
        """
        length, num_envs = self.shape
        first_steps = torch.arange(len(self)).unsqueeze(1) * length * num_envs + torch.arange(num_envs)
        addresses = first_steps.flatten() + num_envs * torch.arange(length).unsqueeze(1)
        valid = torch.cat(list(self._all_valid()), 1)
        starts = torch.cat(
            [torch.zeros_like(valid[:, :num_envs]) if k.starts is None else k.starts for k in self._kept], 1
        )
        nothing = torch.zeros(1, num_envs)
        states = [nothing if k.states is None else k.states for k in self._kept]
        burn_in = self._kept[0].burn_in
        rows, sequences = cut(valid, starts, map_stacked(lambda xs: torch.cat(xs, 1), states), burn_in, addresses)
        return addresses.flatten()[rows], sequences

    def _all_valid(self) -> Tensor:
        """Return which steps are real, `[rollouts, T, B]`."""
        everything = torch.ones(self.shape, dtype=torch.bool)
        return torch.stack([everything if k.valid is None else k.valid for k in self._kept] or [everything])

    def gather(self, addresses: Tensor, only: str | None = None) -> Fields:
        """Return copies of the steps at some addresses, each field of shape `[*addresses.shape, ...]`.

        Args:
            addresses: Of any shape.
            only: Return this field alone, or nothing if there is none of that name; None: all of them.
        """
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
        """Return, for each rollout that has some of the addresses, which of them, and where in it they are."""
        length, num_envs = self.shape
        rollouts, local = addresses // (length * num_envs), addresses % (length * num_envs)
        masks = {index: rollouts == index for index in set(rollouts.flatten().tolist())}
        return {index: (mask, local[mask]) for index, mask in masks.items()}

    def begin(self) -> None:
        """Remember how the memory is; no rollout is copied."""
        self._before = [*self._kept]

    def commit(self) -> None:
        """Forget how it was."""
        self._before = None

    def rollback(self) -> None:
        """Make it what it was, if that is remembered."""
        if self._before is not None:
            self._kept = self._before
            self.commit()

    def state_dict(self) -> dict[str, Any]:
        """Return the rollouts as tensors; they are not copied, since none is ever changed."""
        return {"rollouts": [kept._asdict() for kept in self._kept]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned: of as many rollouts as there is room for, or more, all but one."""
        excess = len(state["rollouts"]) - self.capacity
        self._kept = [_Kept(**kept) for kept in state["rollouts"][excess + 1 if excess >= 0 else 0 :]]

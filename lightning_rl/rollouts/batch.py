"""`Batch`: rows of a rollout for a loss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from lightning_rl.distributed import all_reduce, exact_dtype, world_size
from lightning_rl.nested import Nested, first_leaf, leaves, map_leaves
from lightning_rl.rollouts.sequences import Sequences, take
from lightning_rl.validation import ConfigurationError

# Rows of more bytes are not copied as a whole.
_LARGE = 2**24


class Batch:
    """Rows of a rollout: tensors of equal length by name, nested or not, read as attributes.

    Attributes:
        sequences: For a recurrent policy, which rows follow one another; else None.
        weight: Weight of each row: `mean(x)` is `weight · Σ x`. It is set so that with several ranks the average over
            ranks, which DDP computes, is the mean over the rows of all ranks.
        weights: Weight of each single row, `[N]`, if this field exists: `mean(x)` is `weight · Σ weights · x`.
        counts_all_rows: Whether means divide by the number of rows even if there are `weights`.
        is_normalized: Whether `advantages` are normalized already, or there are none.
        source: The rollout and which of its steps are the rows, `[T, B]`, to recompute advantages; None if unknown.
    """

    observations: Nested
    actions: Nested
    log_probs: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor
    weights: Tensor

    def __init__(
        self,
        fields: dict[str, Nested],
        weight: float | None = None,
        sequences: Sequences | None = None,
        counts_all_rows: bool = False,
        is_normalized: bool = False,
    ) -> None:
        self.fields = fields
        self.sequences = sequences
        self._given_weight = weight
        self._own_weight: float | None = None
        self.counts_all_rows, self.is_normalized = counts_all_rows, is_normalized or "advantages" not in fields
        self.source: tuple[Any, Tensor | None] | None = None  # of a `Rollout`, whose module imports this one

    @property
    def weight(self) -> float:
        """Weight of each row: the assigned one, or one over the total weight of the rows, 0 if the total is 0."""
        if self._given_weight is not None:
            return self._given_weight
        if self._own_weight is None:
            total = float(self.total_weight)
            self._own_weight = 1 / total if total else 0.0
        return self._own_weight

    @weight.setter
    def weight(self, weight: float) -> None:
        self._given_weight = weight

    @property
    def total_weight(self) -> Tensor | int:
        """Sum of `weights`, or the number of rows."""
        if "weights" in self.fields and not self.counts_all_rows:
            return self.weights.sum()
        return len(self)

    @property
    def num_bytes(self) -> int:
        """Size of the rows."""
        return sum(leaf.nbytes for leaf in leaves(self.fields))

    @property
    def is_plain(self) -> bool:
        """Whether all rows have the same weight and no sequences."""
        return self.sequences is None and "weights" not in self.fields

    @property
    def num_items(self) -> int:
        """Number of rows, or of sequences if there are any: the items that `ordered` orders."""
        return len(self) if self.sequences is None else len(self.sequences)

    def __getattr__(self, name: str) -> Nested:
        fields: dict[str, Nested] = self.__dict__.get("fields", {})  # missing while a copy is being made
        if name not in fields:
            raise AttributeError(f"batch has no field {name!r}: it has {', '.join(fields)}")
        return fields[name]

    def __len__(self) -> int:
        return len(first_leaf(self.fields))

    def counted(self, x: Tensor) -> Tensor:
        """Return the entries of `x`, `[N]`, of the rows with a weight other than 0."""
        return x[self.weights != 0] if "weights" in self.fields else x

    def mean(self, x: Tensor, name: str = "x") -> Tensor:
        """Return the mean of `x`, `[N]`, over the rows of all ranks (see `weight`); rows of weight 0 may be NaN.

        A `ValueError` begins with `name` if `x` does not have one number per row.
        """
        if x.shape != (len(self),):
            raise ValueError(
                f"{name}: rows have the shape {tuple(x.shape)}: expected ({len(self)},), one number per row of the "
                "batch; Loss.add_scalar takes a term that is not a mean over rows"
            )
        x = x if x.is_floating_point() else x.float()  # flags have a mean too
        # Such a NaN still reaches the gradient of what it was computed from.
        if "weights" in self.fields:
            x = torch.where(self.weights != 0, x, 0) * self.weights.to(x.dtype)
        elif self._given_weight is None and len(x):
            return x.mean()
        return x.sum() * self.weight

    def shuffled(self, generator: torch.Generator | None = None) -> Batch:
        """Return the rows, or sequences, in random order."""
        return self.ordered(torch.randperm(self.num_items, generator=generator))

    def ordered(self, order: Tensor) -> Batch:
        """Return the rows, or sequences, with the indices `order`, which may omit or repeat some."""
        if self.sequences is not None:
            rows, sequences = self.sequences.select(order.cpu())
            return self._with(take(rows, self.fields), sequences=sequences)
        order = order.to(first_leaf(self.fields).device)
        return self._with(map_leaves(lambda x: x.index_select(0, order), self.fields))

    def split(self, num_minibatches: int) -> Iterator[Batch]:
        """Cut the rows, or sequences, in their order into `num_minibatches` parts of almost equal numbers."""
        if self.sequences is not None:
            yield from self.minibatches(torch.arange(self.num_items), num_minibatches)
            return
        # Lists, which are leaves: a tuple would be nested.
        parts = map_leaves(lambda x: list(torch.tensor_split(x, num_minibatches)), self.fields)
        for index in range(num_minibatches):
            yield self._with(map_leaves(itemgetter(index), parts))

    def minibatches(self, order: Tensor, num_minibatches: int) -> Iterator[Batch]:
        """Yield the parts of `ordered(order).split(num_minibatches)`, without a second copy of large rows."""
        if self.sequences is None and self.num_bytes <= _LARGE:  # views of one copy are faster than many copies
            yield from self.ordered(order).split(num_minibatches)
            return
        for part in order.tensor_split(num_minibatches):
            yield self.ordered(part)

    def replace(self, **fields: Nested) -> Batch:
        """Return a batch with fields replaced or added; new advantages count as not normalized."""
        made = self._with({**self.fields, **fields}, self._given_weight, self.sequences)
        made.is_normalized = self.is_normalized and "advantages" not in fields
        made.source = None if {"values", "advantages", "returns"} & fields.keys() else self.source
        return made

    def _with(
        self, fields: dict[str, Nested], weight: float | None = None, sequences: Sequences | None = None
    ) -> Batch:
        return Batch(fields, weight, sequences, self.counts_all_rows, self.is_normalized)


def set_global_weights(parts: Sequence[Batch], device: torch.device | None = None) -> None:
    """Set each weight so that `mean` is over the rows of all ranks, 0 if none counts; a collective call.

    `device` is the device of the rank, if the rows are stored elsewhere.
    """
    if (ranks := world_size()) > 1:
        for part, total in zip(parts, _totals(parts, [part.total_weight for part in parts], device), strict=True):
            part.weight = ranks / total if total else 0.0


def set_common_weight(parts: Sequence[Batch]) -> None:
    """Set one weight so that the sum of the batches' `mean`s is the mean over all rows; a collective call."""
    (total,) = _totals(parts, [sum(float(part.total_weight) for part in parts)])
    for part in parts:
        part.weight = world_size() / total if total else 0.0


def _totals(parts: Sequence[Batch], own: Sequence[Tensor | float], device: torch.device | None = None) -> list[float]:
    """Return the sums of this rank's numbers over all ranks."""
    device = device or first_leaf(parts[0].fields).device
    totals = torch.tensor([float(x) for x in own], dtype=exact_dtype(device), device=device)
    return all_reduce(totals).tolist()


def on_grid(rows: Tensor, indices: Tensor, elsewhere: Tensor) -> Tensor:
    """Return a copy of `elsewhere`, `[T, B, ...]`, with `rows`, `[N, ...]`, at the indices t · B + b, `[N]`."""
    grid = elsewhere.clone(memory_format=torch.contiguous_format)
    grid.view(-1, *grid.shape[2:])[indices] = rows.to(grid.dtype)
    return grid


def check_minibatches(num_rows: int, num_minibatches: int, num_sequences: int | None = None) -> None:
    """Raise a `ConfigurationError` unless a rollout can be cut into equal minibatches of whole sequences."""
    sequences = "sequences of a rollout (num_envs * rollout_length / policy.memory.sequence_length)"
    for number, what in ((num_sequences, sequences), (num_rows, "steps of a rollout (num_envs * rollout_length)")):
        if number is not None and number % num_minibatches:
            raise ConfigurationError(
                f"num_minibatches={num_minibatches} does not divide the {number} {what}: expected a divisor of it"
            )

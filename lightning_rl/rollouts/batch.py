"""Rows of a rollout that a loss is computed from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from lightning_rl.distributed import all_reduce, exact_dtype, world_size
from lightning_rl.nested import Nested, first_leaf, leaves, map_leaves
from lightning_rl.rollouts.sequences import Sequences
from lightning_rl.validation import ConfigurationError

# Of which no second copy is made: bytes of the rows of a rollout.
_LARGE = 2**24


class Batch:
    """Rows of a rollout, in any order: tensors of equal length by name, nested or not, read as attributes.

    Attributes:
        sequences: For a policy with memory, which of the rows follow one another; None: each stands for itself.
        weight: What each row counts for in a mean. Losses are `weight · Σ` over rows; with several ranks the weights
            are such that the average over ranks, which DDP takes, is the mean over all ranks' rows.
        weights: Where it is there, `[N]`: rows count for `weight · weights` instead.
        counts_all_rows: Whether means divide by the number of rows, whatever they weigh.
        is_normalized: Whether `advantages` are normalized already.
        source: The rollout, and which of its steps these are, `[T, B]`; None where that is not known.
    """

    observations: Nested
    actions: Nested
    log_probs: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor
    weights: Tensor

    def __init__(
        self, fields: dict[str, Nested], weight: float | None = None, sequences: Sequences | None = None
    ) -> None:
        self.fields = fields
        self.sequences = sequences
        self._given_weight = weight
        self._own_weight: float | None = None
        self.counts_all_rows = False
        self.is_normalized = False
        self.source: tuple[Any, Tensor | None] | None = None  # of a `Rollout`, whose module imports this one

    @property
    def weight(self) -> float:
        """One over the total weight of the rows, 0 where that is 0, unless it was set."""
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
        """Sum of the rows' weights: their number, where they have none, or where all of them count."""
        if "weights" in self.fields and not self.counts_all_rows:
            return self.weights.sum()
        return len(self)

    @property
    def num_bytes(self) -> int:
        """Size of the rows."""
        return sum(leaf.nbytes for leaf in leaves(self.fields))

    @property
    def is_plain(self) -> bool:
        """Whether its rows count alike and belong to no sequences."""
        return self.sequences is None and "weights" not in self.fields

    @property
    def num_items(self) -> int:
        """Number of things that `ordered` puts in order: rows, or sequences where rows belong to such."""
        return len(self) if self.sequences is None else len(self.sequences)

    def __getattr__(self, name: str) -> Nested:
        fields: dict[str, Nested] = self.__dict__.get("fields", {})  # missing while a copy is being made
        if name not in fields:
            raise AttributeError(f"batch has no field {name!r}: it has {', '.join(fields)}")
        return fields[name]

    def __len__(self) -> int:
        return len(first_leaf(self.fields))

    def counted(self, x: Tensor) -> Tensor:
        """Return the entries of `x`, one per row, of rows that count; with memory others are there too."""
        return x[self.weights != 0] if "weights" in self.fields else x

    def mean(self, x: Tensor) -> Tensor:
        """Return the mean of `x`, one number per row, over the rows of all ranks (see `weight`).

        Rows of weight 0 take no part, not even by a NaN in `x`.
        """
        if "weights" in self.fields:
            x = torch.where(self.weights != 0, x, 0) * self.weights.to(x.dtype)
        elif self._given_weight is None and len(x):
            return x.mean()
        return x.sum() * self.weight

    def shuffled(self, generator: torch.Generator | None = None) -> Batch:
        """Return the rows in a fresh random order; where there are sequences, these are what is put into it."""
        return self.ordered(torch.randperm(self.num_items, generator=generator))

    def ordered(self, order: Tensor) -> Batch:
        """Return the rows, or sequences, with the indices `order`, which may leave some out or repeat them."""
        weight = self._given_weight if len(order) == self.num_items else None
        if self.sequences is not None:
            rows, sequences = self.sequences.select(order)
            rows = rows.to(first_leaf(self.fields).device)
            return self._with(map_leaves(itemgetter(rows), self.fields), weight, sequences)
        order = order.to(first_leaf(self.fields).device)
        return self._with(map_leaves(lambda x: x.index_select(0, order), self.fields), weight)

    def split(self, num_minibatches: int) -> Iterator[Batch]:
        """Cut the rows, in their order, into `num_minibatches` parts whose sizes differ by one at the most.

        Sequences stay whole: it is their numbers that differ by one at the most.
        """
        if self.sequences is not None:
            for rows, sequences in self.sequences.split(num_minibatches):
                yield self._with(map_leaves(itemgetter(rows), self.fields), sequences=sequences)
            return
        # Lists, which are leaves: a tuple would be nested.
        parts = map_leaves(lambda x: list(torch.tensor_split(x, num_minibatches)), self.fields)
        for index in range(num_minibatches):
            yield self._with(map_leaves(itemgetter(index), parts))

    def minibatches(self, order: Tensor, num_minibatches: int) -> Iterator[Batch]:
        """Yield what `ordered(order).split(num_minibatches)` yields.

        Where that would put a large copy of the rows beside them, as of images, each minibatch is gathered by itself.
        """
        large = self.sequences is None and self.num_bytes > _LARGE
        if not large:
            yield from self.ordered(order).split(num_minibatches)
            return
        for part in torch.tensor_split(order.to(first_leaf(self.fields).device), num_minibatches):
            yield self._with(map_leaves(lambda x, part=part: x.index_select(0, part), self.fields))

    def replace(self, **fields: Nested) -> Batch:
        """Return a batch with some fields replaced or added; new advantages are not normalized yet."""
        made = self._with({**self.fields, **fields}, self._given_weight, self.sequences)
        made.is_normalized = self.is_normalized and "advantages" not in fields
        made.source = self.source
        return made

    def _with(
        self, fields: dict[str, Nested], weight: float | None = None, sequences: Sequences | None = None
    ) -> Batch:
        """Return a batch of other rows that are like these."""
        made = Batch(fields, weight, sequences)
        made.counts_all_rows, made.is_normalized = self.counts_all_rows, self.is_normalized
        return made


def set_global_weights(parts: Sequence[Batch]) -> None:
    """Set what each row of some minibatches counts for, so that `Batch.mean` is over the rows of all ranks.

    That is 0 where no rank has a row that counts; with one rank it is what they have anyway. A collective call.
    """
    if (ranks := world_size()) > 1:
        for part, total in zip(parts, _totals(parts, [part.total_weight for part in parts]), strict=True):
            part.weight = ranks / total if total else 0.0


def set_common_weight(parts: Sequence[Batch]) -> None:
    """Set what each row of some batches counts for, so that their `mean`s add up to one over all of them.

    That is 0 where no rank has a row that counts. A collective call.
    """
    (total,) = _totals(parts, [sum(float(part.total_weight) for part in parts)])
    for part in parts:
        part.weight = world_size() / total if total else 0.0


def _totals(parts: Sequence[Batch], own: Sequence[Tensor | float]) -> list[float]:
    """Return sums over ranks of numbers that this rank has."""
    device = first_leaf(parts[0].fields).device
    totals = torch.tensor([float(x) for x in own], dtype=exact_dtype(device), device=device)
    return all_reduce(totals).tolist()


def on_grid(rows: Tensor, indices: Tensor, elsewhere: Tensor) -> Tensor:
    """Return a copy of `elsewhere`, `[T, B, ...]`, that has `rows`, `[N, ...]`, at the places t · B + b, `[N]`."""
    grid = elsewhere.clone(memory_format=torch.contiguous_format)
    grid.view(-1, *grid.shape[2:])[indices] = rows.to(grid.dtype)
    return grid


def check_minibatches(num_rows: int, num_minibatches: int, num_sequences: int | None = None) -> None:
    """Raise unless a rollout can be cut into equal minibatches.

    Args:
        num_rows: Steps of a rollout.
        num_minibatches: Parts.
        num_sequences: Of which each part has to have whole ones; None: of steps.

    Raises:
        ConfigurationError: `num_minibatches` does not divide that.
    """
    if num_sequences is not None and num_sequences % num_minibatches:
        raise ConfigurationError(
            f"num_minibatches={num_minibatches} does not divide the {num_sequences} sequences of a rollout "
            "(num_envs * rollout_length / memory.sequence_length): expected a divisor of it"
        )
    if num_rows % num_minibatches:
        raise ConfigurationError(
            f"num_minibatches={num_minibatches} does not divide the {num_rows} steps of a rollout "
            "(num_envs * rollout_length): expected a divisor of it"
        )

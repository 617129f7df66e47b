"""Rows of a rollout that belong together in time: whole sequences, cut where episodes begin, never padded."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cached_property
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_rl.nested import Nested, first_leaf, map_leaves


class Sequences:
    """Which rows of a batch follow one another, and the memory that each sequence begins with.

    The rows of a sequence are side by side and in the order of time. What says where they are is on the CPU, so that
    nothing waits for another device.

    Attributes:
        lengths: Number of rows of each sequence, 0 included, `[S]`, on the CPU.
        starts: Whether a row is an episode's first, `[N]`, on the CPU: memory is zero there.
        memory: That before the first row of each sequence, `[S, ...]`, nested as that of the policy; what it is where
            that row is an episode's first makes no difference.
        burn_in: Rows before each sequence, from whose beginning `burn_in.memory` is, and `burn_in_observations`; None:
            the memory is used as it was stored.
        burn_in_observations: `[M, ...]`, nested as the space is.
    """

    def __init__(
        self,
        lengths: Tensor,
        starts: Tensor,
        memory: Nested,
        burn_in: Sequences | None = None,
        burn_in_observations: Nested = None,
    ) -> None:
        self.lengths = lengths
        self.starts = starts
        self.memory = memory
        self.burn_in = burn_in
        self.burn_in_observations = burn_in_observations

    def __len__(self) -> int:
        return len(self.lengths)

    def select(self, order: Tensor) -> tuple[Tensor, Sequences]:
        """Return the rows of the sequences `order`, `[S']` on the CPU, one after another, and these sequences."""
        lengths = self.lengths[order]
        begins = (self.lengths.cumsum(0) - self.lengths)[order]
        rows = torch.arange(int(lengths.sum())) + (begins - lengths.cumsum(0) + lengths).repeat_interleave(lengths)
        device = first_leaf(self.memory).device
        memory = map_leaves(itemgetter(order.to(device)), self.memory)
        if self.burn_in is None:
            return rows, Sequences(lengths, self.starts[rows], memory)
        burnt, burn_in = self.burn_in.select(order)
        observations = map_leaves(itemgetter(burnt.to(device)), self.burn_in_observations)
        return rows, Sequences(lengths, self.starts[rows], memory, burn_in, observations)

    def split(self, num_parts: int) -> Iterator[tuple[slice, Sequences]]:
        """Cut the sequences, in their order, into parts, and yield the rows of each and its sequences."""
        bounds = [len(self) * part // num_parts for part in range(num_parts + 1)]
        return (self.between(begin, end) for begin, end in itertools.pairwise(bounds))

    def between(self, begin: int, end: int) -> tuple[slice, Sequences]:
        """Return the rows of the sequences from `begin` to before `end`, and these sequences; nothing is copied."""
        first = int(self.lengths[:begin].sum())
        rows = slice(first, first + int(self.lengths[begin:end].sum()))
        part = Sequences(
            self.lengths[begin:end], self.starts[rows], map_leaves(itemgetter(slice(begin, end)), self.memory)
        )
        if self.burn_in is not None:
            burnt, part.burn_in = self.burn_in.between(begin, end)
            part.burn_in_observations = map_leaves(itemgetter(burnt), self.burn_in_observations)
        return rows, part

    @cached_property
    def segments(self) -> Segments:
        """The pieces of sequences in which no episode begins but with their first row."""
        return _segments(self.lengths, self.starts, first_leaf(self.memory).device)


class Segments(NamedTuple):
    """Pieces of sequences, the longest first: at each of their steps those that still go on are the first ones.

    Attributes:
        rows: Rows in the order of steps and, within each, of segments, `[N]`.
        indices: Where in that order each row is, `[N]`.
        sequence: Of which sequence each segment is a part, `[M]`.
        fresh: Whether it begins with an episode, `[M, 1, 1]`.
        last: The last segment of each sequence that has one, and of which sequence that is, `[2, S']`.
        batch_sizes: How many segments go on at each step, `[longest]`, on the CPU.
        runs: `(steps, segments)` of each stretch of steps at which the same ones go on.
    """

    rows: Tensor
    indices: Tensor
    sequence: Tensor
    fresh: Tensor
    last: Tensor
    batch_sizes: Tensor
    runs: list[tuple[int, int]]


def _segments(lengths: Tensor, starts: Tensor, device: torch.device) -> Segments:
    sequence_of_row = torch.arange(len(lengths)).repeat_interleave(lengths)
    begins_here = starts.clone()
    begins_here[(lengths.cumsum(0) - lengths)[lengths > 0]] = True
    begins = begins_here.nonzero().squeeze(1)
    sizes, order = torch.diff(begins, append=begins.new_tensor([len(starts)])).sort(descending=True, stable=True)
    steps = torch.arange(int(sizes[0]) if len(sizes) else 0).unsqueeze(1)
    goes_on = steps < sizes
    rows = (begins[order] + steps)[goes_on]
    indices = torch.empty_like(rows)
    indices[rows] = torch.arange(len(rows))
    sequence = sequence_of_row[begins]
    # Segments are in the order of sequences before they are sorted: the last of each is where the next one differs.
    is_last = torch.ones(len(begins), dtype=torch.bool)
    is_last[:-1] = sequence[1:] != sequence[:-1]
    is_last, sequence = is_last[order], sequence[order]
    last = is_last.nonzero().squeeze(1)
    batch_sizes = goes_on.sum(1)
    widths, counts = torch.unique_consecutive(batch_sizes, return_counts=True)
    return Segments(
        rows.to(device),
        indices.to(device),
        sequence.to(device),
        starts[begins][order].view(-1, 1, 1).to(device),
        torch.stack([last, sequence[last]]).to(device),
        batch_sizes,
        list(zip(counts.tolist(), widths.tolist(), strict=True)),
    )


def cut(
    valid: Tensor | None, starts: Tensor, memory: Nested, burn_in: int, observations: Nested
) -> tuple[Tensor, Sequences]:
    """Cut a rollout of `T` steps in `B` environments into sequences of equal length in time.

    A step that is not valid belongs to none: a new episode begins after it, so that nothing goes on from it.

    Args:
        valid: Which steps are real, `[T, B]`; None: all.
        starts: Whether an observation is an episode's first, `[T, B]`.
        memory: Stored states `[K, B, ...]`: for each of the `K` sequences of an environment that at its first step,
            or `burn_in` steps before, as far as the rollout has these.
        burn_in: Number of steps before a sequence, from which its memory is made anew.
        observations: Of at least `T` steps, `[T, B, ...]`.

    Returns:
        Rows, numbered `t · B + b`, in the order of sequences, and the sequences.
    """
    (length, num_envs), device = starts.shape, first_leaf(memory).device
    is_real = torch.ones(length * num_envs, dtype=torch.bool) if valid is None else valid.cpu().flatten()
    starts = starts.flatten()
    indices = torch.arange(length * num_envs).view(length, num_envs)
    num_parts = len(first_leaf(memory))
    begins = range(0, length, length // num_parts)

    def rows_of(spans: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        """Return rows, and lengths, of every environment in the spans of time, one after another."""
        parts = [indices[begin:end].t() for begin, end in spans]
        real = [is_real[part] for part in parts]
        rows = torch.cat([part[mask] for part, mask in zip(parts, real, strict=True)])
        return rows, torch.cat([mask.sum(1) for mask in real])

    rows, lengths = rows_of([(begin, begin + length // num_parts) for begin in begins])
    states = map_leaves(lambda x: x.flatten(0, 1), memory)
    if not burn_in:
        return rows, Sequences(lengths, starts[rows], states)
    before, lengths_before = rows_of([(max(0, begin - burn_in), begin) for begin in begins])
    index = before.to(device)
    burnt = map_leaves(lambda x: x.flatten(0, 1)[index], observations)
    return rows, Sequences(lengths, starts[rows], states, Sequences(lengths_before, starts[before], states), burnt)

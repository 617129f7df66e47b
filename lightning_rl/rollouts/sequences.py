"""Sequences of steps for recurrent policies."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_rl.nested import Nested, first_leaf, map_leaves


@dataclass(eq=False)
class Sequences:
    """Which rows of a batch follow one another, and the recurrent state at the start of each sequence.

    The rows of a sequence are contiguous and in the order of time. `lengths` and `starts` are on the CPU, so that
    computing positions does not wait for a device.

    Attributes:
        lengths: Number of rows of each sequence, possibly 0, `[S]`.
        starts: Whether a row is the first of an episode, `[N]`; the recurrent state is zero there.
        memory: Recurrent state before the first row of each sequence, `[S, ...]`.
        burn_in: Rows before each sequence; unrolling them from `burn_in.memory` gives the state at the start of the
            sequence. None: `memory` is used as it was stored.
        burn_in_observations: Observations of the burn-in rows, `[M, ...]`, nested as the space.
    """

    lengths: Tensor
    starts: Tensor
    memory: Nested
    burn_in: Sequences | None = None
    burn_in_observations: Nested = None

    def __len__(self) -> int:
        return len(self.lengths)

    def select(self, which: Tensor) -> tuple[Tensor, Sequences]:
        """Return the rows of the sequences with the indices `which`, `[S']`, and copies of these sequences."""
        lengths, begins = self.lengths[which], (self.lengths.cumsum(0) - self.lengths)[which]
        rows = torch.arange(int(lengths.sum())) + (begins - lengths.cumsum(0) + lengths).repeat_interleave(lengths)
        part = Sequences(lengths, self.starts[rows], take(which, self.memory))
        if self.burn_in is not None:
            burnt, part.burn_in = self.burn_in.select(which)
            part.burn_in_observations = take(burnt, self.burn_in_observations)
        return rows, part

    @cached_property
    def segments(self) -> Segments:
        """The sequences, cut where episodes begin."""
        return _segments(self)

    @cached_property
    def padded_segments(self) -> Segments:
        """Segments for fewer calls of the core on a CPU. The state after a segment is undefined."""
        return _segments(self, padded=first_leaf(self.memory).device.type == "cpu")


def take(index: Tensor, x: Nested) -> Nested:
    """Return the rows of all leaves of `x` at indices on any device."""
    return map_leaves(itemgetter(index.to(first_leaf(x).device)), x)


class Segments(NamedTuple):
    """Pieces of sequences within one episode each, sorted by length, as in PyTorch's `PackedSequence`.

    Attributes:
        rows: Rows in the order of steps and, within each step, of segments, `[N]`, or `[≥ N]` with padding.
        indices: Position of each row in that order, `[N]`.
        sequence: Sequence of each segment, `[M]`.
        fresh: Whether the segment begins with an episode, `[M, 1, 1]`.
        last: Last segment of each sequence that has one, and the sequence, `[2, S']`.
        batch_sizes: Number of segments with a row at each step, `[longest]`, on the CPU.
        runs: `(steps, segments)` of each run of steps with the same segments.
    """

    rows: Tensor
    indices: Tensor
    sequence: Tensor
    fresh: Tensor
    last: Tensor
    batch_sizes: Tensor
    runs: list[tuple[int, int]]


def _segments(sequences: Sequences, padded: bool = False) -> Segments:
    lengths, starts, device = sequences.lengths, sequences.starts, first_leaf(sequences.memory).device
    sequence_of_row = torch.arange(len(lengths)).repeat_interleave(lengths)
    begins_here = starts.clone()
    begins_here[(lengths.cumsum(0) - lengths)[lengths > 0]] = True
    begins = begins_here.nonzero().squeeze(1)
    sizes, order = torch.diff(begins, append=begins.new_tensor([len(starts)])).sort(descending=True, stable=True)
    batch_sizes = torch.bincount(sizes)[1:].flip(0).cumsum(0).flip(0)
    if padded:  # to 4, 8, 16, …: an LSTM of 128 units takes two thirds of the time
        batch_sizes = (2.0 ** batch_sizes.log2().ceil()).long().clamp(4, len(sizes))
    # Step and segment of each computed row: no mask of all steps and segments, which may take gigabytes.
    steps = torch.arange(len(batch_sizes)).repeat_interleave(batch_sizes)
    segment = torch.arange(len(steps)) - (batch_sizes.cumsum(0) - batch_sizes).repeat_interleave(batch_sizes)
    rows = (begins[order][segment] + steps).clamp(max=len(starts) - 1)
    indices = torch.empty(len(starts), dtype=torch.int64)
    is_real = steps < sizes[segment]
    indices[rows[is_real]] = is_real.nonzero().squeeze(1)
    sequence = sequence_of_row[begins]
    # Before sorting, a segment is the last of its sequence if the next segment belongs to another one.
    is_last = torch.ones(len(begins), dtype=torch.bool)
    is_last[:-1] = sequence[1:] != sequence[:-1]
    is_last, sequence = is_last[order], sequence[order]
    last = is_last.nonzero().squeeze(1)
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

    Return rows t · B + b in the order of sequences, and the sequences. Invalid steps belong to no sequence; a new
    episode begins after them.

    Args:
        valid: Which steps are real, `[T, B]`. None: all.
        starts: Whether an observation is the first of an episode, `[T, B]`.
        memory: Recurrent states, `[K, B, ...]`: for each of the `K` sequences of an environment, the state `burn_in`
            steps before its first step, or at the start of the rollout.
        burn_in: Number of steps before a sequence from which its state is recomputed.
        observations: `[T, B, ...]`; further rows are ignored.
    """
    (length, num_envs), device = starts.shape, first_leaf(memory).device
    is_real = torch.ones(length * num_envs, dtype=torch.bool) if valid is None else valid.cpu().flatten()
    starts = starts.flatten()
    indices = torch.arange(length * num_envs).view(length, num_envs)
    size = length // len(first_leaf(memory))
    begins = range(0, length, size)

    def rows_of(spans: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        """Return rows and lengths of the sequences of all environments in each span of time."""
        parts = [indices[begin:end].t() for begin, end in spans]
        real = [is_real[part] for part in parts]
        rows = torch.cat([part[mask] for part, mask in zip(parts, real, strict=True)])
        return rows, torch.cat([mask.sum(1) for mask in real])

    rows, lengths = rows_of([(begin, begin + size) for begin in begins])
    states = map_leaves(lambda x: x.flatten(0, 1), memory)
    sequences = Sequences(lengths, starts[rows], states)
    if burn_in:
        before, lengths_before = rows_of([(max(0, begin - burn_in), begin) for begin in begins])
        index = before.to(device)
        sequences.burn_in = Sequences(lengths_before, starts[before], states)
        sequences.burn_in_observations = map_leaves(lambda x: x.flatten(0, 1)[index], observations)
    return rows, sequences

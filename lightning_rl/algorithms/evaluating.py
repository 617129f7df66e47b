"""What a policy says of the steps of a whole rollout, in parts that fit into memory."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any

import torch

from lightning_rl.nested import Nested, first_leaf, leaves, map_leaves, map_stacked
from lightning_rl.rollout import Rollout

# Rows and entries of observations per forward pass.
_MAX_ROWS, _MAX_ENTRIES = 8192, 2**24


@torch.no_grad()
def with_recomputed_values(rollout: Rollout, policy: Any) -> Rollout:  # noqa: ANN401 - a policy of any make
    """Return the rollout with the values that `policy` gives its observations now; the one given stays as it is."""
    values = in_chunks(policy.value, rollout.observations, lead=2)
    next_values = values[1:].clone()
    if len(rollout.final_indices):
        times, places = rollout.final_indices.unbind(1)
        next_values[times, places] = in_chunks(policy.value, rollout.final_observations, lead=1).to(next_values.dtype)
    next_values[rollout.terminated] = 0
    recomputed = copy.copy(rollout)
    recomputed.values, recomputed.next_values = values[:-1], next_values
    return recomputed


@torch.no_grad()
def distribution_parameters(rollout: Rollout, policy: Any) -> Nested:  # noqa: ANN401
    """Return the parameters of the distributions that `policy` now draws actions from, `[T, B, ...]`."""
    observations = map_leaves(itemgetter(slice(rollout.shape[0])), rollout.observations)
    return in_chunks(lambda x: policy(x)[0].parameters(), observations, lead=2)


def in_chunks(function: Callable[[Nested], Nested], x: Nested, lead: int) -> Nested:
    """Apply `function`, row by row in effect, to nested tensors with `lead` leading dimensions, in chunks of the first.

    The chunks of what it returns are put together again along that dimension.
    """
    return map_stacked(torch.cat, [function(chunk) for chunk in _chunks(x, lead)])


def _chunks(x: Nested, lead: int) -> Iterator[Nested]:
    width = math.prod(first_leaf(x).shape[1:lead])
    entries = sum(math.prod(leaf.shape[lead:]) for leaf in leaves(x))
    size = max(1, min(_MAX_ROWS, _MAX_ENTRIES // max(1, entries)) // max(1, width))
    for start in range(0, max(len(first_leaf(x)), 1), size):  # one of a rank that has no rows too
        yield map_leaves(itemgetter(slice(start, start + size)), x)

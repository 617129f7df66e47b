"""What the policy makes of a whole rollout: log-probabilities and values, under the parameters that acted."""

from __future__ import annotations

import math
from collections.abc import Iterator
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_rl.nested import Nested, first_leaf, leaves, map_leaves

# Where a whole rollout is evaluated at once, rows and entries per forward pass, so that memory stays bounded.
_MAX_ROWS, _MAX_ENTRIES = 8192, 2**24


class Finals(NamedTuple):
    """The observations from whose values truncated steps go on.

    Attributes:
        indices: Time and environment of each step, `[K, 2]`.
        observations: What they reached, `[K, ...]`.
        memory: Of a policy that has one, after the step, `[K, ...]`.
    """

    indices: Tensor
    observations: Nested
    memory: Nested | None


class Estimates(NamedTuple):
    """Of the steps of a rollout, `[T, B]` each; see `Rollout`."""

    log_probs: Tensor
    values: Tensor
    next_values: Tensor


@torch.no_grad()
def estimate(
    policy: Any,  # noqa: ANN401 - a `Policy`, with memory or without
    observations: Nested,
    actions: Nested,
    log_probs: list[Tensor],
    values: list[Tensor],
    terminated: Tensor,
    finals: Finals,
    last_memory: Nested | None,
) -> Estimates:
    """Return what acting gave of log-probabilities and values, and compute what it did not.

    Args:
        policy: That acted.
        observations: `[T + 1, B, ...]`.
        actions: `[T, B, ...]`.
        log_probs: Of each step, where acting gave it; else empty.
        values: Likewise.
        terminated: `[T, B]`; nothing follows there, which has the value 0.
        finals: Of truncated steps.
        last_memory: Of a policy that has one, before the last observation.
    """
    if log_probs:
        log_prob = torch.stack(log_probs)
    else:
        acted = map_leaves(itemgetter(slice(0, -1)), observations)
        parts = zip(_chunks(acted), _chunks(actions, like=acted), strict=True)
        log_prob = torch.cat([policy.log_prob(o, a) for o, a in parts])
    return Estimates(log_prob, *estimate_values(policy, observations, values, terminated, finals, last_memory))


def estimate_values(
    policy: Any,  # noqa: ANN401
    observations: Nested,
    values: list[Tensor],
    terminated: Tensor,
    finals: Finals,
    last_memory: Nested | None,
) -> tuple[Tensor, Tensor]:
    """Return the values of a rollout, and those of what its steps reached, `[T, B]`; arguments as in `estimate`."""
    if values:
        last = map_leaves(itemgetter(-1), observations)
        all_values = torch.stack([*values, _value(policy, last, last_memory)])
    else:
        all_values = torch.cat([policy.value(o) for o in _chunks(observations)])
    next_values = all_values[1:].clone()
    for start, stop in _spans(len(finals.indices), _num_entries(finals.observations, 1)):
        part = itemgetter(slice(start, stop))
        rows, final = part(finals.indices), map_leaves(part, finals.observations)
        memory = None if finals.memory is None else map_leaves(part, finals.memory)
        next_values[rows[:, 0], rows[:, 1]] = _value(policy, final, memory).to(next_values.dtype)
    return all_values[:-1], next_values.masked_fill_(terminated, 0)


def _value(policy: Any, observations: Nested, memory: Nested | None) -> Tensor:  # noqa: ANN401
    """Return values of observations `[N, ...]`, of a policy with memory from there on."""
    value: Tensor = policy.value(observations) if memory is None else policy.value(observations, memory)
    return value


def _chunks(x: Nested, like: Nested | None = None) -> Iterator[Nested]:
    """Cut `[T, B, ...]` along time as observations of the shape of `like` are cut, in parts of bounded size."""
    like = x if like is None else like
    first = first_leaf(like)
    for start, stop in _spans(len(first), _num_entries(like, 2), first.shape[1]):
        yield map_leaves(itemgetter(slice(start, stop)), x)


def _spans(length: int, num_entries: int, width: int = 1) -> Iterator[tuple[int, int]]:
    rows = max(1, min(_MAX_ROWS, _MAX_ENTRIES // max(1, num_entries)))
    size = max(1, rows // width)
    return ((start, start + size) for start in range(0, length, size))


def _num_entries(observations: Nested, leading: int) -> int:
    return sum(math.prod(leaf.shape[leading:]) for leaf in leaves(observations))

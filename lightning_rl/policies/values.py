"""Values and log-probabilities of whole rollouts: while collecting, and recomputed later."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from operator import itemgetter
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from lightning_rl.nested import Nested, first_leaf, leaves, map_leaves, map_stacked
from lightning_rl.policies.distributions import Distribution
from lightning_rl.policies.interface import Policy, RecurrentPolicy
from lightning_rl.policies.recurrent_state import RecurrentState
from lightning_rl.rollouts.batch import Batch
from lightning_rl.rollouts.rollout import Rollout

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
    log_probs: Tensor | None,
    values: Tensor | None,
    terminated: Tensor,
    finals: Finals,
    last_memory: Nested | None,
) -> Estimates:
    """Return what acting gave of log-probabilities and values, and compute what it did not.

    Args:
        policy: That acted.
        observations: `[T + 1, B, ...]`.
        actions: `[T, B, ...]`.
        log_probs: `[T, B]`, where acting gave them; else None.
        values: Likewise.
        terminated: `[T, B]`; nothing follows there, which has the value 0.
        finals: Of truncated steps.
        last_memory: Of a policy that has one, before the last observation.
    """
    if log_probs is None:
        acted = map_leaves(itemgetter(slice(0, -1)), observations)
        log_probs = in_chunks(lambda pair: policy.log_prob(*pair), (acted, actions), lead=2)
    return Estimates(log_probs, *estimate_values(policy, observations, values, terminated, finals, last_memory))


def estimate_values(
    policy: Any,  # noqa: ANN401
    observations: Nested,
    values: Tensor | None,
    terminated: Tensor,
    finals: Finals,
    last_memory: Nested | None,
) -> tuple[Tensor, Tensor]:
    """Return the values of a rollout, and those of what its steps reached, `[T, B]`; arguments as in `estimate`."""
    if values is None:
        all_values = in_chunks(policy.value, observations, lead=2)
    else:
        last = map_leaves(itemgetter(-1), observations)
        all_values = torch.cat([values, _value(policy, last, last_memory)[None]])
    next_values = all_values[1:].clone()
    if len(finals.indices):
        reached = (finals.observations,) if finals.memory is None else (finals.observations, finals.memory)
        steps, environments = finals.indices.unbind(1)
        final_values = in_chunks(lambda part: policy.value(*part), reached, lead=1)
        next_values[steps, environments] = final_values.to(next_values.dtype)
    return all_values[:-1], next_values.masked_fill_(terminated, 0)


def _value(policy: Any, observations: Nested, memory: Nested | None) -> Tensor:  # noqa: ANN401
    """Return values of observations `[N, ...]`, of a policy with memory from there on."""
    value: Tensor = policy.value(observations) if memory is None else policy.value(observations, memory)
    return value


def in_chunks(function: Callable[[Nested], Nested], x: Nested, lead: int) -> Nested:
    """Apply `function`, row by row in effect, to nested tensors with `lead` leading dimensions, in chunks of the first.

    The chunks of what it returns are put together again along that dimension.
    """
    width = math.prod(first_leaf(x).shape[1:lead])
    entries = sum(math.prod(leaf.shape[lead:]) for leaf in leaves(x))
    size = max(1, max(1, min(_MAX_ROWS, _MAX_ENTRIES // max(1, entries))) // max(1, width))
    starts = range(0, max(len(first_leaf(x)), 1), size)  # one chunk of a rank that has no rows too
    chunks = [map_leaves(itemgetter(slice(start, start + size)), x) for start in starts]
    return map_stacked(torch.cat, [function(chunk) for chunk in chunks])


@torch.no_grad()
def with_recomputed_values(policy: Policy, rollout: Rollout) -> Rollout:
    """Return a rollout of the same steps with the values of `policy` as it is now.

    A policy with memory goes through the rollout again from the memory with which it began.

    Args:
        policy: Estimates them.
        rollout: Stays as it is.
    """
    result = copy.copy(rollout)
    result.values, result.next_values = _estimate(policy, rollout)
    return result


@torch.no_grad()
def values_reached(policy: Policy, rollout: Rollout, values: Tensor) -> Tensor:
    """Return the values of what the steps of a rollout reached, `[T, B]`; 0 at a terminal state.

    A policy with memory goes through the rollout again from the memory with which it began.

    Args:
        policy: Estimates those of the last observations and of the final ones of truncated episodes.
        rollout: Of this policy, or another.
        values: Of its observations by `policy`, `[T, B]`.
    """
    return _estimate(policy, rollout, values)[1]


def _estimate(policy: Policy, rollout: Rollout, known: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return values of a rollout's observations, `known` where they are, and of what its steps reached, `[T, B]`."""
    memory, values = RecurrentState(), None
    if rollout.memory is not None:
        memory, values = _relive(cast(RecurrentPolicy, policy), rollout)
    values = values if known is None else known
    finals = Finals(rollout.final_indices, rollout.final_observations, memory.at(rollout.final_indices.tolist()))
    here, reached = estimate_values(policy, rollout.observations, values, rollout.terminated, finals, memory.state)
    return here.to(rollout.values.dtype), reached.to(rollout.values.dtype)


def _relive(policy: RecurrentPolicy, rollout: Rollout) -> tuple[RecurrentState, Tensor]:
    """Return what the policy remembers after a rollout, and its value at each step."""
    assert rollout.starts is not None
    memory, values = RecurrentState(), []
    memory.state = map_leaves(itemgetter(0), rollout.memory)
    ends = rollout.dones if rollout.valid is None else rollout.dones | ~rollout.valid
    reached: list[list[int]] = [[] for _ in range(rollout.shape[0])]
    for t, index in rollout.final_indices.tolist():
        reached[t].append(index)
    for t, environments in enumerate(reached):
        observations = map_leaves(itemgetter(t), rollout.observations)
        output = policy.act(observations, deterministic=True, memory=memory.state)
        assert output.value is not None
        values.append(output.value)
        memory.after(t, output.memory, ends[t], environments, ())
    return memory, torch.stack(values)


@torch.no_grad()
def acting_distributions(policy: Any, rollout: Rollout) -> Nested:  # noqa: ANN401 - a `Policy`, with memory or without
    """Return the parameters of the distributions that a rollout's actions were drawn from.

    Call it before anything is updated: the current policy is the one that acted.

    Returns:
        `[T, B, ...]`; of a policy with memory `[N, ...]`, in the order of `Rollout.flatten`.
    """
    if rollout.memory is None:
        observations = map_leaves(itemgetter(slice(rollout.shape[0])), rollout.observations)
        return in_chunks(lambda x: policy(x)[0].parameters(), observations, lead=2)
    # Copies: what is the same for all observations is a view of a parameter, which the updates change.
    return map_leaves(torch.clone, on_rows(policy, rollout.flatten())[0].parameters())


def on_rows(policy: Any, batch: Batch) -> tuple[Distribution, Tensor]:  # noqa: ANN401
    """Return action distribution and value of every row of a batch, with what the policy remembers there."""
    if batch.sequences is None:
        return policy(batch.observations)  # type: ignore[no-any-return]
    return policy(batch.observations, batch.sequences)  # type: ignore[no-any-return]

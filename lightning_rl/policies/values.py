"""Values and log-probabilities of whole rollouts, while collecting and recomputed later."""

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
from lightning_rl.policies.recurrent import RecurrentState
from lightning_rl.rollouts.batch import Batch
from lightning_rl.rollouts.rollout import Rollout
from lightning_rl.validation import ConfigurationError

# Limits of a forward pass, which bound its memory: rows, on a CPU and elsewhere, and entries of observations.
_MAX_ROWS, _MAX_ROWS_ELSEWHERE, _MAX_ENTRIES = 8192, 2**17, 2**24


class Finals(NamedTuple):
    """The final observations `[K, ...]` from which truncated steps bootstrap.

    Attributes:
        indices: Time and environment of each step, `[K, 2]`.
        memory: Recurrent state after each step, `[K, ...]`; None without memory.
    """

    indices: Tensor
    observations: Nested
    memory: Nested | None


def check_shape(name: str, x: Tensor, *rows: int) -> None:
    """Raise a `ConfigurationError` unless a policy has returned one number per observation."""
    if (found := tuple(x.shape)) != rows:
        expected = f"expected {rows}, one number per observation"
        raise ConfigurationError(f"make_policy: shape of the policy's {name}={found} is not valid: {expected}")


@torch.no_grad()
def log_probs_of(policy: Policy, observations: Nested, actions: Nested) -> Tensor:
    """Return the log-probabilities `[T, B]` of actions taken at all but the last observations, `[T + 1, B, ...]`."""
    acted = map_leaves(itemgetter(slice(0, -1)), observations)
    return in_chunks(lambda pair: policy.log_prob(*pair), (acted, actions), lead=2)  # type: ignore[no-any-return]


@torch.no_grad()
def estimate_values(
    policy: Any,
    observations: Nested,
    values: Tensor | None,
    terminated: Tensor,
    finals: Finals,
    last_memory: Nested | None,
) -> tuple[Tensor, Tensor]:
    """Return values and next values, `[T, B]`, at observations `[T + 1, B, ...]`; all computed if `values` is None."""
    length, num_envs = terminated.shape
    if values is None:
        all_values = in_chunks(policy.value, observations, lead=2)
        check_shape("values", all_values, length + 1, num_envs)
    else:
        last = map_leaves(itemgetter(-1), observations)
        last_value = policy.value(last) if last_memory is None else policy.value(last, last_memory)
        check_shape("values", values, length, num_envs)
        check_shape("values", last_value, num_envs)
        all_values = torch.cat([values, last_value[None]])
    next_values = all_values[1:].clone()
    if len(finals.indices):
        reached = (finals.observations,) if finals.memory is None else (finals.observations, finals.memory)
        steps, environments = finals.indices.unbind(1)
        final_values = in_chunks(lambda part: policy.value(*part), reached, lead=1)
        next_values[steps, environments] = final_values.to(next_values.dtype)
    return all_values[:-1], next_values.masked_fill_(terminated, 0)


def in_chunks(function: Callable[[Nested], Nested], x: Nested, lead: int) -> Nested:
    """Apply a row-wise function of tensors with `lead` leading dimensions to `x`, in chunks of bounded size."""
    width = math.prod(first_leaf(x).shape[1:lead])
    entries = sum(math.prod(leaf.shape[lead:]) for leaf in leaves(x))
    rows = _MAX_ROWS if first_leaf(x).is_cpu else _MAX_ROWS_ELSEWHERE
    size = max(1, min(rows, _MAX_ENTRIES // max(1, entries)) // max(1, width))
    if len(first_leaf(x)) <= size:  # also without a row; a compiled loss allows any number of rows here
        return map_leaves(torch.clone, function(x))  # it may be a view of a parameter, which the updates change
    starts = range(0, len(first_leaf(x)), size)
    chunks = [map_leaves(itemgetter(slice(start, start + size)), x) for start in starts]
    return map_stacked(torch.cat, [function(chunk) for chunk in chunks])


@torch.no_grad()
def with_recomputed_values(policy: Policy, rollout: Rollout, values: Tensor | None = None) -> Rollout:
    """Return a copy of a rollout, of any policy, with this policy's current values.

    `values` of its observations, `[T, B]`, may be known. A recurrent policy unrolls from the rollout's first state.
    """
    result, memory, unrolled = copy.copy(rollout), RecurrentState(), None
    if rollout.memory is not None:
        memory, unrolled = _rerun(cast(RecurrentPolicy, policy), rollout)
    reached_memory = None if unrolled is None else memory.at(rollout.final_indices.tolist())
    finals = Finals(rollout.final_indices, rollout.final_observations, reached_memory)
    here, reached = estimate_values(
        policy, rollout.observations, unrolled if values is None else values, rollout.terminated, finals, memory.state
    )
    result.values, result.next_values = here.to(rollout.values.dtype), reached.to(rollout.values.dtype)
    return result


def _rerun(policy: RecurrentPolicy, rollout: Rollout) -> tuple[RecurrentState, Tensor]:
    """Run a policy over a rollout. Return its recurrent states, and its value at each step, `[T, B]`."""
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
def acting_distributions(policy: Any, rollout: Rollout) -> Nested:  # a `Policy` or `RecurrentPolicy`
    """Return the parameters of the distributions that a rollout's actions were drawn from, `[T, B, ...]`.

    Call this before the first update, while the current policy is the one that acted. With memory the shape is `[N,
    ...]`, in the order of `Rollout.flatten`.
    """
    if rollout.memory is None:
        observations = map_leaves(itemgetter(slice(rollout.shape[0])), rollout.observations)
        return in_chunks(lambda x: policy(x)[0].parameters(), observations, lead=2)
    # Copies, since a distribution parameter may be a view of a parameter of the policy, which the updates change.
    return map_leaves(torch.clone, on_rows(policy, rollout.flatten())[0].parameters())


def on_rows(policy: Any, batch: Batch) -> tuple[Distribution, Tensor]:
    """Return action distribution and value of every row of a batch, from the recurrent states of its sequences."""
    if batch.sequences is None:
        return policy(batch.observations)  # type: ignore[no-any-return]
    return policy(batch.observations, batch.sequences)  # type: ignore[no-any-return]

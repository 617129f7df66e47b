"""Values of a rollout under another critic than the one that was there when it was collected."""

from __future__ import annotations

import copy
from operator import itemgetter
from typing import cast

import torch
from torch import Tensor

from lightning_rl.episode_memory import EpisodeMemory
from lightning_rl.estimates import Finals, estimate_values
from lightning_rl.nested import map_leaves
from lightning_rl.policy_interface import Policy, RecurrentPolicy
from lightning_rl.rollouts.rollout import Rollout


@torch.no_grad()
def revalued(policy: Policy, rollout: Rollout) -> Rollout:
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
    memory, values = EpisodeMemory(), None
    if rollout.memory is not None:
        memory, values = _relive(cast(RecurrentPolicy, policy), rollout)
    values = values if known is None else known
    finals = Finals(rollout.final_indices, rollout.final_observations, memory.at(rollout.final_indices.tolist()))
    here, reached = estimate_values(policy, rollout.observations, values, rollout.terminated, finals, memory.state)
    return here.to(rollout.values.dtype), reached.to(rollout.values.dtype)


def _relive(policy: RecurrentPolicy, rollout: Rollout) -> tuple[EpisodeMemory, Tensor]:
    """Return what the policy remembers after a rollout, and its value at each step."""
    assert rollout.starts is not None
    memory, values = EpisodeMemory(), []
    memory.state = map_leaves(itemgetter(0), rollout.memory)
    ends = rollout.ends if rollout.valid is None else rollout.ends | ~rollout.valid
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

"""Rollouts as sequences for off-policy corrections."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from gymnasium import spaces
from torch import Tensor, nn

from lightning_rl.nested import map_leaves
from lightning_rl.policies.interface import as_recurrent
from lightning_rl.rollouts.batch import Batch, on_grid
from lightning_rl.rollouts.rollout import Rollout
from lightning_rl.spaces import sampled_observations


class Unroll(NamedTuple):
    """Steps of environments in the order of time, and the rows that are learned from them.

    Attributes:
        rollout: `[T, B]`.
        batch: Its real steps; `places` says where each is, `t · B + b`.
    """

    rollout: Rollout
    batch: Batch

    def rows(self, x: Tensor) -> Tensor:
        """Return the entries of `x`, `[T, B]`, that belong to the rows, `[N]`."""
        return x.reshape(-1)[self.batch.places]

    def grid(self, rows: Tensor, elsewhere: Tensor) -> Tensor:
        """Return `rows`, `[N]`, where they belong, `[T, B]`, and `elsewhere` the entries that it has there."""
        return on_grid(rows, self.batch.places, elsewhere)


def example_unroll(policy: nn.Module, observation_space: spaces.Space[Any], length: int) -> Rollout:
    """Return a rollout of one environment in which every step is truncated, with zeros for actions.

    Args:
        policy: On whose device, and in whose precision, it is as it would be collected.
        observation_space: Of one environment.
        length: Its steps.
    """
    weight = next(policy.parameters())
    row = sampled_observations(observation_space, weight.dtype, 1)
    observations = map_leaves(lambda x: x.to(weight.device).expand(length + 1, *x.shape), row)
    flags = torch.ones(length, 1, dtype=torch.bool, device=weight.device)
    numbers = torch.zeros_like(flags, dtype=torch.promote_types(weight.dtype, torch.float32))
    rollout = Rollout(
        observations=observations,
        actions=numbers,
        rewards=numbers,
        terminated=~flags,
        truncated=flags,
        log_probs=numbers,
        values=numbers,
        next_values=numbers,
        final_indices=flags.nonzero(),
        final_observations=map_leaves(lambda x: x[1:, 0], observations),
        starts=flags.cpu(),
    )
    if (recurrent := as_recurrent(policy)) is not None and recurrent.memory is not None:
        num_states = len(recurrent.memory.stored_steps(length))
        rollout.memory = map_leaves(lambda x: x.expand(num_states, *x.shape), recurrent.initial_memory(1))
        rollout.burn_in = recurrent.memory.burn_in
    return rollout

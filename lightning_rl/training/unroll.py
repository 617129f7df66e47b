"""Rollouts as sequences for off-policy corrections."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from gymnasium import spaces
from torch import Tensor, nn

from lightning_rl.distributed import world_size
from lightning_rl.nested import Nested, map_leaves
from lightning_rl.policies.interface import as_recurrent
from lightning_rl.rollouts.batch import Batch, on_grid
from lightning_rl.rollouts.rollout import Rollout
from lightning_rl.spaces import sampled_observations


class VTraceEstimates(NamedTuple):
    """What a learner has made of the rows of an unroll, without gradient, `[N]` each.

    Attributes:
        values: By its critic.
        log_rhos: Logarithms of the importance weights.
        advantages: By V-trace.
        returns: V-trace targets of the values.
    """

    values: Tensor
    log_rhos: Tensor
    advantages: Tensor
    returns: Tensor


class Unroll:
    """Steps of environments in the order of time, and the rows that are learned from them.

    Attributes:
        rollout: `[T, B]`.
        batch: Its real steps; `places` says where each is, `t · B + b`.
        replayed: Steps of earlier rollouts that are learned from together with these; None: none.
        estimates: What the last loss has made of the rows; None before.
        distributions: The parameters of the learner's action distributions then, `[N, ...]`, where they are kept.
    """

    def __init__(self, rollout: Rollout, batch: Batch, replayed: Unroll | None = None) -> None:
        self.rollout = rollout
        self.batch = batch
        self.replayed = replayed
        self.estimates: VTraceEstimates | None = None
        self.distributions: Nested | None = None

    @property
    def parts(self) -> list[Unroll]:
        """Itself, and what is replayed beside it."""
        return [self] if self.replayed is None else [self, self.replayed]

    @property
    def num_bytes(self) -> int:
        """Size of the rows."""
        return sum(part.batch.num_bytes for part in self.parts)

    def rows(self, x: Tensor) -> Tensor:
        """Return the entries of `x`, `[T, B]`, that belong to the rows, `[N]`."""
        return x.reshape(-1)[self.batch.places]

    def grid(self, rows: Tensor, elsewhere: Tensor) -> Tensor:
        """Return `rows`, `[N]`, where they belong, `[T, B]`, and `elsewhere` the entries that it has there."""
        return on_grid(rows, self.batch.places, elsewhere)


def unroll(rollout: Rollout, weights: Tensor | None = None, **per_step: Nested) -> Unroll:
    """Return a rollout with its real steps as rows; those that do not count are among them, for traces go on there.

    Args:
        rollout: Any.
        weights: How much each step counts, `[T, B]`; None: all the same.
        **per_step: More tensors `[T, B, ...]` that the rows are to have.
    """
    places = torch.arange(rollout.rewards.numel(), device=rollout.rewards.device).view(rollout.shape)
    if weights is not None:
        per_step["weights"] = weights
    return Unroll(rollout, rollout.flatten(places=places, **per_step))


Reduction = Literal["mean", "sum"]


def reduction_scale(reduction: Reduction, batch: Batch) -> float:
    """Return what makes of a mean what a reduction asks for: 1, or how many rows of all ranks it is over."""
    return 1.0 if reduction == "mean" or not batch.weight else world_size() / batch.weight


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

"""Inputs of a gradient step besides `Batch`, and minibatches as plain data for a file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lightning_rl.distributed import world_size
from lightning_rl.nested import Nested, map_leaves
from lightning_rl.rollouts.batch import Batch, on_grid, set_common_weight
from lightning_rl.rollouts.rollout import Rollout
from lightning_rl.rollouts.sequences import Sequences


class BatchPair(NamedTuple):
    """Two batches for one step: one for the policy loss, one for the value loss."""

    policy: Batch
    value: Batch

    @property
    def num_bytes(self) -> int:
        return self.policy.num_bytes + self.value.num_bytes


class VTraceEstimates(NamedTuple):
    """Values, log importance ratios, V-trace advantages and targets of an unroll, `[N]`, without gradient."""

    values: Tensor
    log_rhos: Tensor
    advantages: Tensor
    returns: Tensor


@dataclass(eq=False)
class Unroll:
    """A rollout `[T, B]` in time order, together with its real steps as rows of a batch.

    Attributes:
        batch: The rows. Its field `places` has the index t · B + b of each row.
        replayed: Unroll of earlier steps that the same gradient step learns from. None: no replay.
        is_on_policy: Whether the current policy, with its normalizers, collected the rollout; false with actors.
        estimates: Estimates of the last loss. None before the first.
        distributions: Parameters of the learner's action distributions at that time, `[N, ...]`, if they are stored.
    """

    rollout: Rollout
    batch: Batch
    replayed: Unroll | None = None
    is_on_policy: bool = False
    estimates: VTraceEstimates | None = None
    distributions: Nested | None = None

    @property
    def parts(self) -> list[Unroll]:
        """This unroll, and the replayed one if there is one."""
        return [self] if self.replayed is None else [self, self.replayed]

    @property
    def num_bytes(self) -> int:
        return sum(part.batch.num_bytes for part in self.parts)

    def rows(self, x: Tensor) -> Tensor:
        """Return the entries of `x`, `[T, B]`, for the rows, `[N]`."""
        return x.reshape(-1)[self.batch.places]

    def grid(self, rows: Tensor, elsewhere: Tensor) -> Tensor:
        """Return `elsewhere`, `[T, B]`, with the entries of the rows replaced by `rows`, `[N]`."""
        return on_grid(rows, self.batch.places, elsewhere)


def unroll(rollout: Rollout, weights: Tensor | None = None, **per_step: Nested) -> Unroll:
    """Return the unroll of a rollout with step weights `[T, B]` and further tensors `[T, B, ...]` for the rows.

    Steps of weight 0 stay among the rows, because traces pass through them.
    """
    places = torch.arange(rollout.rewards.numel(), device=rollout.rewards.device).view(rollout.shape)
    return Unroll(rollout, rollout.flatten(places=places, weights=weights, **per_step))


Reduction = Literal["mean", "sum"]


def reduction_scale(reduction: Reduction, batch: Batch) -> float:
    """Return the factor that turns a mean into the reduction: 1, or the number of rows of all ranks."""
    # A compiled loss has a tensor as weight, which is not 0 and cannot be compared.
    has_rows = isinstance(batch.weight, Tensor) or batch.weight != 0
    return world_size() / batch.weight if reduction == "sum" and has_rows else 1.0


Minibatch = Batch | BatchPair | Unroll
_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in (Batch, BatchPair, Rollout, Sequences, Unroll)}
_PARTS: dict[type[Any], tuple[str, ...]] = {
    Batch: ("fields", "sequences", "counts_all_rows", "is_normalized"),
    BatchPair: ("policy", "value"),
    Sequences: ("lengths", "starts", "memory", "burn_in", "burn_in_observations"),
    Unroll: ("rollout", "batch", "replayed", "is_on_policy"),
}
_CLASS = "__class__"


def minibatch_state(x: Any) -> Any:  # a minibatch or a part of one
    """Return a minibatch as CPU tensors and plain values, without the rows of other ranks in its weight."""
    if type(x) in _PARTS:
        parts = {name: minibatch_state(getattr(x, name)) for name in _PARTS[type(x)]}
        return {_CLASS: type(x).__name__, **parts}
    if isinstance(x, Rollout):
        return {_CLASS: "Rollout", **x.state_dict()}
    if isinstance(x, dict | tuple):
        return map_leaves(minibatch_state, x)
    return x.detach().to("cpu", copy=True) if isinstance(x, Tensor) else x


def minibatch_from_state(state: Any) -> Any:
    """Return the minibatch that `minibatch_state` described."""
    if not (isinstance(state, dict) and _CLASS in state):
        return state
    kind = _KINDS[state[_CLASS]]
    made = kind(**{name: minibatch_from_state(x) for name, x in state.items() if name != _CLASS})
    if kind is Unroll:
        set_common_weight([part.batch for part in made.parts])
    return made

"""Inputs of a gradient step besides `Batch`, and minibatches as plain data for a file."""

from __future__ import annotations

from collections.abc import Mapping
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


class Unroll:
    """A rollout `[T, B]` in time order, together with its real steps as rows of a batch.

    Attributes:
        batch: The rows. Its field `places` has the index t · B + b of each row.
        replayed: Unroll of earlier steps that the same gradient step learns from. None: no replay.
        estimates: Estimates of the last loss. None before the first.
        distributions: Parameters of the learner's action distributions at that time, `[N, ...]`, if they are stored.
    """

    def __init__(self, rollout: Rollout, batch: Batch, replayed: Unroll | None = None) -> None:
        self.rollout = rollout
        self.batch = batch
        self.replayed = replayed
        self.estimates: VTraceEstimates | None = None
        self.distributions: Nested | None = None

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
    return 1.0 if reduction == "mean" or not batch.weight else world_size() / batch.weight


Minibatch = Batch | BatchPair | Unroll


def minibatch_state(minibatch: Minibatch) -> dict[str, Any]:
    """Return a minibatch as CPU tensors and plain values, without the rows of other ranks in its weight."""
    if isinstance(minibatch, BatchPair):
        return {"pair": [_batch_state(batch) for batch in minibatch]}
    if isinstance(minibatch, Unroll):
        parts = minibatch.parts
        return {"unroll": [{"rollout": x.rollout.state_dict(), "batch": _batch_state(x.batch)} for x in parts]}
    return {"batch": _batch_state(minibatch)}


def minibatch_from_state(state: Mapping[str, Any]) -> Minibatch:
    """Return the minibatch that `minibatch_state` described."""
    if "pair" in state:
        return BatchPair(*map(_batch_from, state["pair"]))
    if "unroll" in state:
        parts = [Unroll(Rollout(**part["rollout"]), _batch_from(part["batch"])) for part in state["unroll"]]
        set_common_weight([part.batch for part in parts])
        parts[0].replayed = parts[1] if len(parts) > 1 else None
        return parts[0]
    return _batch_from(state["batch"])


def _batch_state(batch: Batch) -> dict[str, Any]:
    sequences = None if batch.sequences is None else _sequences_state(batch.sequences)
    flags = {"counts_all_rows": batch.counts_all_rows, "is_normalized": batch.is_normalized}
    return {"fields": map_leaves(_copied, batch.fields), "sequences": sequences, **flags}


def _batch_from(state: Mapping[str, Any]) -> Batch:
    sequences = None if state["sequences"] is None else _sequences_from(state["sequences"])
    batch = Batch(state["fields"], sequences=sequences)
    batch.counts_all_rows, batch.is_normalized = state["counts_all_rows"], state["is_normalized"]
    return batch


def _sequences_state(sequences: Sequences) -> dict[str, Any]:
    tensors = {"lengths": sequences.lengths, "starts": sequences.starts, "memory": sequences.memory}
    state: dict[str, Nested] = map_leaves(_copied, tensors)
    if sequences.burn_in is None:
        return state
    burn_in_observations = map_leaves(_copied, sequences.burn_in_observations)
    return {**state, "burn_in": _sequences_state(sequences.burn_in), "burn_in_observations": burn_in_observations}


def _sequences_from(state: Mapping[str, Any]) -> Sequences:
    burn_in = {"burn_in": _sequences_from(state["burn_in"])} if "burn_in" in state else {}
    return Sequences(**{**state, **burn_in})


def _copied(x: Tensor) -> Tensor:
    return x.detach().to("cpu", copy=True)

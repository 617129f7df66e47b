"""What a step is taken from, and how it is written to a file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from lightning_rl.nested import Nested, map_leaves
from lightning_rl.rollouts.batch import Batch, set_common_weight
from lightning_rl.rollouts.rollout import Rollout
from lightning_rl.rollouts.sequences import Sequences
from lightning_rl.training.unroll import Unroll


class BatchPair(NamedTuple):
    """Two batches for one step: one for the loss of the policy, one for that of the value."""

    policy: Batch
    value: Batch

    @property
    def num_bytes(self) -> int:
        """Size of the rows."""
        return self.policy.num_bytes + self.value.num_bytes


Minibatch = Batch | BatchPair | Unroll


def minibatch_state(minibatch: Minibatch) -> dict[str, Any]:
    """Return a minibatch as tensors on the CPU and plain values, without the weight that other ranks give its rows."""
    if isinstance(minibatch, BatchPair):
        return {"pair": [_state_of(batch) for batch in minibatch]}
    if isinstance(minibatch, Unroll):
        return {"unroll": [{"rollout": x.rollout.state_dict(), "batch": _state_of(x.batch)} for x in minibatch.parts]}
    return {"batch": _state_of(minibatch)}


def minibatch_from_state(state: Mapping[str, Any]) -> Minibatch:
    """Return the minibatch that `minibatch_state` described."""
    if "pair" in state:
        return BatchPair(*map(_batch_of, state["pair"]))
    if "unroll" in state:
        parts = [Unroll(Rollout(**part["rollout"]), _batch_of(part["batch"])) for part in state["unroll"]]
        set_common_weight([part.batch for part in parts])
        parts[0].replayed = parts[1] if len(parts) > 1 else None
        return parts[0]
    return _batch_of(state["batch"])


def _state_of(batch: Batch) -> dict[str, Any]:
    sequences = None if batch.sequences is None else _sequences_state(batch.sequences)
    flags = {"counts_all_rows": batch.counts_all_rows, "is_normalized": batch.is_normalized}
    return {"fields": map_leaves(_copied, batch.fields), "sequences": sequences, **flags}


def _batch_of(state: Mapping[str, Any]) -> Batch:
    sequences = state["sequences"]
    batch = Batch(state["fields"], sequences=None if sequences is None else _sequences_of(sequences))
    batch.counts_all_rows, batch.is_normalized = state["counts_all_rows"], state["is_normalized"]
    return batch


def _sequences_state(sequences: Sequences) -> dict[str, Any]:
    tensors = {"lengths": sequences.lengths, "starts": sequences.starts, "memory": sequences.memory}
    state: dict[str, Nested] = map_leaves(_copied, tensors)
    if sequences.burn_in is None:
        return state
    return {
        **state,
        "burn_in": _sequences_state(sequences.burn_in),
        "burn_in_observations": map_leaves(_copied, sequences.burn_in_observations),
    }


def _sequences_of(state: Mapping[str, Any]) -> Sequences:
    burn_in = {"burn_in": _sequences_of(state["burn_in"])} if "burn_in" in state else {}
    return Sequences(**{**state, **burn_in})


def _copied(x: Tensor) -> Tensor:
    return x.detach().to("cpu", copy=True)

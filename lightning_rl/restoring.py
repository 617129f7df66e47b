"""Going on with the environments of an earlier run, on every rank, and saying what is otherwise than it was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn  # type: ignore[attr-defined]

from lightning_rl.collector import Collector
from lightning_rl.random_state import gather_ranks


def restore(collector: Collector, states: Sequence[dict[str, Any] | None], rank: int, name: str) -> None:
    """Take the environments of a rank back to where a checkpoint left them; a collective call.

    What could not be taken back begins new episodes, and is said once for all ranks.

    Args:
        collector: Has the environments of this rank.
        states: Of the ranks that there were; a further one begins anew.
        rank: This one.
        name: Of the environments.
    """
    fresh: list[int] | None = []
    if rank < len(states):
        state = states[rank]
        fresh = None if state is None else collector.load_state_dict(state)
        if state is not None and fresh:  # those that were not there before are not missed
            fresh = [index for index in fresh if index < len(state["returns"])]
    ranks = gather_ranks(fresh)
    lost = [_which(indices, index, len(ranks)) for index, indices in enumerate(ranks) if indices is None or indices]
    if lost:
        rank_zero_warn(
            f"{', '.join(lost)} of {name} could not be taken back to where they were: they begin new episodes, so this "
            "run is not bit for bit what it would have been"
        )


def _which(indices: list[int] | None, rank: int, num_ranks: int) -> str:
    """Name environments of a rank; None stands for all."""
    which = "the environments" if indices is None else f"environments {', '.join(map(str, indices))}"
    return which if num_ranks == 1 else f"{which} on rank {rank}"


def say_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Say which settings are not those of the checkpoint; one that it does not know is passed over."""
    for name, value in now.items():
        if value != before.get(name, value):
            effect = "; environments that there were before go on from where they were" * (name == "num_envs")
            rank_zero_info(f"Resuming with {name}={value!r} (before: {before[name]!r}){effect}")

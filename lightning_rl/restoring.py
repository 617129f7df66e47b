"""Going on with the environments of an earlier run, on every rank, and saying what is otherwise than it was."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn  # type: ignore[attr-defined]

from lightning_rl.collector import Collector
from lightning_rl.distributed import gather_ranks
from lightning_rl.nested import first_leaf
from lightning_rl.tensor_collector import TensorCollector
from lightning_rl.validation import ConfigurationError, to_plain_data

# From here on it may take some seconds: a game of Atari has up to 27,000 steps, of a millisecond each.
_MANY_STEPS = 5000


def restore(
    collector: Collector | TensorCollector, states: Sequence[dict[str, Any] | None], rank: int, name: str
) -> None:
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
        if (steps := _recorded_steps(state)) >= _MANY_STEPS:
            rank_zero_info(f"Playing {steps:,} recorded steps of {name} again, to go on with the episodes under way")
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


def _recorded_steps(state: Mapping[str, Any] | None) -> int:
    environments = (state or {}).get("environments") or {}
    records = environments["environments"] if environments.get("kind") == "episodes" else []
    return sum(len(first_leaf(record["actions"])) for record in records if "actions" in record)


def _which(indices: list[int] | None, rank: int, num_ranks: int) -> str:
    """Name environments of a rank; None stands for all."""
    which = "the environments" if indices is None else f"environments {', '.join(map(str, indices))}"
    return which if num_ranks == 1 else f"{which} on rank {rank}"


_EFFECTS = {
    "num_envs": "; environments that there were before go on from where they were",
    "seed": ", of evaluation and of further environments; others go on with the seeds they had",
}


def plain_parts(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the settings that a checkpoint can hold."""
    plain = {}
    for name, value in settings.items():
        with contextlib.suppress(ConfigurationError):
            plain[name] = to_plain_data(name, value)
    return plain


def check_same_environment(before: Mapping[str, Any], env_id: str) -> None:
    """Raise unless a run in an environment goes on from settings that name the same one, wherever it is registered.

    Raises:
        ConfigurationError: They name another one.
    """
    stored = before["env_id"]
    if stored.rpartition(":")[2] != env_id.rpartition(":")[2]:
        raise ConfigurationError(
            f"env_id={env_id!r} does not fit the checkpoint: expected {stored!r}, which it was trained in; init_from "
            "begins a new run with its parameters"
        )


def say_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Say which settings are not those of the checkpoint; one that it does not know is passed over."""
    for name, value in now.items():
        if value != before.get(name, value):
            rank_zero_info(f"Resuming with {name}={value!r} (before: {before[name]!r}){_EFFECTS.get(name, '')}")

"""The state of all environments of a batch, as tensors and plain values."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium.vector import SyncVectorEnv

from lightning_rl.environments.places import Places
from lightning_rl.environments.seeding import OWN_STATE
from lightning_rl.nested import Nested, map_leaves, nested_paths

Array = np.ndarray[Any, Any]


def recorded(env: Any, places: Places) -> list[dict[str, Any]]:  # noqa: ANN401 - a vector environment of single ones
    """Return the record of every environment (see `SeededEpisodes.recorded`)."""
    records = []
    for index, record in enumerate(env.call("recorded")):
        # A worker that was lost since the last step is only replaced in the next one.
        lost = {"stream_seed": places.streams[index], "episode": int(places.episodes[index])}
        records.append(lost if record is None else to_tensors(record))
    return records


def restore(env: Any, places: Places, states: list[dict[str, Any]]) -> tuple[Array, Nested]:  # noqa: ANN401
    """Give every environment its own record.

    Returns:
        Which environments are where they were, `[B]`, and the observations, `[B, ...]`; the others have begun new
        episodes.
    """
    records = [to_arrays(state) for state in states]
    places.streams = [record["stream_seed"] for record in records]
    base = env.unwrapped
    if isinstance(base, SyncVectorEnv):
        answers: Any = [one.get_wrapper_attr("restore")(record) for one, record in zip(base.envs, records, strict=True)]
    else:
        answers = base.call_each("restore", [(record,) for record in records])
        # None comes from a worker that was lost while it played the episode again.
        answers = [(False, base.replace(i)[0]) if answer is None else answer for i, answer in enumerate(answers)]
    exact, rows = zip(*answers, strict=True)
    places.begin(~np.array(exact))
    # Environments may give keys in any order, and lists for tuples.
    like = nested_paths(env.single_observation_space)
    return np.array(exact), map_leaves(lambda _, *parts: np.stack(parts), like, *rows)


def for_seeds(state: dict[str, Any], seeds: list[int]) -> dict[str, Any]:
    """Return the state of a batch as one of `len(seeds)` environments: the first ones stay, further ones begin anew."""
    kept, added = state["environments"][: len(seeds)], seeds[len(state["environments"]) :]
    # Before the first episode of the stream that is the new environment's own.
    beginning = [{"stream_seed": seed, "episode": -1} for seed in added]
    counts = {
        name: torch.cat([state[name][: len(seeds)], torch.full((len(added),), value, dtype=state[name].dtype)])
        for name, value in (("began", 0), ("episodes", -1), ("resets_next", False))
    }
    return {**state, **counts, "environments": [*kept, *beginning]}


def to_tensors(values: dict[str, Any]) -> dict[str, Any]:
    """Copy arrays to tensors, nested ones too."""

    def convert(x: Any) -> Any:  # noqa: ANN401
        return torch.from_numpy(x.copy()) if isinstance(x, np.ndarray) else x

    return {key: x if key == OWN_STATE else map_leaves(convert, x) for key, x in values.items()}


def to_arrays(values: dict[str, Any]) -> dict[str, Any]:
    """View tensors as arrays: worker processes would get them as shared memory, which does not outlive its maker."""

    def convert(x: Any) -> Any:  # noqa: ANN401
        return x.numpy() if isinstance(x, torch.Tensor) else x

    return {key: x if key == OWN_STATE else map_leaves(convert, x) for key, x in values.items()}

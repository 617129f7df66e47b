"""Seeds derived from the seed of the run, and the current episode of each environment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

TRAINING, EVALUATION, SAMPLING, MINIBATCHES, TESTING, ACTORS, FILMING = range(7)
"""Roles: the first branch of the tree of seeds."""

Array = np.ndarray[Any, Any]


def derive_seed(*path: int) -> int:
    """Return the seed at a node of the tree of seeds: below 2^31, independent of the seeds of all other nodes."""
    return int(np.random.SeedSequence(path[0], spawn_key=path[1:]).generate_state(1)[0] >> 1)


def role_prefix(evaluation: bool) -> str:
    """Return the word by which messages distinguish evaluation environments, whose indices start at 0 too."""
    return "evaluation " if evaluation else ""


def describe(index: int, episode: int, seed: int, step: int, evaluation: bool = False) -> str:
    """Name an environment in a message; `reset(seed=seed)` and the same `step` actions reproduce its state."""
    return f"{role_prefix(evaluation)}environment {index} (episode {episode}, seed {seed}, step {step})"


class EpisodeTracker:
    """Tracks the episode, seed and step of `B` environments, for error messages and checkpoints.

    Attributes:
        clock: Steps since the first reset.
        streams: Seed of each environment's stream; after resuming, the seed of the previous run.
        episodes: Current episode of each environment, `[B]`.
        began: `clock` at the start of that episode, `[B]`.
    """

    def __init__(self, seeds: list[int], reset_seed: list[int] | Array | int | None, evaluation: bool = False) -> None:
        self._seeds = seeds
        self._reset_seed = reset_seed
        self._evaluation = evaluation
        self.reset()

    def reset(self) -> None:
        self.clock = 0
        self.streams = list(self._seeds)
        self.episodes = np.zeros(len(self._seeds), np.int64)
        self.began = np.zeros(len(self._seeds), np.int64)

    def start(self, which: Array, in_steps: int = 0) -> None:
        """Start the next episode of the environments in the mask `which`, `[B]`, `in_steps` steps from now."""
        self.episodes += which
        self.began[which] = self.clock + in_steps

    def start_at(self, index: int, episode: int) -> None:
        self.episodes[index] = episode
        self.began[index] = self.clock

    def where(self, index: int) -> tuple[int, int, int]:
        return self.streams[index], int(self.episodes[index]), max(0, self.clock - int(self.began[index]))

    def label(self, index: int) -> str:
        _, episode, step = self.where(index)
        return self.label_at(index, episode, step)

    def label_at(self, index: int, episode: int, step: int) -> str:
        if isinstance(self._reset_seed, list):
            seed = derive_seed(self.streams[index], episode)
        else:
            seed = self._seeds[0 if isinstance(self._reset_seed, int) else index]
        return describe(index, episode, seed, step, self._evaluation)

    def labels(self, indices: Sequence[int]) -> str:
        return ", ".join(map(self.label, indices)) or f"an {role_prefix(self._evaluation)}environment"

    def state_dict(self) -> dict[str, Any]:
        counts = {"began": torch.from_numpy(self.began.copy()), "episodes": torch.from_numpy(self.episodes.copy())}
        return {"clock": self.clock, **counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.clock = state["clock"]
        self.began[:], self.episodes[:] = state["began"].numpy(), state["episodes"].numpy()

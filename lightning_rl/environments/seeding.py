"""Seeds derived from the seed of the run, and the episode that each environment is in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

TRAINING, EVALUATION, SAMPLING, MINIBATCHES, TESTING, ACTORS, FILMING = range(7)
"""Roles, the first branch of the tree."""


def derive_seed(*path: int) -> int:
    """Return the seed at a node of the tree: independent of every other node's, below 2^31."""
    return int(np.random.SeedSequence(path[0], spawn_key=path[1:]).generate_state(1)[0] >> 1)


def role_prefix(evaluation: bool) -> str:
    """Return what messages tell environments of evaluation by: those of training have the same indices."""
    return "evaluation " if evaluation else ""


def describe(index: int, episode: int, seed: int, step: int, evaluation: bool = False) -> str:
    """Say where an environment is, so that `reset(seed=seed)` and `step` actions lead there again."""
    return f"{role_prefix(evaluation)}environment {index} (episode {episode}, seed {seed}, step {step})"


Array = np.ndarray[Any, Any]


class EpisodeTracker:
    """Counts the episodes and steps of `B` environments.

    Args:
        seeds: Seed of each environment's stream of episodes.
        reset_seed: What the vector environment is reset with: a list where each environment makes its own episodes of
            the seeds, something else where they come vectorised.
        evaluation: Whether they are environments of evaluation, for messages.

    Attributes:
        clock: Steps since the first reset.
        streams: Seed of each environment's stream: after resuming, that of the run before.
        episodes: Episode each environment is in, `[B]`.
        began: When on the clock that began, `[B]`.
    """

    def __init__(self, seeds: list[int], reset_seed: list[int] | Array | int | None, evaluation: bool = False) -> None:
        self._seeds = seeds
        self._reset_seed = reset_seed
        self._evaluation = evaluation
        self.forget()

    def forget(self) -> None:
        """Count from here on."""
        self.clock = 0
        self.streams = list(self._seeds)
        self.episodes = np.zeros(len(self._seeds), np.int64)
        self.began = np.zeros(len(self._seeds), np.int64)

    def start(self, which: Array, in_steps: int = 0) -> None:
        """Begin the next episode of some environments, `which` being a mask `[B]`."""
        self.episodes += which
        self.began[which] = self.clock + in_steps

    def start_at(self, index: int, episode: int) -> None:
        """Begin a given episode of one environment."""
        self.episodes[index] = episode
        self.began[index] = self.clock

    def where(self, index: int) -> tuple[int, int, int]:
        """Return the seed of an environment's stream, its episode and the step of it."""
        return self.streams[index], int(self.episodes[index]), max(0, self.clock - int(self.began[index]))

    def label(self, index: int) -> str:
        """Say where an environment is: episode, seed and step."""
        _, episode, step = self.where(index)
        return self.label_at(index, episode, step)

    def label_at(self, index: int, episode: int, step: int) -> str:
        """Say where an environment is that has got to another place than is known here."""
        if isinstance(self._reset_seed, list):
            seed = derive_seed(self.streams[index], episode)
        else:
            seed = self._seeds[0 if isinstance(self._reset_seed, int) else index]
        return describe(index, episode, seed, step, self._evaluation)

    def labels(self, indices: Sequence[int]) -> str:
        """Say where some environments are."""
        return ", ".join(map(self.label, indices)) or f"an {role_prefix(self._evaluation)}environment"

    def together(self) -> str:
        """Return the step and the first seeds, for failures of a vectorized environment that name no environment."""
        shown = ", ".join(map(str, self.streams[:4])) + (", …" if len(self.streams) > 4 else "")
        return f"step {self.clock}, seeds {shown}"

    def state_dict(self) -> dict[str, Any]:
        """Return the counts as tensors and plain values."""
        counts = {"began": torch.from_numpy(self.began.copy()), "episodes": torch.from_numpy(self.episodes.copy())}
        return {"clock": self.clock, **counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self.clock = state["clock"]
        self.began[:], self.episodes[:] = state["began"].numpy(), state["episodes"].numpy()

"""One evaluation episode."""

from __future__ import annotations

from typing import Any

import numpy as np

from lightning_rl.nested import Nested

Array = np.ndarray[Any, Any]


class Episode:
    """One episode played for evaluation.

    Attributes:
        episode_return: Undiscounted sum of raw rewards.
        length: Number of steps.
        terminated: Whether it ended in a terminal state rather than by a time limit.
        observations: `[length + 1, ...]`, nested as the space is, the final one included; None unless recorded.
        actions: `[length, ...]`, nested as the action space is, as the environment got them; None unless recorded.
        rewards: `[length]`; None unless recorded.
    """

    def __init__(self, episode_return: float, length: int, terminated: bool) -> None:
        self.episode_return = episode_return
        self.length = length
        self.terminated = terminated
        self.observations: Nested | None = None
        self.actions: Nested | None = None
        self.rewards: Array | None = None

    def __repr__(self) -> str:
        return f"Episode(episode_return={self.episode_return:g}, length={self.length}, terminated={self.terminated})"

"""One evaluation episode."""

from __future__ import annotations

from typing import Any

import numpy as np

from lightning_rl.nested import Nested


class Episode:
    """One evaluation episode; no dataclass, since Lightning would copy its arrays.

    Attributes:
        episode_return: Undiscounted sum of raw rewards.
        length: Number of steps.
        terminated: Whether it ended in a terminal state rather than by truncation.
        observations: `[length + 1, ...]`, nested as the space, with the final observation; None unless recorded.
        actions: `[length, ...]`, nested as the action space, as the environment received them; None unless recorded.
        rewards: `[length]`; None unless recorded.
    """

    def __init__(
        self,
        episode_return: float,
        length: int,
        terminated: bool,
        observations: Nested | None = None,
        actions: Nested | None = None,
        rewards: np.ndarray[Any, Any] | None = None,
    ) -> None:
        self.episode_return = episode_return
        self.length = length
        self.terminated = terminated
        self.observations = observations
        self.actions = actions
        self.rewards = rewards

    def __repr__(self) -> str:
        return f"Episode(episode_return={self.episode_return:g}, length={self.length}, terminated={self.terminated})"

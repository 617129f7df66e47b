"""Actions that are held for some steps of an environment."""

from __future__ import annotations

from typing import Any

import gymnasium

from lightning_rl.validation import check_positive_int

FRAMES = "lightning_rl/frames"
"""Key of the `info` of a step that took more or fewer than one step of the environment: how many."""


class ActionRepeat(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Repeat each action, and give the sum of the rewards and the last observation.

    The end of an episode ends the repetition; `info` is that of the last step, and says how many there were.

    Args:
        env: The environment.
        times: How often an action is taken.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], times: int) -> None:
        super().__init__(env)
        check_positive_int("action_repeat", times)
        self.times = times

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:  # noqa: ANN401
        """Take the action until it was repeated or the episode is over."""
        total = 0.0
        frames, over = 0, False
        while frames < self.times and not over:
            observation, reward, terminated, truncated, info = self.env.step(action)
            total += float(reward)
            frames, over = frames + 1, bool(terminated or truncated)
        return observation, total, terminated, truncated, info | {FRAMES: frames}

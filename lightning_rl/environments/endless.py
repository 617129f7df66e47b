"""A wrapper for tasks that would go on for ever, if only the environment did not give up."""

from __future__ import annotations

from typing import Any

import gymnasium


class TerminationAsTruncation(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Report the end of an episode as a cut, so that values bootstrap from where it led to (DI-engine's `ignore_done`).

    For environments that terminate where only time is up, such as old versions of Pendulum or HalfCheetah.
    """

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:  # noqa: ANN401 - the environment's
        """Take a step that never terminates."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        return observation, reward, False, terminated or truncated, info

"""Where an environment is in its episode, as plain data: its seed and the actions since the last true reset.

Simulators cannot be copied in general, but an episode can be played again: the same seed and the same actions lead to the
same state. Whether they did is seen by comparing the last observation.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import torch

from lightning_rl.environments.seeding import SeededEpisodes, derive_seed

RESET = None
"""In a log of actions: a reset that went on with what was before (a game between two lives)."""


class RecordedEpisodes(SeededEpisodes):
    """`SeededEpisodes` that can be saved in the middle of an episode and restored in another process.

    An environment whose innermost object has `state_dict()` and `load_state_dict(state)` is asked for its state instead;
    what it returns must be tensors and plain Python values.

    Args:
        env: The environment.
        index: Its place among the environments of this process.
        first_options: See `SeededEpisodes`.
    """

    def __init__(
        self, env: gymnasium.Env[Any, Any], index: int = 0, first_options: dict[str, Any] | None = None
    ) -> None:
        super().__init__(env, index, first_options)
        self._log: list[Any] = []
        self._first_episode = 0
        self._observation: Any = None
        self._may_continue = env.has_wrapper_attr("continued")
        self._has_own_state = hasattr(env.unwrapped, "state_dict") and hasattr(env.unwrapped, "load_state_dict")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode, and a new log unless the game before goes on."""
        self._observation, info = super().reset(seed=seed, options=options)
        if self._may_continue and self.env.get_wrapper_attr("continued"):
            self._log.append(RESET)
        else:
            self._log, self._first_episode = [], self.episode
        return self._observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:  # noqa: ANN401
        """Step, and log the action."""
        result = super().step(action)
        self._log.append(action)
        self._observation = result[0]
        return result

    def recorded(self) -> dict[str, Any]:
        """Return where the environment is, as tensors and plain values."""
        actions = [np.asarray(action) for action in self._log if action is not RESET]
        return {
            "stream_seed": self.stream_seed,
            "first_episode": self._first_episode,
            "episode": self.episode,
            "step_count": self.step_count,
            "resets": [place for place, action in enumerate(self._log) if action is RESET],
            "actions": torch.from_numpy(np.stack(actions)) if actions else torch.zeros(0),
            "observation": torch.from_numpy(np.array(self._observation)),
            "own": self.env.unwrapped.state_dict() if self._has_own_state else None,  # type: ignore[attr-defined]
        }

    def restore(self, records: list[dict[str, Any]]) -> bool:
        """Go to where an environment was.

        Args:
            records: Of all environments; this one takes that of its own index.

        Returns:
            Whether the environment returned the very observation that was recorded. If not, a fresh episode was begun.
        """
        record = records[self.index]
        self.stream_seed, self.episode = record["stream_seed"], record["first_episode"]
        expected = record["observation"].numpy()
        if record["own"] is not None and self._has_own_state:
            self.env.reset(seed=derive_seed(self.stream_seed, record["episode"]))
            self.env.unwrapped.load_state_dict(record["own"])  # type: ignore[attr-defined]
            self.episode, self.step_count, self._observation = record["episode"], record["step_count"], expected
            return True
        self._replay(record)
        if _equal(self._observation, expected):
            return True
        self.episode = record["episode"]
        self.reset()
        return False

    def _replay(self, record: dict[str, Any]) -> None:
        self._observation, _ = self.env.reset(
            seed=derive_seed(self.stream_seed, self.episode), options=self.first_options
        )
        self._log, self._first_episode, self.step_count = [], self.episode, 0
        actions = iter(record["actions"].numpy())
        resets = set(record["resets"])
        for place in range(len(record["actions"]) + len(resets)):
            if place in resets:
                self.reset()
            else:
                self.step(next(actions))


def _equal(one: Any, other: Any) -> bool:  # noqa: ANN401
    return bool(np.array_equal(np.asarray(one), np.asarray(other), equal_nan=True))

"""Environments with observations of several parts, registered under `Probe/…` as those of `tests.probes`."""

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from tests.probes import Counter

SENSORS = spaces.Dict(
    {
        "arm": spaces.Tuple([spaces.Discrete(5, start=1), spaces.Box(-np.inf, np.inf, (), np.float64)]),
        "camera": spaces.Box(0, 255, (6, 6, 3), np.uint8),
        "place": spaces.Box(-np.inf, np.inf, (2,), np.float32),
        "body": spaces.Dict({"lamps": spaces.MultiBinary(3), "wheels": spaces.MultiDiscrete([3, 4], start=[1, 0])}),
    }
)
"""Every kind of leaf."""

PAIR = spaces.Tuple([spaces.Discrete(3, start=-1), SENSORS])


class Sensors(Counter):
    """A counter each of whose leaves says where it is; keys in another order than the space's, a list for the tuple.

    Args:
        spoil: What is wrong from the given step of each episode on: `nan` or `inf` in a leaf, `shape`, `missing`,
            `array`, `entries`; None: nothing.
        at: That step.
        lengths: Of the episodes.
        ends: How they end.
        reuse_buffer: Return the same arrays each time, overwritten.
    """

    def __init__(
        self,
        spoil: str | None = None,
        at: int = 2,
        lengths: Sequence[int] = (5,),
        ends: Sequence[str] = ("truncated",),
        reuse_buffer: bool = False,
    ) -> None:
        super().__init__(lengths, ends)
        self.spoil, self.at = spoil, at
        self.observation_space = SENSORS
        self.reused: dict[str, Any] | None = {} if reuse_buffer else None

    def observe(self) -> Any:
        episode, step = self.episode, self.count
        observation: dict[str, Any] = {
            "place": np.array([episode, step], np.float32),
            "camera": np.full((6, 6, 3), (40 * episode + step) % 256, np.uint8),
            "body": {
                "wheels": np.array([1 + step % 3, episode % 4]),
                "lamps": np.array([episode % 2, step % 2, 1], np.int8),
            },
            "arm": [1 + step % 5, np.float64(episode + step / 8)],
        }
        if self.reused is not None:
            for name in ("place", "camera"):
                self.reused.setdefault(name, observation[name].copy())[:] = observation[name]
            observation |= self.reused
        return observation if self.spoil is None or step < self.at else self.spoiled(observation)

    def spoiled(self, observation: dict[str, Any]) -> Any:
        if self.spoil == "array":
            return observation["place"]
        if self.spoil == "missing":
            del observation["body"]["lamps"]
        elif self.spoil == "entries":
            observation["arm"].append(0)
        elif self.spoil == "shape":
            observation["body"]["wheels"] = np.zeros(3, np.int64)
        else:
            observation["arm"][1] = np.float64(self.spoil)
        return observation


class Puzzle(gymnasium.Env[dict[str, Any], int]):
    """Press the side that is lit in the picture, or where the switch is on the other one. Ten steps an episode.

    Neither the picture nor the switch alone says anything about the reward. `answer` does; `noise` says nothing.
    """

    observation_space = spaces.Dict(
        {
            "picture": spaces.Box(0, 255, (6, 6, 1), np.uint8),
            "switch": spaces.Discrete(2),
            "answer": spaces.Discrete(2),
            "noise": spaces.Box(-1, 1, (2,)),
        }
    )
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None):
        super().reset(seed=seed)
        self.steps = 0
        return self.observe(), {}

    def step(self, action: int):
        reward = float(action == self.answer)
        self.steps += 1
        return self.observe(), reward, False, self.steps == 10, {}

    def observe(self) -> dict[str, Any]:
        side, switch = self.np_random.integers(2, size=2)
        self.answer = int(side ^ switch)
        picture = self.np_random.integers(0, 60, (6, 6, 1)).astype(np.uint8)
        picture[:, 3 * side : 3 * side + 3] += 150
        noise = self.np_random.uniform(-1, 1, 2).astype(np.float32)
        return {"picture": picture, "switch": switch, "answer": self.answer, "noise": noise}


for probe in (Sensors, Puzzle):
    gymnasium.register(f"Probe/{probe.__name__}-v0", probe)

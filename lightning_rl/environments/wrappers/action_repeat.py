"""Wrappers that repeat actions, a fixed number of times or as often as the policy chooses."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from lightning_rl.environments.contract import LIFE_LOST
from lightning_rl.environments.wrappers.rewards import RewardTransform
from lightning_rl.validation import check, check_number, check_positive_int, is_int

Array = np.ndarray[Any, Any]
REPEATED = "lightning_rl/repeated"
"""Key of the `info` of a step that repeated its action, used only in this file. The value is a dict: `frames`, the
number of environment steps; `repeats`, how often the action was taken, if the policy chose this; and in evaluation
`earned`, the reward that training would have given."""


class ActionRepeat(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Takes each action `times` times, or until the episode ends; returns the sum of rewards, and the last values."""

    def __init__(self, env: gymnasium.Env[Any, Any], times: int) -> None:
        super().__init__(env)
        self.times = times

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:  # noqa: ANN401
        (observation, rewards, *ends), infos = _repeat(self.env, action, self.times)
        return observation, sum(rewards), *ends, infos[-1] | {REPEATED: {"frames": len(infos)}}


class LearnedActionRepeat(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Takes each action as often as the policy chooses: actions are `{"action": ..., "repeat": 1 to max_repeats}`.

    A step returns the sum of rewards, discounted by `gamma`, and the last observation and `info`. The end of an episode
    ends the repetition; so does a lost life in evaluation, since lives are episodes in training.

    Args:
        env: The environment.
        max_repeats: Maximum number of repeats.
        gamma: Discount factor within a step.
        frames_per_step: Simulation steps per step of `env`, unless its `info` has the number.
        evaluation: Return the undiscounted sum of rewards, and put the training reward into `info`.
        clips: Function by which training, but not evaluation, clips the rewards of `env`.
    """

    def __init__(
        self,
        env: gymnasium.Env[Any, Any],
        max_repeats: int,
        gamma: float = 1.0,
        frames_per_step: int = 1,
        evaluation: bool = False,
        clips: RewardTransform | None = None,
    ) -> None:
        super().__init__(env)
        self.gamma = gamma
        self.frames_per_step = frames_per_step
        self.evaluation = evaluation
        self._clips = clips if evaluation else None
        repeat = spaces.Discrete(max_repeats, start=1)
        self.action_space = spaces.Dict({"action": env.action_space, "repeat": repeat})

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:  # noqa: ANN401
        (observation, rewards, *ends), infos = _repeat(self.env, action["action"], int(action["repeat"]))
        clipped = rewards if self._clips is None else [float(self._clips(reward)) for reward in rewards]
        earned = sum(self.gamma**place * reward for place, reward in enumerate(clipped))
        frames = sum(info[REPEATED]["frames"] if REPEATED in info else self.frames_per_step for info in infos)
        counts = {"frames": frames, "repeats": len(infos)} | ({"earned": earned} if self.evaluation else {})
        return observation, sum(rewards) if self.evaluation else earned, *ends, infos[-1] | {REPEATED: counts}


def read_repeats(frames_per_step: int, learned: bool, infos: dict[str, Any], valid: Array) -> tuple[int, Array | None]:
    """Return the simulation steps of the `valid` rows, `[B]`, and the repeats of each row, `[B]`, if `learned`.

    `frames_per_step` is the number of simulation steps per step of environments that do not report it in `infos`.
    """
    frames = _read(infos, "frames", np.full(len(valid), frames_per_step))
    repeats = _read(infos, "repeats", np.ones(len(valid), np.int64)) if learned else None
    return int(frames.sum(where=valid)), repeats


def as_earned_in_training(infos: dict[str, Any], rewards: Array) -> Array:
    """Return the rewards `[B]` that evaluation steps with repeated actions would have had in training."""
    return _read(infos, "earned", rewards)


def _read(infos: dict[str, Any], name: str, default: Array) -> Array:
    """Return an entry of `REPEATED`, `[B]`; the default for environments without it."""
    for part in (infos, infos.get("final_info", {})):
        written = part.get(REPEATED, {})
        if name in written:
            default = np.where(written[f"_{name}"], written[name], default)
    return default


def _repeat(
    env: gymnasium.Env[Any, Any],
    action: Any,  # noqa: ANN401
    times: int,
) -> tuple[tuple[Any, list[float], bool, bool], list[dict[str, Any]]]:
    """Take an action repeatedly; return observation, rewards, terminated and truncated, and every `info`."""
    rewards: list[float] = []
    infos: list[dict[str, Any]] = []
    over = False
    while len(infos) < times and not over:
        observation, reward, terminated, truncated, info = env.step(action)
        rewards.append(float(reward))
        infos.append(info)
        over = bool(terminated or truncated) or LIFE_LOST in info
    return (observation, rewards, terminated, truncated), infos


def learned_repeat(option: int | dict[str, float] | None) -> tuple[int, float] | None:
    """Return maximum and discount factor of `env.learned_action_repeat`, or raise a `ConfigurationError`."""
    if option is None:
        return None
    name, given = "env.learned_action_repeat", option if isinstance(option, dict) else {"max": option}
    fits = "max" in given and {*given} <= {"max", "gamma"} and is_int(given["max"]) and given["max"] > 1
    check(fits, name, option, "an integer above 1, or a dict with such an integer as max and a gamma")
    check_positive_int(f"{name}: max", given["max"])
    gamma = given.get("gamma", 1.0)
    check_number(f"{name}: gamma", gamma, above=0, at_most=1)
    return int(given["max"]), float(gamma)

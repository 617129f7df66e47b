"""Wrappers that repeat actions, a fixed number of times or as often as the policy chooses."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import gymnasium
import numpy as np
from gymnasium import spaces

from lightning_rl.environments.contract import LIFE_LOST, Array, to_number
from lightning_rl.environments.wrappers.transforms import RewardTransform
from lightning_rl.options import changed
from lightning_rl.validation import Range, check_int

REPEATED = "lightning_rl/repeated"
"""Key of the `info` of a step that repeated its action, used only in this file. The value is a dict: `frames`, the
number of environment steps; `repeats`, how often the action was taken, if the policy chose this; and in evaluation
`earned`, the reward that training would have given."""


class ActionRepeat(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Takes each action `times` times, or until the episode ends; returns the sum of rewards, and the last values.

    With `counts_all`, `info` counts `times` frames also if the episode ends earlier.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], times: int, counts_all: bool = False) -> None:
        super().__init__(env)
        self.times = times
        self.counts_all = counts_all

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        (observation, rewards, *ends), infos = _repeat(self.env, action, self.times)
        frames = self.times if self.counts_all else len(infos)
        return observation, sum(rewards), *ends, infos[-1] | {REPEATED: {"frames": frames}}


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
        counts_all: Count the frames of all chosen repeats, also if the episode ends earlier.
    """

    def __init__(
        self,
        env: gymnasium.Env[Any, Any],
        max_repeats: int,
        gamma: float = 1.0,
        frames_per_step: int = 1,
        evaluation: bool = False,
        clips: RewardTransform | None = None,
        counts_all: bool = False,
    ) -> None:
        super().__init__(env)
        self.gamma = gamma
        self.counts_all = counts_all
        self.frames_per_step = frames_per_step
        self.evaluation = evaluation
        self._clips = clips if evaluation else None
        repeat = spaces.Discrete(max_repeats, start=1)
        self.action_space = spaces.Dict({"action": env.action_space, "repeat": repeat})

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        times = int(action["repeat"])
        (observation, rewards, *ends), infos = _repeat(self.env, action["action"], times)
        clipped = rewards if self._clips is None else [float(self._clips(reward)) for reward in rewards]
        earned = sum(self.gamma**place * reward for place, reward in enumerate(clipped))
        frames = sum(info[REPEATED]["frames"] if REPEATED in info else self.frames_per_step for info in infos)
        if self.counts_all:
            frames = times * self.frames_per_step
        counts = {"frames": frames, "repeats": len(infos)} | ({"earned": earned} if self.evaluation else {})
        return observation, sum(rewards) if self.evaluation else earned, *ends, infos[-1] | {REPEATED: counts}


def read_repeats(
    frames_per_step: int, each_discounts: bool, infos: dict[str, Any], valid: Array
) -> tuple[int, Array | None]:
    """Return the simulation steps of the `valid` rows, `[B]`, and the repeats of each row, `[B]`, if `each_discounts`.

    `frames_per_step` is the number of simulation steps per step of environments that do not report it in `infos`.
    """
    frames = _read(infos, "frames", np.full(len(valid), frames_per_step))
    repeats = _read(infos, "repeats", np.ones(len(valid), np.int64)) if each_discounts else None
    return int(frames.sum(where=valid)), repeats


def as_earned_in_training(infos: dict[str, Any], rewards: Array) -> Array:
    """Return the rewards `[B]` that evaluation steps with repeated actions would have had in training."""
    return _read(infos, "earned", rewards)


def _read(infos: dict[str, Any], name: str, default: Array) -> Array:
    for part in (infos, infos.get("final_info", {})):
        written = part.get(REPEATED, {})
        if name in written:
            default = np.where(written[f"_{name}"], written[name], default)
    return default


def _repeat(
    env: gymnasium.Env[Any, Any], action: Any, times: int
) -> tuple[tuple[Any, list[float], bool, bool], list[dict[str, Any]]]:
    rewards: list[float] = []
    infos: list[dict[str, Any]] = []
    over = False
    while len(infos) < times and not over:
        # A copy, since the environment may write into its action.
        observation, reward, terminated, truncated, info = env.step(copy.deepcopy(action))
        rewards.append(reward if type(reward) is float else to_number(reward))
        infos.append(info)
        over = bool(terminated or truncated) or LIFE_LOST in info
    return (observation, rewards, terminated, truncated), infos


@dataclass(frozen=True)
class LearnedRepeat:
    """The option `env.learned_action_repeat`; `per_repeat`: each repeat discounts the next value, not each step."""

    max: int
    gamma: Annotated[float, Range(above=0, at_most=1)] = 1.0
    discount: Literal["per_repeat", "per_step"] = "per_repeat"


def learned_repeat(option: int | Mapping[str, Any] | None) -> LearnedRepeat | None:
    """Return the option `env.learned_action_repeat`, or raise a `ConfigurationError`."""
    if option is None:
        return None
    given, name = option if isinstance(option, Mapping) else {"max": option}, "env.learned_action_repeat"
    repeat: LearnedRepeat = changed(name, LearnedRepeat(0), given)
    check_int(f"{name}.max", repeat.max, 2)
    return repeat

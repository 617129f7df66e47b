"""Actions that are held for some steps of an environment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from lightning_rl.environments.contract import LIFE_LOST
from lightning_rl.environments.wrappers.rewards import RewardTransform
from lightning_rl.validation import check, check_number, check_positive_int, is_int

Array = np.ndarray[Any, Any]
REPEATED = "lightning_rl/repeated"
"""Key of the `info` of a step that repeated its action. The value is written and read in this file alone: a dict of
`frames`, the steps of the environment; if the policy chose the number, `repeats`, the times the action was taken, which
is how often γ counts; and in evaluation `earned`, the reward that the step would have had in training."""


class ActionRepeat(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Repeat each action, and give the sum of the rewards and the last observation.

    The end of an episode ends the repetition; `info` is that of the last step, and says how many there were.

    Args:
        env: The environment.
        times: How often an action is taken.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], times: int) -> None:
        super().__init__(env)
        check_positive_int("env.action_repeat", times)
        self.times = times

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:  # noqa: ANN401
        """Take the action until it was repeated or the episode is over."""
        (observation, rewards, *ends), infos = _repeat(self.env, action, self.times)
        return observation, sum(rewards), *ends, infos[-1] | {REPEATED: {"frames": len(infos)}}


class LearnedActionRepeat(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Let the policy choose how often each action is taken: its actions are `{"action": ..., "repeat": 1 to max}`.

    A step gives the sum of the rewards, each discounted by its place, and the last observation. The end of an episode,
    and in evaluation that of a life, which was one in training, ends the repetition; `info` is that of the last step,
    and says how many there were.

    Args:
        env: The environment.
        max_repeats: How often an action may be taken.
        gamma: Discount factor within a step; 1 adds raw rewards up.
        frames_per_step: Steps of the simulation in a step of `env`, where its `info` does not say how many.
        evaluation: Add raw rewards up, and say in `info` what they would have earned in training.
        clips: What becomes of the rewards of `env` in training and not in evaluation.
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
        """Take the action as often as it says, or until the episode is over."""
        (observation, rewards, *ends), infos = _repeat(self.env, action["action"], int(action["repeat"]))
        clipped = rewards if self._clips is None else [float(self._clips(reward)) for reward in rewards]
        earned = sum(self.gamma**place * reward for place, reward in enumerate(clipped))
        frames = sum(info[REPEATED]["frames"] if REPEATED in info else self.frames_per_step for info in infos)
        told = {"frames": frames, "repeats": len(infos)} | ({"earned": earned} if self.evaluation else {})
        return observation, sum(rewards) if self.evaluation else earned, *ends, infos[-1] | {REPEATED: told}


@dataclass(frozen=True)
class RepeatCounter:
    """Reads how often the steps of a batch of environments took their actions.

    Args:
        frames_per_step: Steps of the simulation in a step, where `info` does not say how many.
        learned: Whether the policy chooses how often its actions are taken.
    """

    frames_per_step: int
    learned: bool

    def read(self, infos: dict[str, Any], real: Array) -> tuple[int, Array | None]:
        """Return the steps of the simulation, and how often each environment took its action.

        Args:
            infos: Of one step of the batch, as Gymnasium joins them.
            real: Environments that took a step, `[B]`.

        Returns:
            The sum over all environments; and integers `[B]`, 1 where no action was taken, None unless the policy
            chooses them.
        """
        frames = _read(infos, "frames", np.full(len(real), self.frames_per_step))
        repeats = _read(infos, "repeats", np.ones(len(real), np.int64)) if self.learned else None
        return int(frames.sum(where=real)), repeats


def as_earned_in_training(infos: dict[str, Any], rewards: Array) -> Array:
    """Return the rewards `[B]` that steps of evaluation would have had in training with their repeated actions."""
    return _read(infos, "earned", rewards)


def _read(infos: dict[str, Any], name: str, default: Array) -> Array:
    """Return numbers that wrappers wrote under a name, `[B]`; the default for environments without one."""
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
    """Take an action until it was repeated or the episode is over; return what that gives, and every `info`."""
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
    """Return the most repeats, and the discount factor within a step, of the option `env.learned_action_repeat`.

    Raises:
        ConfigurationError: It is neither a number above 1 nor a dict with `max` and, if needed, `gamma`.
    """
    if option is None:
        return None
    name, given = "env.learned_action_repeat", option if isinstance(option, dict) else {"max": option}
    fits = "max" in given and {*given} <= {"max", "gamma"} and is_int(given["max"]) and given["max"] > 1
    check(fits, name, option, "an integer above 1, or a dict with that as max and a gamma")
    check_positive_int(f"{name}: max", given["max"])
    gamma = given.get("gamma", 1.0)
    check_number(f"{name}: gamma", gamma, above=0, at_most=1)
    return int(given["max"]), float(gamma)

"""Actions that are held for some steps of an environment."""

from __future__ import annotations

from typing import Any

import gymnasium
from gymnasium import spaces

from lightning_rl.environments.contract import LIFE_LOST
from lightning_rl.environments.wrappers.rewards import RewardTransform
from lightning_rl.validation import check, check_number, check_positive_int, is_int

FRAMES = "lightning_rl/frames"
"""Key of the `info` of a step that took more or fewer than one step of the environment: how many."""
REPEATS = "lightning_rl/repeats"
"""Key of the `info` of a step whose action the policy had repeated: how often it was taken, so many times γ counts."""
EARNED = "lightning_rl/earned"
"""Key of the `info` of a step of evaluation: what it would have earned in training, where its reward is another."""


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
        return observation, sum(rewards), *ends, infos[-1] | {FRAMES: len(infos)}


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
        info = infos[-1] | {FRAMES: sum(info.get(FRAMES, self.frames_per_step) for info in infos), REPEATS: len(infos)}
        if self.evaluation:
            return observation, sum(rewards), *ends, info | {EARNED: earned}
        return observation, earned, *ends, info


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

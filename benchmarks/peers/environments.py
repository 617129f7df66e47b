"""The workloads' environments for the peers: Gymnasium's wrappers around single environments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces, wrappers
from measure import EPISODE_RETURNS


class KeepReturns(gymnasium.Wrapper):  # type: ignore[type-arg]
    """Appends the raw return of each finished episode to `EPISODE_RETURNS`."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self._sum = 0.0

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        self._sum = 0.0
        return self.env.reset(**kwargs)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        result = self.env.step(action)
        self._sum += float(result[1])
        if result[2] or result[3]:
            EPISODE_RETURNS.append(self._sum)
        return result


def _show(env: gymnasium.Env[Any, Any], entries: list[int]) -> gymnasium.Env[Any, Any]:
    space = env.observation_space
    assert isinstance(space, spaces.Box)
    shown = spaces.Box(space.low[entries], space.high[entries], dtype=np.float32)
    return wrappers.TransformObservation(env, lambda observation: observation[entries], shown)


def _clip_observation(observation: Any) -> Any:
    return np.clip(observation, -10, 10).astype(np.float32)


def _clip_reward(reward: Any) -> float:
    return float(np.clip(reward, -10, 10))


def factories(workload: dict[str, Any], *, own_normalization: bool) -> list[Callable[[], gymnasium.Env[Any, Any]]]:
    """Return a maker for each environment of a workload.

    Args:
        workload: Entry of `workloads.json`.
        own_normalization: Leave normalization and clipping of actions to the peer; otherwise Gymnasium's wrappers do
            both, if the workload has them.
    """

    def make() -> gymnasium.Env[Any, Any]:
        if "NoFrameskip" in workload["env_id"]:
            import ale_py

            gymnasium.register_envs(ale_py)
            env = KeepReturns(gymnasium.make(workload["env_id"], disable_env_checker=True))
            return wrappers.FrameStackObservation(wrappers.AtariPreprocessing(env), 4)
        env = KeepReturns(gymnasium.make(workload["env_id"], disable_env_checker=True))
        if "shown" in workload:
            return _show(env, workload["shown"])
        if not workload["normalize"] or own_normalization:
            return env
        normalized = wrappers.NormalizeObservation(wrappers.ClipAction(env))
        clipped = wrappers.TransformObservation(normalized, _clip_observation, normalized.observation_space)
        return wrappers.TransformReward(wrappers.NormalizeReward(clipped, gamma=workload["gamma"]), _clip_reward)

    return [make] * workload["num_envs"]

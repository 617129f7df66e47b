"""Registers environments of packages that do not register themselves with Gymnasium; `third_party.py` imports it."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Crafter(gymnasium.Env[np.ndarray, int]):
    """Crafter, which has the interface of OpenAI Gym: no seed in `reset`, one `done` flag."""

    observation_space = spaces.Box(0, 255, (64, 64, 3), np.uint8)
    action_space = spaces.Discrete(17)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        import crafter

        super().reset(seed=seed)
        self._env = crafter.Env(seed=int(self.np_random.integers(2**31)))
        return self._env.reset(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        observation, reward, done, info = self._env.step(int(action))
        terminated = info["discount"] == 0
        return observation, float(reward), terminated, done and not terminated, {}


def make_spread(num_envs: int, **kwargs: Any) -> gymnasium.vector.VectorEnv:  # of the environment
    """Return copies of MPE's simple spread; each agent is one row."""
    from mpe2 import simple_spread_v3

    from lightning_rl.environments.pettingzoo import ParallelEnvVector

    return ParallelEnvVector(lambda: simple_spread_v3.parallel_env(**kwargs), num_envs)


def make_pursuit(num_envs: int, max_cycles: int = 500) -> gymnasium.vector.VectorEnv:
    """Return copies of PettingZoo's pursuit; each agent is one row."""
    from pettingzoo.sisl import pursuit_v5

    from lightning_rl.environments.pettingzoo import ParallelEnvVector

    return ParallelEnvVector(lambda: pursuit_v5.parallel_env(max_cycles=max_cycles), num_envs)


def make_pufferlib(num_envs: int, name: str) -> gymnasium.vector.VectorEnv:
    """Return an environment of PufferLib's Ocean, which is vectorized."""
    from pufferlib.ocean import env_creator

    return env_creator(name)(num_envs=num_envs)


def make_retro(game: str, **kwargs: Any) -> gymnasium.Env:  # of the environment
    """Return a game of Stable-Retro, which has a separate `make`."""
    import stable_retro

    return stable_retro.make(game, render_mode="rgb_array", **kwargs)


def make_soft_robot(**kwargs: Any) -> gymnasium.Env:  # of the environment
    """Return Evolution Gym's walker with a fixed body of 3 x 3 voxels."""
    import evogym.envs  # noqa: F401 - registers Walker-v0

    return gymnasium.make("Walker-v0", body=np.array([[3, 3, 3], [3, 3, 3], [3, 0, 3]]), **kwargs).unwrapped


def make_deep_sea(**kwargs: Any) -> gymnasium.Env:  # of the environment
    """Return MO-Gymnasium's deep sea treasure with the mean of its two rewards."""
    import mo_gymnasium

    return mo_gymnasium.wrappers.LinearReward(mo_gymnasium.make("deep-sea-treasure-v0", **kwargs), np.array([0.5, 0.5]))


gymnasium.register("adapters/Crafter-v0", entry_point=Crafter)
gymnasium.register("adapters/Spread-v0", vector_entry_point=make_spread)
gymnasium.register("adapters/Pursuit-v0", vector_entry_point=make_pursuit)
gymnasium.register("adapters/Ocean-v0", vector_entry_point=make_pufferlib)
gymnasium.register("adapters/DeepSea-v0", entry_point=make_deep_sea)
gymnasium.register("adapters/Retro-v0", entry_point=make_retro)
gymnasium.register("adapters/SoftRobot-v0", entry_point=make_soft_robot, max_episode_steps=500)

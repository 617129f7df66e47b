"""Registers Brax, a simulator in JAX: `Brax-v0` for `backend: native`, `BraxTensors-v0` for `backend: torch`.

It needs `pip install brax "gymnasium[jax]"`. In this folder, run
`lightning-rl fit --model PPO --data.env_id brax_simulator:Brax-v0 --data.backend native --data.num_envs 256`.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from brax import envs
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space


class Brax(VectorEnv[Any, Any, Any]):
    """Environments of Brax. MuJoCo Playground has the same interface: `registry.load(name)` in place of the first line.

    Observations that are a `dict`, as of Playground's robots, need a `Dict` space in place of the `Box`.
    Observations, rewards and flags are arrays of JAX. An ended episode stays as it is until `reset` with a mask.
    """

    metadata = {"autoreset_mode": AutoresetMode.DISABLED}  # noqa: RUF012 - as Gymnasium declares it

    def __init__(self, num_envs: int = 1, name: str = "inverted_pendulum", max_episode_steps: int = 1000) -> None:
        env = envs.get_environment(name)
        self.num_envs, self.limit = num_envs, max_episode_steps
        self.single_observation_space = Box(-np.inf, np.inf, (env.observation_size,))
        self.single_action_space = Box(-1, 1, (env.action_size,))
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        begin, self._step = jax.vmap(env.reset), jax.jit(jax.vmap(env.step))
        self._begin = jax.jit(lambda key: (begin(jax.random.split(key, num_envs)), jnp.zeros(num_envs, int)))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.key, key = jax.random.split(self.key if seed is None else jax.random.PRNGKey(seed))
        begun, mask = self._begin(key), (options or {}).get("reset_mask")
        if mask is not None:  # the other environments continue their episodes
            now = self.state, self.steps
            begun = jax.tree.map(lambda x, y: _where(mask, x, y), begun, now)
        self.state, self.steps = begun
        return self.state.obs, {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        self.state, self.steps = self._step(self.state, actions), self.steps + 1
        terminated = self.state.done > 0
        return self.state.obs, self.state.reward, terminated, self.steps >= self.limit, {**self.state.metrics}

    def state_dict(self) -> dict[str, Any]:
        return {"leaves": [np.asarray(x) for x in jax.tree.leaves((self.key, self.state, self.steps))]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        structure = jax.tree.structure((self.key, self.state, self.steps))
        self.key, self.state, self.steps = jax.tree.unflatten(structure, state["leaves"])


def _where(mask: Any, x: Any, y: Any) -> Any:  # arrays
    """Return `x` in the rows of the mask, else `y`; parts of MuJoCo Playground's state have no rows."""
    return y if x.shape[:1] != mask.shape else jnp.where(mask.reshape(-1, *[1] * (x.ndim - 1)), x, y)


def make_tensors(num_envs: int = 1, **kwargs: Any) -> VectorEnv[Any, Any, Any]:
    """Return the same environments with tensors, which share the memory of JAX's arrays."""
    from gymnasium.wrappers.vector import JaxToTorch

    env: Any = JaxToTorch(Brax(num_envs, **kwargs))
    env.state_dict, env.load_state_dict = env.env.state_dict, env.env.load_state_dict
    return env


gymnasium.register("Brax-v0", vector_entry_point=Brax)
gymnasium.register("BraxTensors-v0", vector_entry_point=make_tensors)

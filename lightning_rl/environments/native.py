"""Gymnasium's own vectorised CartPole: its state, which is a few arrays, and its check of actions."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv


class BinaryActions(spaces.MultiDiscrete):
    """Actions `[B]` of 0 and 1, in which it takes one operation to see whether an array is: CartPole asks each step."""

    def __init__(self, num_envs: int) -> None:
        super().__init__(np.full(num_envs, 2))

    def contains(self, x: Any) -> bool:  # noqa: ANN401 - as in Gymnasium
        """Whether `x` is `[B]` of 0 and 1."""
        if type(x) is np.ndarray and x.dtype == self.dtype and x.shape == self._shape:
            return bool(0 <= np.bitwise_or.reduce(x) < 2)
        return super().contains(x)


_ARRAYS = ("state", "steps", "prev_done")


def cartpole_state(env: CartPoleVectorEnv) -> dict[str, Any]:
    """Return its arrays and its random generator."""
    arrays = {name: np.asarray(getattr(env, name)) for name in _ARRAYS}
    return arrays | {"random": env.np_random.bit_generator.state}


def load_cartpole_state(env: CartPoleVectorEnv, state: dict[str, Any]) -> np.ndarray[Any, Any]:
    """Take over what `cartpole_state` returned, and return the observations `[B, 4]`."""
    env.reset(seed=0)
    env.np_random.bit_generator.state = state["random"]
    for name in _ARRAYS:
        setattr(env, name, state[name].copy())
    return state["state"].T.astype(np.float32)  # type: ignore[no-any-return]

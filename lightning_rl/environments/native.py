"""State of Gymnasium's vectorized CartPole, for checkpoints."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv

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

"""What environments of other packages do not say of themselves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.vector import VectorEnv, VectorWrapper

from lightning_rl.nested import Nested


# No type arguments: VectorWrapper takes none before Gymnasium 1.4.
class VectorState(VectorWrapper, ABC):
    """Declares that the environments within give their state, and how."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the state of all environments, as arrays and plain values."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> Nested:
        """Go to a state, and return the observations `[B, ...]`."""


class CartPoleState(VectorState):
    """Gives and takes the state of Gymnasium's own vectorised CartPole: its arrays and its random generator."""

    _ARRAYS = ("state", "steps", "prev_done")

    def state_dict(self) -> dict[str, Any]:
        """Return the arrays and the state of the random generator."""
        env: Any = self.env
        arrays = {name: np.asarray(getattr(env, name)) for name in self._ARRAYS}
        return arrays | {"random": env.np_random.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> Nested:
        """Go to a state, and return the observations `[B, 4]`."""
        env: Any = self.env
        env.reset(seed=0)
        env.np_random.bit_generator.state = state["random"]
        for name in self._ARRAYS:
            setattr(env, name, state[name].copy())
        return state["state"].T.astype(np.float32)


def remembers_episodes(env: gymnasium.Env[Any, Any]) -> bool:
    """Whether a reset leaves something of earlier episodes that the same actions would show."""
    return type(env.unwrapped).__name__ == "BipedalWalker"  # Box2D's solver remembers contacts


def with_state(env: VectorEnv[Any, Any, Any]) -> VectorEnv[Any, Any, Any]:
    """Return an environment that gives its state, where that is known how to get."""
    return CartPoleState(env) if isinstance(env, CartPoleVectorEnv) else env

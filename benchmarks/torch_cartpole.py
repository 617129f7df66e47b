"""CartPole-v1 for any number of copies on one device, in torch: `Benchmarks/TorchCartPole-v1` for `backend="torch"`.

Equations, limits and rewards are the same as in Gymnasium's CartPole-v1, in float32.
"""

from __future__ import annotations

import math
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from torch import Tensor

ID = "Benchmarks/TorchCartPole-v1"
_GRAVITY, _POLE_MASS, _TOTAL_MASS, _HALF_LENGTH, _FORCE, _SECONDS = 9.8, 0.1, 1.1, 0.5, 10.0, 0.02
_FARTHEST, _STEEPEST, _LIMIT = 2.4, math.radians(12), 500


class TorchCartPole(VectorEnv[Tensor, Tensor, Tensor]):
    """Balance poles on carts; autoreset in the step that ends an episode.

    Args:
        num_envs: Number of copies.
        device: Device of all tensors.
    """

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012 - as Gymnasium declares it

    def __init__(self, num_envs: int = 1, device: str = "cpu") -> None:
        self.num_envs = num_envs
        high = np.array([2 * _FARTHEST, np.inf, 2 * _STEEPEST, np.inf], np.float32)
        self.single_observation_space = spaces.Box(-high, high, dtype=np.float32)
        self.single_action_space = spaces.Discrete(2)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.device = torch.device(device)
        self.random = torch.zeros(num_envs, 4, dtype=torch.int64, device=self.device)
        self.state = torch.zeros(num_envs, 4, device=self.device)
        self.steps = torch.zeros(num_envs, dtype=torch.int64, device=self.device)
        self._rewards = torch.ones(num_envs, device=self.device)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Tensor, dict[str, Any]]:
        """Begin an episode in every copy."""
        if seed is not None:
            generator = torch.Generator().manual_seed(seed)
            self.random = torch.randint(2**62, self.random.shape, generator=generator).to(self.device)
        self.state, self.steps = self._first(), torch.zeros_like(self.steps)
        return self.state, {}

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Any]]:
        """Push each cart to the left (0) or the right (1)."""
        reached = advance(self.state, actions)
        steps = self.steps + 1
        terminated = (reached[:, 0].abs() > _FARTHEST) | (reached[:, 2].abs() > _STEEPEST)
        truncated = steps >= _LIMIT
        ended = terminated | truncated
        self.state = torch.where(ended.unsqueeze(1), self._first(), reached)
        self.steps = torch.where(ended, 0, steps)
        return self.state, self._rewards, terminated, truncated, {"final_obs": reached}

    def _first(self) -> Tensor:
        # A linear congruential generator modulo 2**64 (Knuth): `torch.compile` cannot trace a `torch.Generator`.
        self.random = self.random * 6364136223846793005 + 1442695040888963407
        return ((self.random >> 40) & 0xFFFFFF).to(torch.float32) * (0.1 / 2**24) - 0.05


def advance(state: Tensor, actions: Tensor) -> Tensor:
    """Return the state after a step of 20 ms.

    Args:
        state: Position, velocity, angle and angular velocity, `[B, 4]`.
        actions: 0 or 1, `[B]`.
    """
    _, x_dot, theta, theta_dot = state.unbind(1)
    force = (actions * 2 - 1) * _FORCE
    cos, sin = torch.cos(theta), torch.sin(theta)
    pole = _POLE_MASS * _HALF_LENGTH
    push = (force + pole * theta_dot.square() * sin) / _TOTAL_MASS
    turn = (_GRAVITY * sin - cos * push) / (_HALF_LENGTH * (4 / 3 - _POLE_MASS * cos.square() / _TOTAL_MASS))
    speed_up = push - pole * turn * cos / _TOTAL_MASS
    change = torch.stack([x_dot, speed_up, theta_dot, turn], 1)
    return state + _SECONDS * change


if ID not in gymnasium.registry:
    gymnasium.register(ID, vector_entry_point=TorchCartPole)

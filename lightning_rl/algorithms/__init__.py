"""One file per algorithm."""

from lightning_rl.algorithms.base import OnPolicyAlgorithm
from lightning_rl.algorithms.ppo import PPO

__all__ = ["PPO", "OnPolicyAlgorithm"]

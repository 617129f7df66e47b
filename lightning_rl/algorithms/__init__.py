"""One file per algorithm, and what they share."""

from lightning_rl.algorithms.a2c import A2C
from lightning_rl.algorithms.base import OnPolicyAlgorithm
from lightning_rl.algorithms.ppo import PPO
from lightning_rl.algorithms.ppo_kl import PPOKLPenalty
from lightning_rl.algorithms.tf_agents import TFAgentsPPO

__all__ = ["A2C", "PPO", "OnPolicyAlgorithm", "PPOKLPenalty", "TFAgentsPPO"]

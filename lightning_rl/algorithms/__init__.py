"""One file per algorithm, and what they share."""

from lightning_rl.algorithms.a2c import A2C
from lightning_rl.algorithms.base import OnPolicyAlgorithm
from lightning_rl.algorithms.behaviour_cloning import BehaviourCloning
from lightning_rl.algorithms.clear import CLEAR
from lightning_rl.algorithms.critic_pretraining import CriticPretraining
from lightning_rl.algorithms.distillation import Distillation
from lightning_rl.algorithms.impala import IMPALA
from lightning_rl.algorithms.mappo import MAPPO
from lightning_rl.algorithms.overlapped_ppo import OverlappedPPO
from lightning_rl.algorithms.ppg import PPG
from lightning_rl.algorithms.ppg_off_policy import OffPolicyPPG
from lightning_rl.algorithms.ppo import PPO
from lightning_rl.algorithms.ppo_kl import PPOKLPenalty
from lightning_rl.algorithms.rnd import RND
from lightning_rl.algorithms.tf_agents_ppo import TFAgentsPPO
from lightning_rl.algorithms.vmpo import VMPO

__all__ = [
    "A2C",
    "CLEAR",
    "IMPALA",
    "MAPPO",
    "PPG",
    "PPO",
    "RND",
    "VMPO",
    "BehaviourCloning",
    "CriticPretraining",
    "Distillation",
    "OffPolicyPPG",
    "OnPolicyAlgorithm",
    "OverlappedPPO",
    "PPOKLPenalty",
    "TFAgentsPPO",
]

"""On-policy reinforcement learning for PyTorch Lightning."""

from lightning_rl.__about__ import __version__
from lightning_rl.algorithms import (
    A2C,
    CLEAR,
    IMPALA,
    PPG,
    PPO,
    VMPO,
    BehaviourCloning,
    CriticPretraining,
    OffPolicyPPG,
    OnPolicyAlgorithm,
    OverlappedPPO,
    PPOKLPenalty,
    TFAgentsPPO,
)
from lightning_rl.callbacks import (
    EnvStepCheckpoint,
    EnvStepInterval,
    EnvStepLimit,
    EnvStepValidation,
    EpisodeRecorder,
    PolicyExport,
    VideoRecorder,
)
from lightning_rl.callbacks.policy_summary import PolicySummary
from lightning_rl.callbacks.progress_bars import EnvStepProgressBar, EnvStepRichProgressBar
from lightning_rl.checkpointing.atomic import LastCheckpoint
from lightning_rl.checkpointing.failed_update import FailedUpdate
from lightning_rl.data.datamodule import RolloutDataModule
from lightning_rl.data.recorded_episodes import RecordedEpisodes, load_episodes, save_episodes
from lightning_rl.environments import AtariPreprocessing
from lightning_rl.policies.actor_critic import ActorCritic
from lightning_rl.policies.interface import PolicyOutput
from lightning_rl.rollouts.batch import Batch
from lightning_rl.rollouts.rollout import Rollout

__all__ = [
    "A2C",
    "CLEAR",
    "IMPALA",
    "PPG",
    "PPO",
    "VMPO",
    "ActorCritic",
    "AtariPreprocessing",
    "Batch",
    "BehaviourCloning",
    "CriticPretraining",
    "EnvStepCheckpoint",
    "EnvStepInterval",
    "EnvStepLimit",
    "EnvStepProgressBar",
    "EnvStepRichProgressBar",
    "EnvStepValidation",
    "EpisodeRecorder",
    "FailedUpdate",
    "LastCheckpoint",
    "OffPolicyPPG",
    "OnPolicyAlgorithm",
    "OverlappedPPO",
    "PPOKLPenalty",
    "PolicyExport",
    "PolicyOutput",
    "PolicySummary",
    "RecordedEpisodes",
    "Rollout",
    "RolloutDataModule",
    "TFAgentsPPO",
    "VideoRecorder",
    "__version__",
    "functional",
    "load_episodes",
    "save_episodes",
]

"""Callbacks that count environment steps, record episodes or export policies."""

from lightning_rl.callbacks.curriculum import Curriculum, CurriculumStage
from lightning_rl.callbacks.env_steps import EnvStepCheckpoint, EnvStepInterval, EnvStepLimit, EnvStepValidation
from lightning_rl.callbacks.episode_recorder import EpisodeRecorder
from lightning_rl.callbacks.policy_export import PolicyExport
from lightning_rl.callbacks.progress_bars import EnvStepProgressBar, EnvStepRichProgressBar, PolicySummary
from lightning_rl.callbacks.video import VideoRecorder

__all__ = [
    "Curriculum",
    "CurriculumStage",
    "EnvStepCheckpoint",
    "EnvStepInterval",
    "EnvStepLimit",
    "EnvStepProgressBar",
    "EnvStepRichProgressBar",
    "EnvStepValidation",
    "EpisodeRecorder",
    "PolicyExport",
    "PolicySummary",
    "VideoRecorder",
]

"""The public names of the package, which `lightning_rl` imports on first use."""

from lightning_rl import functional as functional
from lightning_rl.algorithms import *  # noqa: F403
from lightning_rl.callbacks.curriculum import Curriculum as Curriculum
from lightning_rl.callbacks.curriculum import CurriculumStage as CurriculumStage
from lightning_rl.callbacks.env_steps import EnvStepCheckpoint as EnvStepCheckpoint
from lightning_rl.callbacks.env_steps import EnvStepInterval as EnvStepInterval
from lightning_rl.callbacks.env_steps import EnvStepLimit as EnvStepLimit
from lightning_rl.callbacks.env_steps import EnvStepValidation as EnvStepValidation
from lightning_rl.callbacks.episode_recorder import EpisodeRecorder as EpisodeRecorder
from lightning_rl.callbacks.policy_export import PolicyExport as PolicyExport
from lightning_rl.callbacks.progress_bars import EnvStepProgressBar as EnvStepProgressBar
from lightning_rl.callbacks.progress_bars import EnvStepRichProgressBar as EnvStepRichProgressBar
from lightning_rl.callbacks.progress_bars import PolicySummary as PolicySummary
from lightning_rl.callbacks.video import VideoRecorder as VideoRecorder
from lightning_rl.checkpointing.atomic import LastCheckpoint as LastCheckpoint
from lightning_rl.checkpointing.failed_update import FailedUpdate as FailedUpdate
from lightning_rl.data.actors import ActorConfig as ActorConfig
from lightning_rl.data.datamodule import RolloutDataModule as RolloutDataModule
from lightning_rl.data.evaluation import EvaluationConfig as EvaluationConfig
from lightning_rl.data.recorded_episodes import RecordedEpisodes as RecordedEpisodes
from lightning_rl.data.recorded_episodes import load_episodes as load_episodes
from lightning_rl.data.recorded_episodes import save_episodes as save_episodes
from lightning_rl.environments import AtariPreprocessing as AtariPreprocessing
from lightning_rl.environments import EnvConfig as EnvConfig
from lightning_rl.policies.actor_critic import ActorCritic as ActorCritic
from lightning_rl.policies.actor_critic import PolicyConfig as PolicyConfig
from lightning_rl.policies.interface import PolicyOutput as PolicyOutput
from lightning_rl.rollouts.batch import Batch as Batch
from lightning_rl.rollouts.rollout import Rollout as Rollout
from lightning_rl.tools.trained import load_algorithm as load_algorithm
from lightning_rl.training.config import AdvantageConfig as AdvantageConfig
from lightning_rl.training.config import ClippingConfig as ClippingConfig
from lightning_rl.training.config import DebugConfig as DebugConfig
from lightning_rl.training.config import NormalizationConfig as NormalizationConfig
from lightning_rl.training.config import OptimizerConfig as OptimizerConfig

"""On-policy reinforcement learning for PyTorch Lightning."""

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0.dev0"


if TYPE_CHECKING:
    from lightning_rl import functional
    from lightning_rl.algorithms import (
        A2C,
        CLEAR,
        IMPALA,
        MAPPO,
        PPG,
        PPO,
        RND,
        VMPO,
        BehaviourCloning,
        CriticPretraining,
        Distillation,
        OffPolicyPPG,
        OnPolicyAlgorithm,
        OverlappedPPO,
        PPOKLPenalty,
        TFAgentsPPO,
    )
    from lightning_rl.callbacks.curriculum import Curriculum, CurriculumStage
    from lightning_rl.callbacks.env_steps import EnvStepCheckpoint, EnvStepInterval, EnvStepLimit, EnvStepValidation
    from lightning_rl.callbacks.episode_recorder import EpisodeRecorder
    from lightning_rl.callbacks.policy_export import PolicyExport
    from lightning_rl.callbacks.progress_bars import EnvStepProgressBar, EnvStepRichProgressBar, PolicySummary
    from lightning_rl.callbacks.video import VideoRecorder
    from lightning_rl.checkpointing.atomic import LastCheckpoint
    from lightning_rl.checkpointing.failed_update import FailedUpdate
    from lightning_rl.data.actors import ActorConfig
    from lightning_rl.data.datamodule import RolloutDataModule
    from lightning_rl.data.evaluation import EvaluationConfig
    from lightning_rl.data.recorded_episodes import RecordedEpisodes, load_episodes, save_episodes
    from lightning_rl.environments import AtariPreprocessing, EnvConfig
    from lightning_rl.policies.actor_critic import ActorCritic, PolicyConfig
    from lightning_rl.policies.interface import PolicyOutput
    from lightning_rl.rollouts.batch import Batch
    from lightning_rl.rollouts.rollout import Rollout
    from lightning_rl.tools.trained import load_algorithm
    from lightning_rl.training.config import (
        AdvantageConfig,
        ClippingConfig,
        DebugConfig,
        NormalizationConfig,
        OptimizerConfig,
    )

__all__ = [
    "A2C",
    "CLEAR",
    "IMPALA",
    "MAPPO",
    "PPG",
    "PPO",
    "RND",
    "VMPO",
    "ActorConfig",
    "ActorCritic",
    "AdvantageConfig",
    "AtariPreprocessing",
    "Batch",
    "BehaviourCloning",
    "ClippingConfig",
    "CriticPretraining",
    "Curriculum",
    "CurriculumStage",
    "DebugConfig",
    "Distillation",
    "EnvConfig",
    "EnvStepCheckpoint",
    "EnvStepInterval",
    "EnvStepLimit",
    "EnvStepProgressBar",
    "EnvStepRichProgressBar",
    "EnvStepValidation",
    "EpisodeRecorder",
    "EvaluationConfig",
    "FailedUpdate",
    "LastCheckpoint",
    "NormalizationConfig",
    "OffPolicyPPG",
    "OnPolicyAlgorithm",
    "OptimizerConfig",
    "OverlappedPPO",
    "PPOKLPenalty",
    "PolicyConfig",
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
    "load_algorithm",
    "load_episodes",
    "save_episodes",
]

_HOMES = (
    "algorithms",
    "data.actors",
    "data.datamodule",
    "callbacks.curriculum",
    "callbacks.env_steps",
    "callbacks.episode_recorder",
    "callbacks.policy_export",
    "callbacks.progress_bars",
    "callbacks.video",
    "checkpointing.atomic",
    "checkpointing.failed_update",
    "data.evaluation",
    "data.recorded_episodes",
    "environments",
    "policies.actor_critic",
    "policies.interface",
    "rollouts.batch",
    "rollouts.rollout",
    "tools.trained",
    "training.config",
)


def __getattr__(name: str) -> Any:  # noqa: ANN401 - classes, functions and modules
    """Import public names on first use, so that the command line answers typos without PyTorch and Lightning."""
    # The first name imports all classes, so that `LightningCLI` knows their short names.
    if name in __all__ and name != "functional":
        for home in _HOMES:
            found = vars(_imported(home))
            globals().update({public: found[public] for public in __all__ if public in found})
        return globals()[name]
    if not name.startswith("__") and find_spec(f"{__name__}.{name}") is not None:
        return _imported(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _imported(name: str) -> ModuleType:
    try:
        return import_module(f"{__name__}.{name}")
    except AttributeError as error:  # Python would take it for a missing attribute of this module and retry
        raise ImportError(f"{__name__}.{name} cannot be imported: {error}") from error


def __dir__() -> list[str]:
    return sorted(__all__)

"""Vector environments of every kind behind one contract."""

from lightning_rl.environments.atari import AtariPreprocessing
from lightning_rl.environments.batch import EnvironmentBatch, Step
from lightning_rl.environments.camera import FilmMaker, cameras
from lightning_rl.environments.endless import TerminationAsTruncation
from lightning_rl.environments.errors import EnvironmentFailure
from lightning_rl.environments.make import check_filmable, make_environments, spaces_of
from lightning_rl.environments.options import WrapperOptions
from lightning_rl.environments.partial import PartialObservation
from lightning_rl.environments.rewards import RewardClip
from lightning_rl.environments.spec import Backend, EnvironmentSpec, OnEnvFailure
from lightning_rl.environments.tensors import TensorEnvironments, TensorStep

__all__ = [
    "AtariPreprocessing",
    "Backend",
    "EnvironmentBatch",
    "EnvironmentFailure",
    "EnvironmentSpec",
    "FilmMaker",
    "OnEnvFailure",
    "PartialObservation",
    "RewardClip",
    "Step",
    "TensorEnvironments",
    "TensorStep",
    "TerminationAsTruncation",
    "WrapperOptions",
    "cameras",
    "check_filmable",
    "make_environments",
    "spaces_of",
]

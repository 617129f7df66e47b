"""Vector environments of every kind behind one contract."""

from lightning_rl.environments.atari import AtariPreprocessing
from lightning_rl.environments.batch import EnvironmentBatch, Step
from lightning_rl.environments.contract import EnvironmentFailure
from lightning_rl.environments.make import Spaces, make_environments, spaces_of
from lightning_rl.environments.rendering import FilmMaker
from lightning_rl.environments.spec import Backend, EnvConfig, EnvironmentSpec, EnvOptions
from lightning_rl.environments.tensor_batch import TensorEnvironments
from lightning_rl.environments.wrappers.transforms import (
    PartialObservation,
    SplitObservation,
    TerminationAsTruncation,
)

__all__ = [
    "AtariPreprocessing",
    "Backend",
    "EnvConfig",
    "EnvOptions",
    "EnvironmentBatch",
    "EnvironmentFailure",
    "EnvironmentSpec",
    "FilmMaker",
    "PartialObservation",
    "Spaces",
    "SplitObservation",
    "Step",
    "TensorEnvironments",
    "TerminationAsTruncation",
    "make_environments",
    "spaces_of",
]

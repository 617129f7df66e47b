"""Vector environments of every kind behind one contract."""

from lightning_rl.environments.atari import AtariPreprocessing
from lightning_rl.environments.batch import EnvironmentBatch, Step
from lightning_rl.environments.errors import EnvironmentFailure
from lightning_rl.environments.make import Backend, EnvironmentSpec, OnEnvFailure, make_environments, spaces_of

__all__ = [
    "AtariPreprocessing",
    "Backend",
    "EnvironmentBatch",
    "EnvironmentFailure",
    "EnvironmentSpec",
    "OnEnvFailure",
    "Step",
    "make_environments",
    "spaces_of",
]

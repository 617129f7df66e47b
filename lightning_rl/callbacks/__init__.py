"""Callbacks that count in environment steps."""

from lightning_rl.callbacks.env_steps import EnvStepCheckpoint, EnvStepLimit, EnvStepValidation
from lightning_rl.callbacks.interval import EnvStepInterval
from lightning_rl.callbacks.policy_export import PolicyExport

__all__ = ["EnvStepCheckpoint", "EnvStepInterval", "EnvStepLimit", "EnvStepValidation", "PolicyExport"]

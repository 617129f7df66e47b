"""Faster updates and acting for small networks on the CPU.

The rest of the package calls `engine_for`, `actor` and `default_optimizer`, and marks `PPO.loss` with `closed_form`.
Without this folder and these lines it computes the same numbers up to rounding. `debug.fast_paths: false` switches the
folder off.
"""

from lightning_rl.fast.engine import FastEngine, closed_form, engine_for
from lightning_rl.fast.flat_adam import FlatAdam, default_optimizer
from lightning_rl.fast.numpy_mlp import Actor, actor
from lightning_rl.fast.ppo import PPOLoss

__all__ = [
    "Actor",
    "FastEngine",
    "FlatAdam",
    "PPOLoss",
    "actor",
    "closed_form",
    "default_optimizer",
    "engine_for",
]

"""Faster updates and acting: formulas and NumPy for small networks on the CPU, and compiled updates for all others.

The rest of the package calls `engine_for`, `actor`, `default_optimizer` and `compiler_problem`, and marks `PPO.loss`
with `closed_form`. Without this folder and these lines it computes the same numbers up to rounding.
`debug.fast_paths: none` switches the folder off.
"""

from lightning_rl.fast.compiled import compiler_problem
from lightning_rl.fast.engine import CompiledEngine, FastEngine, closed_form, engine_for
from lightning_rl.fast.flat_adam import FlatAdam, default_optimizer
from lightning_rl.fast.numpy_mlp import Actor, actor
from lightning_rl.fast.ppo import PPOLoss

__all__ = [
    "Actor",
    "CompiledEngine",
    "FastEngine",
    "FlatAdam",
    "PPOLoss",
    "actor",
    "closed_form",
    "compiler_problem",
    "default_optimizer",
    "engine_for",
]

"""Fast updates and acting, equal up to rounding; `debug.fast_paths: none` disables this folder.

Closed forms and NumPy for small networks on the CPU, compiled programs for all others.
"""

from lightning_rl.fast.engine import CompiledEngine, FastEngine, closed_form, compiler_problem, engine_for
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

"""Action distributions, and the heads that make them from features, computed in at least float32.

Only what a policy gradient needs, without the validation of `torch.distributions` (a third of its cost here).
"""

from __future__ import annotations

from lightning_rl.policies.distributions.base import Distribution
from lightning_rl.policies.distributions.continuous import Beta, Bounds, DiagonalGaussian, SquashedGaussian
from lightning_rl.policies.distributions.discrete import Bernoulli, Categorical, MultiCategorical
from lightning_rl.policies.distributions.joint import Autoregressive, Joint
from lightning_rl.policies.distributions.make import ActionDistribution, make_action_head

__all__ = [
    "ActionDistribution",
    "Autoregressive",
    "Bernoulli",
    "Beta",
    "Bounds",
    "Categorical",
    "DiagonalGaussian",
    "Distribution",
    "Joint",
    "MultiCategorical",
    "SquashedGaussian",
    "make_action_head",
]

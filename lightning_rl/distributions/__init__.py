"""Action distributions, and the heads that make them from features.

Only what a policy gradient needs, without the validation of `torch.distributions` (a third of its cost here).
Log-probabilities, entropies and divergences are computed in at least float32, whatever the network's precision.
"""

from lightning_rl.distributions.autoregressive import Autoregressive
from lightning_rl.distributions.base import Distribution
from lightning_rl.distributions.bernoulli import Bernoulli
from lightning_rl.distributions.beta import Beta
from lightning_rl.distributions.bounds import Bounds
from lightning_rl.distributions.categorical import Categorical, MultiCategorical
from lightning_rl.distributions.choice import ActionDistribution, make_action_head
from lightning_rl.distributions.conversion import from_environment, tensor_conversion, to_environment
from lightning_rl.distributions.gaussian import DiagonalGaussian
from lightning_rl.distributions.joint import Joint
from lightning_rl.distributions.squashed import SquashedGaussian

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
    "from_environment",
    "make_action_head",
    "tensor_conversion",
    "to_environment",
]

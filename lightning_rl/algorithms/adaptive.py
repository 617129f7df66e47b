"""A learning rate that follows the divergence of the policy."""

from __future__ import annotations

from dataclasses import dataclass

from torch.optim import Optimizer

from lightning_rl.algorithms.parameter_groups import scale_learning_rate


@dataclass(frozen=True)
class AdaptiveLearningRate:
    """Lower the learning rate where the policy moves too far, raise it where it hardly moves.

    The rule of rl_games and rsl_rl, once per rollout. The rate itself is in the optimiser, and so in its checkpoints.

    Attributes:
        target_kl: The divergence aimed at, in nats: no change between half and twice of it.
        factor: What the rate is divided or multiplied by.
        minimum: The rate never falls below.
        maximum: Nor rises above.
    """

    target_kl: float
    factor: float = 1.5
    minimum: float = 1e-6
    maximum: float = 1e-2

    def adapt(self, optimizer: Optimizer, kl: float) -> None:
        """Set the rate of every group for the next rollout, after a mean divergence of `kl` in this one."""
        if kl > 2 * self.target_kl:
            scale_learning_rate(optimizer, 1 / self.factor, self.minimum, self.maximum)
        elif kl < self.target_kl / 2:
            scale_learning_rate(optimizer, self.factor, self.minimum, self.maximum)

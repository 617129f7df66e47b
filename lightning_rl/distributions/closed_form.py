"""Log-probabilities, entropies and their gradients in NumPy, for rows so few that PyTorch's operations take longer."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lightning_rl.distributions.gaussian import LOG_2PI

Array = NDArray[np.floating[Any]]


class Rows(Protocol):
    """Action distributions of some rows, at the actions that were taken.

    Attributes:
        log_prob: Log-probability of each action, `[N]`.
        entropies: Sum of the entropies of all rows.
    """

    log_prob: Array
    entropies: float

    def gradients(self, log_prob: Array, entropy: float) -> tuple[Array, ...]:
        """Return the gradients of what the distributions were made of, in the order of these arguments.

        Args:
            log_prob: The gradient of each log-probability, `[N]`.
            entropy: That of the entropy of each row.
        """


class CategoricalRows:
    """One of `n` actions in each row, as `Categorical` has it.

    Args:
        actions: That were taken, `[N]`.
        logits: `[N, n]`.
    """

    def __init__(self, actions: NDArray[np.integer[Any]], logits: Array) -> None:
        # Rows side by side, so that a sum over actions is one of few long vectors.
        log_probs = np.ascontiguousarray(logits.T)
        log_probs = log_probs - np.maximum.reduce(log_probs)
        probs = np.exp(log_probs)
        totals = np.add.reduce(probs)
        log_probs -= np.log(totals)
        probs /= totals
        self._log_probs, self._probs = log_probs, probs
        self._taken = actions, np.arange(len(actions))
        self.log_prob = log_probs[self._taken]
        self._entropies = -np.add.reduce(probs * log_probs)
        self.entropies = np.add.reduce(self._entropies)

    def gradients(self, log_prob: Array, entropy: float) -> tuple[Array, ...]:
        """Return the gradient of the logits, `[N, n]`: p (-g - e (log p + H)), and g more for the action taken."""
        if entropy:
            gradient = self._log_probs + self._entropies
            gradient *= -entropy
            gradient -= log_prob
            gradient *= self._probs
        else:  # of a logit that is -inf the entropy has no gradient
            gradient = self._probs * -log_prob
        gradient[self._taken] += log_prob
        return (gradient.T,)


class GaussianRows:
    """Independent normal distributions, one per action dimension, whose deviations all rows share: `DiagonalGaussian`.

    Args:
        actions: That were taken, `[N, a]`.
        mean: `[N, a]`.
        log_std: Logarithm of the standard deviation, `[a]`.
    """

    def __init__(self, actions: Array, mean: Array, log_std: Array) -> None:
        rows, size = mean.shape
        self._inverse_std = np.exp(-log_std)
        self._z = (actions - mean) * self._inverse_std
        log_volume = np.add.reduce(log_std)
        self.log_prob = np.add.reduce(self._z * self._z, 1)
        self.log_prob *= -0.5
        self.log_prob -= log_volume + 0.5 * LOG_2PI * size
        self.entropies = rows * (log_volume + 0.5 * (1 + LOG_2PI) * size)

    def gradients(self, log_prob: Array, entropy: float) -> tuple[Array, ...]:
        """Return the gradients of mean, `[N, a]`, and logarithm of the standard deviation, `[a]`."""
        of_z = self._z * log_prob[:, None]
        of_mean = of_z * self._inverse_std
        # Not by a product of matrices, which NumPy's library may share among threads that nobody has counted.
        of_log_std = np.add.reduce(of_z * self._z)
        return of_mean, of_log_std + (entropy * len(log_prob) - np.add.reduce(log_prob))

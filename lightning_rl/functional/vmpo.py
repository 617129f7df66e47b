"""Losses of V-MPO (Song et al., 2020, arXiv 1909.12238)."""

import torch
from torch import Tensor


def better_half(advantages: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the indices of the half of the rows, rounded up, with the largest advantages, in decreasing order.

    Advantages and weights are `[N]`. Rows of weight 0 are excluded before the split; other weights have no effect.
    Counting these rows waits for the device.
    """
    if weights is None:
        return advantages.topk((len(advantages) + 1) // 2).indices
    counted = weights.nonzero().squeeze(1)
    return counted[better_half(advantages[counted])]


def vmpo_policy_loss(
    log_probs: Tensor, advantages: Tensor, temperature: Tensor, weights: Tensor | None = None
) -> Tensor:
    """Return the policy loss -Σ ψ log π with ψ = softmax(A / η) (eqs. 3 and 4), a scalar; 0 for no rows.

    Args:
        log_probs: Log-probabilities of the actions of the better half, `[N]`; the only argument with a gradient.
        advantages: Advantages of these actions, `[N]`.
        temperature: Temperature η > 0, a scalar.
        weights: Weights > 0 of the rows, `[N]`; ψ is proportional to weight · exp(A / η). None for equal weights.
    """
    psi = torch.softmax(_logits(advantages, temperature.detach(), weights), dim=0)
    return -(psi * log_probs).sum()


def vmpo_temperature_loss(
    advantages: Tensor, temperature: Tensor, epsilon: float, weights: Tensor | None = None
) -> Tensor:
    """Return the temperature loss η ε + η log mean exp(A / η), minimal at KL(ψ || uniform) = ε (eq. 5); 0 for no rows.

    Args:
        advantages: Advantages of the better half, `[N]`, detached: they would get a gradient.
        temperature: Temperature η > 0, a scalar.
        epsilon: Bound ε_η of KL(ψ || uniform), in nats.
        weights: Weights > 0 of the rows in the mean, `[N]`. None for equal weights.
    """
    if len(advantages) == 0:  # a rank may have no row of a minibatch
        return 0 * temperature
    return temperature * (epsilon + torch.logsumexp(_logits(advantages, temperature, weights), dim=0))


def lagrangian(divergence: Tensor, coefficient: Tensor, epsilon: float) -> Tensor:
    """Return α (ε - sg[KL]) + sg[α] KL, a scalar: α > 0 grows while KL > ε, and penalizes KL (eq. 6).

    `divergence` is the mean KL divergence, and `epsilon` its bound ε_α, in nats.
    """
    return coefficient * (epsilon - divergence.detach()) + coefficient.detach() * divergence


def _logits(advantages: Tensor, temperature: Tensor, weights: Tensor | None) -> Tensor:
    """Return A / η plus the log-share of each row, so that the sum of their exponentials is a weighted mean."""
    weights = torch.ones_like(advantages) if weights is None else weights.to(advantages.dtype)
    return advantages / temperature + (weights / weights.sum()).log()

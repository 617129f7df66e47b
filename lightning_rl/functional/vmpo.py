"""Losses of V-MPO (Song et al. 2020)."""

import torch
from torch import Tensor


def better_half(advantages: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the indices of the half of the rows that count, rounded up, whose advantages are the largest.

    Args:
        advantages: `[N]`.
        weights: How much each row counts, `[N]`; those of weight 0 are not among the half, nor among the whole.
    """
    if weights is None:
        return advantages.topk((len(advantages) + 1) // 2).indices
    counted = weights.nonzero().squeeze(1)
    return counted[better_half(advantages[counted])]


def vmpo_policy_loss(
    log_probs: Tensor, advantages: Tensor, temperature: Tensor, weights: Tensor | None = None
) -> Tensor:
    """Return the weighted maximum-likelihood loss of actions, -Σ ψ log π with ψ = softmax(A / η) (equations 3 and 4).

    Args:
        log_probs: Of the actions of the better half of a batch, `[N]`; 0 is returned of none.
        advantages: Theirs, `[N]`; without gradient.
        temperature: η > 0, a scalar; it gets no gradient here.
        weights: How much each of them counts, `[N]`, above 0: ψ is in proportion to it. None: all the same.
    """
    psi = torch.softmax(_logits(advantages, temperature.detach(), weights), dim=0)
    return -(psi * log_probs).sum()


def vmpo_temperature_loss(
    advantages: Tensor, temperature: Tensor, epsilon: float, weights: Tensor | None = None
) -> Tensor:
    """Return η ε + η log mean exp(A / η), least at the η whose ψ is ε nats from uniform (equation 5).

    Args:
        advantages: Of the better half of a batch, `[N]`; 0 is returned of none.
        temperature: η > 0, a scalar.
        epsilon: ε_η, in nats.
        weights: How much each of them counts, `[N]`, above 0, in the mean and in what is uniform. None: all the same.
    """
    if len(advantages) == 0:  # a rank may have no row of a minibatch
        return 0 * temperature
    return temperature * (epsilon + torch.logsumexp(_logits(advantages, temperature, weights), dim=0))


def lagrangian(divergence: Tensor, coefficient: Tensor, epsilon: float) -> Tensor:
    """Return α (ε - sg[KL]) + sg[α] KL, by which α grows where KL is above its bound, and KL is held back (equation 6).

    Args:
        divergence: Mean KL divergence, a scalar in nats.
        coefficient: α > 0, a scalar.
        epsilon: ε_α, bound of the divergence.
    """
    return coefficient * (epsilon - divergence.detach()) + coefficient.detach() * divergence


def _logits(advantages: Tensor, temperature: Tensor, weights: Tensor | None) -> Tensor:
    """Return A / η plus the logarithm of each row's share, so that the sum of their exponentials is a mean."""
    weights = torch.ones_like(advantages) if weights is None else weights.to(advantages.dtype)
    return advantages / temperature + (weights / weights.sum()).log()

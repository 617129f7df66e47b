"""Losses of V-MPO (Song et al. 2020)."""

import torch
from torch import Tensor


def vmpo_policy_loss(log_probs: Tensor, advantages: Tensor, temperature: Tensor) -> Tensor:
    """Return the weighted maximum-likelihood loss of actions, -Σ ψ log π with ψ = softmax(A / η) (equations 3 and 4).

    Args:
        log_probs: Of the actions of the better half of a batch, `[N]`.
        advantages: Theirs, `[N]`; without gradient.
        temperature: η > 0, a scalar; it gets no gradient here.
    """
    weights = torch.softmax(advantages / temperature.detach(), dim=0)
    return -(weights * log_probs).sum()


def vmpo_temperature_loss(advantages: Tensor, temperature: Tensor, epsilon: float) -> Tensor:
    """Return η ε + η log mean exp(A / η), least at the η whose weights are ε nats from uniform (equation 5).

    Args:
        advantages: Of the better half of a batch, `[N]`; 0 is returned of none.
        temperature: η > 0, a scalar.
        epsilon: ε_η, in nats.
    """
    if len(advantages) == 0:  # a rank may have no row of a minibatch
        return 0 * temperature
    log_mean = torch.logsumexp(advantages / temperature, dim=0) - torch.tensor(float(len(advantages))).log()
    return temperature * (epsilon + log_mean)


def lagrangian(divergence: Tensor, coefficient: Tensor, epsilon: float) -> Tensor:
    """Return α (ε - sg[KL]) + sg[α] KL, by which α grows where KL is above its bound, and KL is held back (equation 6).

    Args:
        divergence: Mean KL divergence, a scalar in nats.
        coefficient: α > 0, a scalar.
        epsilon: ε_α, bound of the divergence.
    """
    return coefficient * (epsilon - divergence.detach()) + coefficient.detach() * divergence

"""Penalties that hold a policy back, and the rule by which one of them adapts; of scalars and lists of weights."""

import torch
from torch import Tensor

from lightning_rl.functional import _checks as check

# Between these the adaptive coefficient stays, so that it can always come back.
_SMALLEST, _LARGEST = 1e-15, 1e17
_STEP = 1.5


def kl_cutoff_penalty(kl: Tensor, cutoff: float, coef: float) -> Tensor:
    """Compute ``coef * max(kl - cutoff, 0)**2``: nothing up to the cutoff, steep beyond it.

    Args:
        kl: Mean divergence from the policy that acted, a scalar in nats.
        cutoff: From where on it is penalised, in nats.
        coef: Factor on the square.

    Returns:
        The penalty, a scalar.

    Raises:
        ValueError: If `cutoff` or `coef` is negative.

    Example:
        >>> kl_cutoff_penalty(torch.tensor(0.5), 0.25, 1000.0)
        tensor(62.5000)
    """
    check.not_negative(cutoff=cutoff, coef=coef)
    return coef * (kl - cutoff).clamp(min=0).square()


@torch.no_grad()
def adapted_kl_coef(coef: Tensor, kl: Tensor, target: float, tolerance: float) -> Tensor:
    """Adapt the coefficient of a KL penalty (Schulman et al., 2017, arXiv 1707.06347, section 4).

    1.5 times as much after a divergence above ``target * (1 + tolerance)``, a 1.5th after one below
    ``target * (1 - tolerance)``, both strictly, and the same otherwise; never below 1e-15 nor above 1e17. (The
    paper has the factors 2 for the coefficient and 1.5 for the bounds.)

    Args:
        coef: The coefficient so far, a scalar.
        kl: Mean divergence that the updates with it have led to, a scalar in nats; NaN leaves it as it is.
        target: The divergence that is wanted, in nats.
        tolerance: How far from it, as a share, is near enough.

    Returns:
        The coefficient for the next updates, a scalar in the dtype of `coef`.

    Raises:
        ValueError: If `target` or `tolerance` is negative.
    """
    check.not_negative(target=target, tolerance=tolerance)
    high, low = (torch.as_tensor(target * (1 + sign * tolerance), dtype=kl.dtype, device=kl.device) for sign in (1, -1))
    adapted = torch.where(kl > high, coef * _STEP, torch.where(kl < low, coef / _STEP, coef))
    return adapted.clamp(_SMALLEST, _LARGEST)


def squared_norm(weights: list[Tensor]) -> Tensor:
    """Sum the squares of all entries of some weights; there is no ½.

    Args:
        weights: At least one tensor, of any shape.

    Returns:
        The sum, a scalar.
    """
    return torch.stack([x.square().sum() for x in weights]).sum()

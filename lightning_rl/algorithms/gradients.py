"""The gradients of an optimizer's parameters, and their norm."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


def gradients_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the gradients of all parameters that have one."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def total_norm(gradients: list[Tensor]) -> Tensor:
    """Return the global norm of gradients, at least one."""
    one = len(gradients) == 1
    norm: Tensor = torch.linalg.vector_norm(gradients[0]) if one else nn.utils.get_total_norm(gradients)
    return norm


def scale_to_norm(gradients: list[Tensor], max_norm: float, norm: Tensor) -> None:
    """Scale gradients so that their global norm, which is `norm`, is at most `max_norm`."""
    if norm.is_cpu and 1.01 * float(norm) + 2e-6 < max_norm:
        return  # the factor is certainly 1
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(factor)

"""A step of an optimiser that may turn out not to be wanted, without asking the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


@torch.no_grad()
def step_where(condition: Tensor, optimizer: Optimizer, step: Callable[[], Any]) -> None:
    """Call `step`, and take back what it did to parameters and state unless `condition` holds on the device.

    For optimisers that cannot be told to leave a step out. Zeroing gradients would not do: Adam goes on along its
    moments.

    Args:
        condition: A boolean scalar on the device of the parameters.
        optimizer: All of whose state is there too (`capturable=True`), and exists: it has stepped before.
        step: Steps it.
    """
    tensors = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for state in optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, Tensor)]
    before = [tensor.clone() for tensor in tensors]
    step()
    for tensor, old in zip(tensors, before, strict=True):
        tensor.copy_(torch.where(condition, tensor, old))

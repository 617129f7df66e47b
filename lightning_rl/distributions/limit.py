"""Limits that a parameter can come back from."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Limit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, low: float | None, high: float | None) -> Tensor:  # noqa: ANN401 - PyTorch's
        ctx.save_for_backward(x)
        ctx.limits = low, high
        return x.clamp(low, high)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        (x,), (low, high), gradient = ctx.saved_tensors, ctx.limits, gradients[0]
        # Descent raises x where the gradient is negative.
        if low is not None:
            gradient = torch.where((x < low) & (gradient > 0), 0, gradient)
        if high is not None:
            gradient = torch.where((x > high) & (gradient < 0), 0, gradient)
        return gradient, None, None


def limit(x: Tensor, low: float | None, high: float | None) -> Tensor:
    """Clamp `x`, but stop only those gradients that lead further out.

    `Tensor.clamp` stops all of them: what once left its limits would stay there for the rest of the run.
    """
    limited: Tensor = _Limit.apply(x, low, high)  # type: ignore[no-untyped-call]
    return limited

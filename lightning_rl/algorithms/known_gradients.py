"""A loss whose gradient somebody has computed already."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class KnownGradients(NamedTuple):
    """A loss, without graph, and its gradient.

    Attributes:
        loss: A scalar.
        parameters: What it depends on.
        gradients: That of each parameter, in its shape and contiguous.
    """

    loss: Tensor
    parameters: Sequence[nn.Parameter]
    gradients: Sequence[Tensor]

    def detach(self) -> Tensor:
        """Return the loss alone."""
        return self.loss

    def attached(self) -> Tensor:
        """Return the loss with a graph, so that its backward pass brings the gradients to all who wait for them."""
        return _Attach.apply(self.loss, self.gradients, *self.parameters)  # type: ignore[no-any-return, no-untyped-call]

    def assign(self) -> None:
        """Do what that backward pass does, where nobody waits for it and parameters have no gradient yet."""
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = gradient


class _Attach(torch.autograd.Function):
    """Gives a loss the gradient that is known."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: Sequence[Tensor], *parameters: Tensor) -> Tensor:  # noqa: ANN401
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        return None, None, *(known * gradient for known in ctx.gradients)

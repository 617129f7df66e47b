"""Steps of optimisers that turn out not to be wanted."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


@torch.no_grad()
def step_where(condition: Tensor, optimizer: Optimizer, step: Callable[[], Any]) -> None:
    """Call `step`, and take back what it did to parameters and state unless `condition` holds: the device decides.

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


class OptimizerSnapshot:
    """Parameters and states of optimisers as they were, to take a step back once the host knows that it must be."""

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self._optimizers = list(optimizers)
        self._parameters = [parameter.detach().clone() for parameter in self._own_parameters()]
        self._states = [
            {parameter: {name: _copy(x) for name, x in entries.items()} for parameter, entries in o.state.items()}
            for o in self._optimizers
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Put them back: once, since optimisers go on with the very states that were kept."""
        for parameter, old in zip(self._own_parameters(), self._parameters, strict=True):
            parameter.copy_(old)
        for optimizer, state in zip(self._optimizers, self._states, strict=True):
            # Cleared, since the first step makes states where there were none.
            optimizer.state.clear()
            optimizer.state.update(state)

    def _own_parameters(self) -> list[Tensor]:
        return [parameter for o in self._optimizers for group in o.param_groups for parameter in group["params"]]


def _copy(x: Any) -> Any:  # noqa: ANN401 - whatever an optimiser remembers
    return x.clone() if isinstance(x, Tensor) else x

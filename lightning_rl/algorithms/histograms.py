"""Histograms of what an update learns from and what it does, for loggers that can show them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from gymnasium import spaces
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from torch import Tensor, nn

from lightning_rl.nested import leaves, space_leaves
from lightning_rl.rollouts.batch import Batch


def that_show_histograms(loggers: Sequence[Logger]) -> list[TensorBoardLogger]:
    """Return those of Lightning's loggers that can show a histogram."""
    return [logger for logger in loggers if isinstance(logger, TensorBoardLogger)]


def histograms(
    batch: Batch, advantages: Tensor, action_space: spaces.Space[Any], policy: nn.Module
) -> Iterator[tuple[str, Tensor]]:
    """Yield names and values: each part of the actions, advantages, parameters, and their gradients as they are now."""
    for path, actions in zip(space_leaves(action_space), leaves(batch.actions), strict=True):
        yield "/".join(filter(None, ("actions", path))), actions
    yield "advantages", advantages
    for name, parameter in policy.named_parameters():
        yield f"parameters/{name}", parameter
        if parameter.grad is not None:
            yield f"gradients/{name}", parameter.grad

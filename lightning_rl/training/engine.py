"""How gradients are computed and optimizers are stepped by plain PyTorch and Lightning."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor
from torch.optim import Optimizer

from lightning_rl.training.parameter_groups import ActorOrCritic

WHAT_TO_TRY = (
    "Check the rewards and observations (normalization.rewards and normalization.observations bound them), or lower "
    "learning_rate or optimizer.max_grad_norm"
)
_ANOMALY = re.compile(r"Function '(\w+)' returned nan values")


class EagerEngine:
    """Computes gradients with autograd and steps optimizers through Lightning, with all of its hooks.

    All engines give the same results up to rounding. `compiles_loss` is whether the loss is compiled into one program.
    """

    compiles_loss = False

    def whole_step(self, steps: Any, loss_of: Callable[[Any], Any], batch: Any) -> None:  # noqa: ANN401
        """Compute loss, gradient and step at once, and return a `StepResult`; None if the engine cannot do this."""
        return None

    def loss(self, model: Any, loss_of: Callable[[Any], Any], batch: Any, part: ActorOrCritic | None) -> Any:  # noqa: ANN401
        """Return the loss of a minibatch: a `Loss`, or a `ComputedLoss`."""
        return loss_of(batch)

    def backward(self, model: LightningModule, total: Tensor) -> None:
        """Compute the gradient of the last loss, whose `total` may have further summands by now."""
        with _explained_anomaly():
            model.manual_backward(total)

    def gradients(self, optimizer: Optimizer) -> list[Tensor]:
        """Return the gradients that `step` applies. One tensor may hold the gradients of several parameters."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        return [parameter.grad for parameter in parameters if parameter.grad is not None]

    def step(self, model: LightningModule, optimizer: LightningOptimizer, counts: bool) -> None:
        """Step an optimizer; `counts` increments Lightning's global step."""
        with _without_scaler(model.trainer.precision_plugin):
            if counts:
                optimizer.step()
            else:
                model.trainer.strategy.optimizer_step(optimizer.optimizer, lambda: None)


@contextmanager
def _without_scaler(precision: Any) -> Iterator[None]:  # noqa: ANN401
    """Step without the scaler of `16-mixed`: the gradient is unscaled already, which Lightning does not expect."""
    if (scaler := getattr(precision, "scaler", None)) is None:
        yield
        return
    precision.scaler = None
    try:
        yield
    finally:
        precision.scaler = scaler


@contextmanager
def _explained_anomaly() -> Iterator[None]:
    """Add advice to the error of `detect_anomaly`."""
    try:
        yield
    except RuntimeError as error:
        if (found := _ANOMALY.search(str(error))) is None:
            raise
        raise FloatingPointError(
            f"the gradient of {found[1]} is NaN: detect_anomaly printed above where it was computed. "
            f"{WHAT_TO_TRY}; run without detect_anomaly to save the update and repeat it (FailedUpdate)"
        ) from error

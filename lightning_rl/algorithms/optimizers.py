"""Optimisers and schedulers as plain data, looked at before a run needs them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lightning_rl.validation import (
    ClassSpec,
    ConfigurationError,
    check,
    check_arguments,
    check_number,
    import_class,
    to_class_spec,
)


def adam(device: torch.device) -> ClassSpec:
    """Return Adam with the epsilon that is usual here, in one kernel where the device has such."""
    if device.type in ("cpu", "cuda", "mps", "xpu"):
        return {"class_path": "torch.optim.Adam", "init_args": {"eps": 1e-5, "fused": True}}
    # Elsewhere its counter of steps lies on the device too, so that the host need not decide about a step.
    return {"class_path": "torch.optim.Adam", "init_args": {"eps": 1e-5, "capturable": True}}


def optimizer_spec(field: str, optimizer: ClassSpec | type[Optimizer]) -> ClassSpec:
    """Return an optimiser's class and arguments as plain data.

    Raises:
        ConfigurationError: It is none, or does not take its arguments; the learning rate is not one of them.
    """
    spec = to_class_spec(field, optimizer)
    given = spec["init_args"]
    rate = field.replace("optimizer", "learning_rate")
    check("lr" not in given, f"{field}: init_args", given, f"no 'lr'; set {rate} instead")
    check_arguments(field, spec, Optimizer, "params", "lr")
    return spec


def scheduler_spec(lr_scheduler: ClassSpec | type[LRScheduler]) -> ClassSpec:
    """Return a scheduler's class and arguments as plain data.

    Raises:
        ConfigurationError: It is none, does not take its arguments, or needs a metric.
    """
    spec = to_class_spec("lr_scheduler", lr_scheduler)
    plateau = issubclass(import_class("lr_scheduler", spec["class_path"], LRScheduler), ReduceLROnPlateau)
    check(not plateau, "lr_scheduler", spec, "a scheduler that needs no metric")
    check_arguments("lr_scheduler", spec, LRScheduler, "optimizer")
    return spec


def check_step(given: str, optimizer: Optimizer) -> None:
    """Take steps with an optimizer whose parameters nobody needs, with gradients of 1.

    Args:
        given: The options that it was made of, as an error names them.
        optimizer: Of parameters that may be changed.

    Raises:
        ConfigurationError: A step fails, as it does without a closure or with gradients that are not sparse, or leaves
            parameters that are not finite.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    try:
        with torch.random.fork_rng(devices=[]):
            for _ in range(3):
                optimizer.step()
        problem = "" if all(x.isfinite().all() for x in parameters) else "parameters are not finite after three steps"
    except Exception as error:
        problem = f"a step fails, {type(error).__name__}: {error}"
    expected = "an optimizer and arguments that can take steps without a closure, on dense gradients"
    if problem:
        raise ConfigurationError(f"{given} is not valid ({problem}): expected {expected}")


def step_scheduler(scheduler: LRScheduler, spec: ClassSpec | None) -> None:
    """Step a scheduler after a rollout.

    Args:
        scheduler: Of the learning rate.
        spec: Its class and arguments, as `lr_scheduler` has them.

    Raises:
        ConfigurationError: The step fails, or gives a learning rate that is no number of at least 0.
    """
    field, step = f"lr_scheduler={spec!r}", scheduler.last_epoch + 1
    try:
        scheduler.step()
    except Exception as error:
        raise ConfigurationError(
            f"{field} is not valid (step {step} fails, {type(error).__name__}: {error}): expected a scheduler that can "
            "take a step after each rollout of the run"
        ) from error
    for rate in scheduler.get_last_lr():
        if isinstance(rate, int | float):
            check_number(f"{field}: learning rate after step {step}", rate, at_least=0)


def optimizers_and_schedulers(made: Any) -> tuple[Sequence[Optimizer], Sequence[LRScheduler]]:  # noqa: ANN401
    """Return what `configure_optimizers` gave as two lists."""
    if isinstance(made, tuple):
        return made[0], made[1]
    return (made if isinstance(made, list) else [made]), []

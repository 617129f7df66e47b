"""Optimisers and schedulers as plain data, looked at before a run needs them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lightning_rl.validation import ClassSpec, check, check_arguments, import_class, to_class_spec


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
    plateau = issubclass(import_class("lr_scheduler", spec["class_path"]), ReduceLROnPlateau)
    check(not plateau, "lr_scheduler", spec, "a scheduler that needs no metric")
    check_arguments("lr_scheduler", spec, LRScheduler, "optimizer")
    return spec


def optimizers_and_schedulers(made: Any) -> tuple[Sequence[Optimizer], Sequence[LRScheduler]]:  # noqa: ANN401
    """Return what `configure_optimizers` gave as two lists."""
    if isinstance(made, tuple):
        return made[0], made[1]
    return (made if isinstance(made, list) else [made]), []

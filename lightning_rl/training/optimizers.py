"""Optimizers and learning rate schedulers: checked and made from the options of an algorithm."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Annotated, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lightning_rl.training.parameter_groups import SCALE, ParameterGroups, split_parameters
from lightning_rl.validation import ClassSpec, PositiveFloat, Range, check, check_arguments, import_class, instantiate

SCHEDULER = "optimizer.scheduler"


def adam(device: torch.device) -> ClassSpec:
    """Return Adam with epsilon 1e-5, fused or capturable so that the device can skip a step."""
    how = "fused" if device.type in ("cpu", "cuda", "mps", "xpu") else "capturable"
    return {"class_path": "torch.optim.Adam", "init_args": {"eps": 1e-5, how: True}}


def has_own_critic_optimizer(options: Mapping[str, Any]) -> bool:
    """Whether the options ask for a separate critic optimizer."""
    return any(options[f"optimizer.critic.{name}"] not in (None, {}) for name in ("name", "options", "learning_rate"))


def _spec(options: Mapping[str, Any], group: str, default: ClassSpec) -> ClassSpec:
    name, arguments = options[f"{group}.name"], options[f"{group}.options"]
    if name is not None:
        return {"class_path": name, "init_args": arguments}
    known = set(inspect.signature(import_class(group, default["class_path"], Optimizer)).parameters)
    unknown = ", ".join(sorted({*arguments} - known - {"params"}))
    expected = f"arguments of the default optimizer; {unknown} needs another one: set {group}.name"
    check(not unknown, f"{group}.options", arguments, expected)
    return {"class_path": default["class_path"], "init_args": default["init_args"] | arguments}


def scheduler_spec(options: Mapping[str, Any]) -> ClassSpec | None:
    """Return class and arguments of the learning rate scheduler, or None."""
    name = options[f"{SCHEDULER}.name"]
    return None if name is None else {"class_path": name, "init_args": options[f"{SCHEDULER}.options"]}


def check_optimizer_class(group: str, spec: ClassSpec) -> None:
    """Check that a class is an optimizer that accepts its arguments."""
    kind = _check_class(group, spec, Optimizer, torch.optim, "params", "lr")
    closure = inspect.signature(kind.step).parameters.get("closure")
    needs_closure = closure is not None and closure.default is inspect.Parameter.empty
    check(not needs_closure, f"{group}.name", spec["class_path"], "an optimizer that steps without a closure")


def check_scheduler_class(spec: ClassSpec) -> None:
    """Check that a class is a scheduler that accepts its arguments and needs no metric."""
    path, kind = spec["class_path"], _check_class(SCHEDULER, spec, LRScheduler, torch.optim.lr_scheduler, "optimizer")
    check(not issubclass(kind, ReduceLROnPlateau), f"{SCHEDULER}.name", path, "a scheduler that needs no metric")


def _check_class(group: str, spec: ClassSpec, base: type[Any], package: ModuleType, *given: str) -> type[Any]:
    path = spec["class_path"]
    classes = {name.lower(): name for name, value in vars(package).items() if inspect.isclass(value)}
    near = classes.get(path.lower(), path)  # `rmsprop` means RMSprop
    check("." in path, f"{group}.name", path, f"an import path such as {package.__name__}.{near}")
    kind = import_class(f"{group}.name", path, base)
    check_arguments(group, spec, base, *given)
    return kind


def optimizers_and_schedulers(made: Any) -> tuple[Sequence[Optimizer], Sequence[LRScheduler]]:
    """Return the result of `configure_optimizers`, in any of Lightning's forms, as two lists."""
    optimizers, schedulers = made if isinstance(made, tuple) else (made if isinstance(made, list) else [made], [])
    entries = [x if isinstance(x, dict) else {"optimizer": x} for x in optimizers]
    schedulers = [*schedulers, *(x["lr_scheduler"] for x in entries if "lr_scheduler" in x)]
    return [x["optimizer"] for x in entries], [x["scheduler"] if isinstance(x, dict) else x for x in schedulers]


def optimizer_parts(
    policy: nn.Module, options: Mapping[str, Any], default: ClassSpec
) -> list[tuple[str, ClassSpec, dict[str | None, list[nn.Parameter]]]]:
    """Return option group, class and parameters by pattern of each optimizer, after a check of the patterns."""
    groups: ParameterGroups = options["optimizer.groups"]
    specs = {"optimizer": _spec(options, "optimizer", default)}
    if has_own_critic_optimizer(options):
        specs["optimizer.critic"] = _spec(options, "optimizer.critic", specs["optimizer"])
    halves = split_parameters(policy, groups, separate=len(specs) > 1)
    parts = [(field, spec, part) for (field, spec), part in zip(specs.items(), halves, strict=True)]
    for field, spec, part in parts:
        known = set(inspect.signature(import_class(field, spec["class_path"], Optimizer)).parameters) - {"params", "lr"}
        for pattern in filter(None, part):
            unknown = sorted({*groups[pattern]} - known - {SCALE})
            expected = f"{SCALE} and options of {spec['class_path']}, not {', '.join(unknown)}"
            check(not unknown, f"optimizer.groups: {pattern}", groups[pattern], expected)
    return parts


def make_optimizers(
    policy: nn.Module, options: Mapping[str, Any], default: ClassSpec, rates: Sequence[float]
) -> tuple[list[Optimizer], list[LRScheduler]]:
    """Return the optimizer of a policy, or one for its actor and one for its critic, and their schedulers.

    `rates` has the learning rate of each; `default` is the optimizer of the algorithm if the options name none.
    """
    optimizers: list[Optimizer] = []
    for (field, spec, parameters), rate in zip(optimizer_parts(policy, options, default), rates, strict=False):
        given: list[dict[str, Any]] = []
        for pattern, members in parameters.items():
            own = {} if pattern is None else options["optimizer.groups"][pattern]
            given.append({"params": members, **own, **({"lr": rate * own[SCALE]} if SCALE in own else {})})
        # Without groups the parameters are passed as a list, which all optimizers accept.
        single = [*parameters] == [None]
        optimizers.append(instantiate(field, spec, Optimizer, given[0]["params"] if single else given, lr=rate))
    if (scheduler := scheduler_spec(options)) is None:
        return optimizers, []
    return optimizers, [instantiate(SCHEDULER, scheduler, LRScheduler, optimizer) for optimizer in optimizers]


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    """Set the learning rate of every group to `rate` times the scale of the group."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get(SCALE, 1.0)


@dataclass(frozen=True)
class AdaptiveLearningRate:
    """Lowers the learning rate after large policy changes and raises it after small ones, as rl_games and rsl_rl do.

    The rate does not change while the divergence per rollout is between half and twice `target_kl`, in nats. Each
    change is by `factor`, within `minimum` and `maximum`.
    """

    target_kl: PositiveFloat
    factor: Annotated[float, Range(above=1)] = 1.5
    minimum: PositiveFloat = 1e-6
    maximum: float = 1e-2

    def adapt(self, optimizer: Optimizer, kl: float) -> None:
        """Change the learning rate of every group after a rollout with mean divergence `kl`."""
        if kl > 2 * self.target_kl:
            factor = 1 / self.factor
        elif kl < self.target_kl / 2:
            factor = self.factor
        else:  # also if kl is NaN
            return
        for group in optimizer.param_groups:
            scale = group.get(SCALE, 1.0)
            group["lr"] = min(max(group["lr"] * factor, self.minimum * scale), self.maximum * scale)

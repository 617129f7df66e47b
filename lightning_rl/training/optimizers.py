"""Optimizers and schedulers as the options ask for them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lightning_rl.training.parameter_groups import SCALE, ParameterGroups, split_parameters
from lightning_rl.validation import (
    ClassSpec,
    ConfigurationError,
    check,
    check_arguments,
    check_number,
    import_class,
    instantiate,
)


def adam(device: torch.device) -> ClassSpec:
    """Return Adam with the epsilon that is usual here, in one kernel where the device has such."""
    if device.type in ("cpu", "cuda", "mps", "xpu"):
        return {"class_path": "torch.optim.Adam", "init_args": {"eps": 1e-5, "fused": True}}
    # Elsewhere its counter of steps lies on the device too, so that the host need not decide about a step.
    return {"class_path": "torch.optim.Adam", "init_args": {"eps": 1e-5, "capturable": True}}


SCHEDULER = "optimizer.scheduler"


def optimizer_specs(options: Mapping[str, Any], default: ClassSpec) -> dict[str, ClassSpec]:
    """Return class and arguments of the optimizer, and of the critic's if it has its own, by their group of options.

    Args:
        options: By full name.
        default: The optimizer of the algorithm, for a name of None.
    """
    specs = {"optimizer": _spec(options, "optimizer", default)}
    if has_own_critic_optimizer(options):
        specs["optimizer.critic"] = _spec(options, "optimizer.critic", specs["optimizer"])
    return specs


def has_own_critic_optimizer(options: Mapping[str, Any]) -> bool:
    """Whether options ask for a separate optimizer for the critic."""
    return any(options[f"optimizer.critic.{name}"] not in (None, {}) for name in ("name", "options", "learning_rate"))


def _spec(options: Mapping[str, Any], group: str, default: ClassSpec) -> ClassSpec:
    name, arguments = options[f"{group}.name"], options[f"{group}.options"]
    if name is None:
        known = set(inspect.signature(import_class(group, default["class_path"], Optimizer)).parameters)
        unknown = ", ".join(sorted({*arguments} - known - {"params"}))
        expected = f"arguments of the default optimizer; {unknown} needs another one: set {group}.name"
        check(not unknown, f"{group}.options", arguments, expected)
        return {"class_path": default["class_path"], "init_args": default["init_args"] | arguments}
    return {"class_path": name, "init_args": arguments}


def scheduler_spec(options: Mapping[str, Any]) -> ClassSpec | None:
    """Return class and arguments of the learning rate scheduler; None without one."""
    name = options[f"{SCHEDULER}.name"]
    return None if name is None else {"class_path": name, "init_args": options[f"{SCHEDULER}.options"]}


def check_optimizer_class(group: str, spec: ClassSpec) -> None:
    """Raise unless a class is an optimizer that takes its arguments.

    Raises:
        ConfigurationError: It is none, or refuses an argument.
    """
    path = spec["class_path"]
    check("." in path, f"{group}.name", path, f"an import path such as torch.optim.{path}")
    import_class(f"{group}.name", path, Optimizer)
    check_arguments(group, spec, Optimizer, "params", "lr")


def check_scheduler_class(spec: ClassSpec) -> None:
    """Raise unless a class is a scheduler that takes its arguments and needs no metric.

    Raises:
        ConfigurationError: It is none, refuses an argument, or needs a metric.
    """
    path = spec["class_path"]
    check("." in path, f"{SCHEDULER}.name", path, f"an import path such as torch.optim.lr_scheduler.{path}")
    plateau = issubclass(import_class(f"{SCHEDULER}.name", path, LRScheduler), ReduceLROnPlateau)
    check(not plateau, f"{SCHEDULER}.name", path, "a scheduler that needs no metric")
    check_arguments(SCHEDULER, spec, LRScheduler, "optimizer")


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
        spec: Its class and arguments.

    Raises:
        ConfigurationError: The step fails, or gives a learning rate that is no number of at least 0.
    """
    field, step = f"{SCHEDULER}={spec!r}", scheduler.last_epoch + 1
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


def check_optimizers(policy: nn.Module, specs: Mapping[str, ClassSpec], groups: ParameterGroups) -> None:
    """Raise unless optimisers can be made; for the arguments see `make_optimizers`.

    Raises:
        ConfigurationError: No parameter belongs to a pattern, a class does not know an option of its groups, or the
            critic shares parameters; names it.
    """
    for (field, spec), part in zip(specs.items(), split_parameters(policy, groups, len(specs) > 1), strict=True):
        known = set(inspect.signature(import_class(field, spec["class_path"], Optimizer)).parameters) - {"params", "lr"}
        for pattern in filter(None, part):
            unknown = sorted({*groups[pattern]} - known - {SCALE})
            expected = f"{SCALE} and options of {spec['class_path']}, not {', '.join(unknown)}"
            check(not unknown, f"optimizer.groups: {pattern}", groups[pattern], expected)


def try_optimizers(
    policy: nn.Module,
    specs: Mapping[str, ClassSpec],
    groups: ParameterGroups,
    scheduler: ClassSpec | None,
    on_any_device: bool,
) -> None:
    """Make optimizers and schedulers for a few numbers in place of the parameters, and take some steps with them.

    Args:
        policy: Whose parameters they will have.
        specs: As in `make_optimizers`.
        groups: As in `make_optimizers`.
        scheduler: Class and arguments of the scheduler of each.
        on_any_device: Try the optimizers that are known to run on every device. Others are for when the policy is on
            its device.

    Raises:
        ConfigurationError: One refuses an argument or cannot take a step.
    """
    parts = split_parameters(policy, groups, separate=len(specs) > 1)
    for (field, spec), part in zip(specs.items(), parts, strict=False):
        if _runs_on_any_device(spec, groups) == on_any_device:
            _try_optimizer(field, spec, part, groups, scheduler)


def _runs_on_any_device(spec: ClassSpec, groups: ParameterGroups) -> bool:
    capturable = any(options.get("capturable") for options in (spec["init_args"], *groups.values()))
    return spec["class_path"].startswith(("torch.", "lightning_rl.")) and not capturable


def _try_optimizer(
    field: str,
    spec: ClassSpec,
    part: Mapping[str | None, list[nn.Parameter]],
    groups: ParameterGroups,
    scheduler: ClassSpec | None,
) -> None:
    devices = {parameter.device.type for members in part.values() for parameter in members}
    if devices & {"meta", "xla"}:  # no numbers there, or a graph to compile for each step
        return
    few = {
        pattern: [nn.Parameter(x.new_ones([min(size, 2) for size in x.shape])) for x in members]
        for pattern, members in part.items()
    }
    optimizer = _make(field, spec, few, groups, 1e-3)
    made = None if scheduler is None else instantiate(SCHEDULER, scheduler, LRScheduler, optimizer)
    check_step(f"{field}={spec!r}" + (f" with optimizer.groups={groups!r}" if groups else ""), optimizer)
    if made is not None:
        step_scheduler(made, scheduler)


def make_optimizers(
    policy: nn.Module, specs: Mapping[str, ClassSpec], groups: ParameterGroups, rates: Sequence[float]
) -> list[Optimizer]:
    """Make the optimiser of a policy, or that of its actor and that of its critic.

    Args:
        policy: Whose parameters they have.
        specs: Class and arguments of one or two, by the setting that they come from.
        groups: Options of some parameters, by pattern.
        rates: Learning rate of each for a group whose scale is 1.

    Raises:
        ConfigurationError: A class refuses an argument.
    """
    parts = split_parameters(policy, groups, separate=len(specs) > 1)
    return [
        _make(field, spec, part, groups, rate)
        for (field, spec), part, rate in zip(specs.items(), parts, rates, strict=False)
    ]


def _make(
    field: str,
    spec: ClassSpec,
    parameters: Mapping[str | None, list[nn.Parameter]],
    groups: ParameterGroups,
    rate: float,
) -> Optimizer:
    given: list[dict[str, Any]] = []
    for pattern, members in parameters.items():
        options = {} if pattern is None else groups[pattern]
        # Betas and the like: plain data has lists where optimisers have tuples.
        options = {name: tuple(x) if isinstance(x, list) else x for name, x in options.items()}
        given.append({"params": members, **options, **({"lr": rate * options[SCALE]} if SCALE in options else {})})
    # One group without options is given as everybody gives it, to optimisers too that take nothing else.
    single = [*parameters] == [None]
    optimizer: Optimizer = instantiate(field, spec, Optimizer, given[0]["params"] if single else given, lr=rate)
    return optimizer


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    """Set the learning rate of every group: `rate` times its scale."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get(SCALE, 1.0)


def scale_learning_rate(optimizer: Optimizer, factor: float, lowest: float, highest: float) -> None:
    """Multiply the learning rate of every group, within bounds that are scaled as the group is."""
    for group in optimizer.param_groups:
        scale = group.get(SCALE, 1.0)
        group["lr"] = min(max(group["lr"] * factor, lowest * scale), highest * scale)


@dataclass(frozen=True)
class AdaptiveLearningRate:
    """Lower the learning rate where the policy moves too far, raise it where it hardly moves.

    The rule of rl_games and rsl_rl, once per rollout. The rate itself is in the optimiser, and so in its checkpoints.

    Attributes:
        target_kl: The divergence aimed at, in nats: no change between half and twice of it.
        factor: What the rate is divided or multiplied by.
        minimum: The rate never falls below.
        maximum: Nor rises above.
    """

    target_kl: float
    factor: float = 1.5
    minimum: float = 1e-6
    maximum: float = 1e-2

    def adapt(self, optimizer: Optimizer, kl: float) -> None:
        """Set the rate of every group for the next rollout, after a mean divergence of `kl` in this one."""
        if kl > 2 * self.target_kl:
            scale_learning_rate(optimizer, 1 / self.factor, self.minimum, self.maximum)
        elif kl < self.target_kl / 2:
            scale_learning_rate(optimizer, self.factor, self.minimum, self.maximum)

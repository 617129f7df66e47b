"""Which parameters each optimiser has, and in which groups."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_rl.algorithms.optimizers import check_step, step_scheduler
from lightning_rl.validation import (
    ClassSpec,
    ConfigurationError,
    check,
    check_number,
    import_class,
    instantiate,
    to_plain_data,
)

Half = Literal["actor", "critic"]
"""A half of the loss: that of the policy, or that of the value."""

SCALE = "learning_rate_scale"
ParameterGroups = dict[str, dict[str, Any]]
"""Options of some parameters, by a pattern of their names."""


def group_options(groups: Any) -> ParameterGroups:  # noqa: ANN401 - it is checked here
    """Return `parameter_groups` as plain data.

    Raises:
        ConfigurationError: It is no dict of dicts, or a scale is negative.
    """
    plain: Any = to_plain_data("parameter_groups", groups)
    is_dict = isinstance(plain, dict) and all(isinstance(options, dict) for options in plain.values())
    check(is_dict, "parameter_groups", groups, "a dict: pattern of names → dict of options")
    for pattern, options in plain.items():
        check_number(f"parameter_groups: {pattern}: {SCALE}", options.get(SCALE, 1.0), at_least=0)
        for name in ("params", "lr"):
            check(name not in options, f"parameter_groups: {pattern}", options, f"no {name!r}; {SCALE} is for the rate")
    return plain  # type: ignore[no-any-return]


def is_of_critic(name: str) -> bool:
    """Whether a policy's parameter of that name is the critic's alone: its encoder, where it has one, and its head."""
    return name.startswith(("critic_", "value_"))


def has_separate_critic(policy: nn.Module) -> bool:
    """Whether the critic shares no parameter with the actor."""
    return getattr(policy, "critic_encoder", None) is not None


def parameters_of_other_half(policy: nn.Module, half: Half) -> list[nn.Parameter]:
    """Return the parameters that the loss of `half` does not depend on."""
    has_own_core = getattr(policy, "critic_core", None) is not None
    actors = ("action_head", "actor_core") if has_own_core else ("action_head",)

    def is_other(name: str) -> bool:
        if half == "actor":
            return is_of_critic(name)
        return not is_of_critic(name) if has_separate_critic(policy) else name.startswith(actors)

    return [parameter for name, parameter in policy.named_parameters() if is_other(name)]


def parameters_of_policy(policy: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that actions depend on: those of an encoder that the critic shares, too."""
    return [parameter for name, parameter in policy.named_parameters() if not is_of_critic(name)]


def check_critic(policy: nn.Module, field: str, value: object) -> None:
    """Raise unless a policy has parameters that are the critic's alone, as what learns nothing else needs.

    Args:
        policy: Whose parameters.
        field: The option by which only the critic learns.
        value: What it is set to.

    Raises:
        ConfigurationError: There are none.
    """
    names = [name for name, parameter in policy.named_parameters() if parameter.requires_grad]
    expected = (
        f"a policy with parameters of the critic alone, whose names begin with critic_ or value_, since only these "
        f"are learned; make_policy() made {type(policy).__name__} with {', '.join(names)}"
    )
    check(any(map(is_of_critic, names)), field, value, expected)


def split_parameters(
    policy: nn.Module, groups: ParameterGroups, separate: bool
) -> list[dict[str | None, list[nn.Parameter]]]:
    """Return, for each optimiser, its parameters by the pattern that they are grouped by.

    Args:
        policy: Whose parameters.
        groups: Options by pattern: the beginning of a name (`critic_encoder`, `action_head.log_std`), or a pattern in
            the manner of a shell (`*.bias`). A parameter belongs to the first that fits; None has those that are left.
        separate: Whether the critic has an optimiser of its own, the second.

    Raises:
        ConfigurationError: No parameter belongs to a pattern; or the critic has none of its own.
    """
    named = dict(policy.named_parameters())
    critics = [name for name in named if separate and is_of_critic(name)]
    if separate and not (has_separate_critic(policy) and 0 < len(critics) < len(named)):
        raise ConfigurationError(
            "critic_optimizer or critic_learning_rate is given, but actor and critic share parameters: expected "
            "separate encoders (shared_encoder=false)"
        )
    belongs = {name: next((p for p in groups if _fits(name, p)), None) for name in named}
    for pattern in groups:
        is_first = pattern in belongs.values()
        check(is_first, "parameter_groups", pattern, "a pattern that comes first for some of " + ", ".join(named))
    halves = [[name for name in named if name not in critics], critics][: 1 + separate]
    patterns: list[str | None] = [None, *groups]
    return [
        {pattern: found for pattern in patterns if (found := [named[n] for n in half if belongs[n] == pattern])}
        for half in halves
    ]


def _fits(name: str, pattern: str) -> bool:
    return name == pattern or name.startswith(f"{pattern}.") or fnmatchcase(name, pattern)


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
            check(not unknown, f"parameter_groups: {pattern}", groups[pattern], expected)


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
    made = None if scheduler is None else instantiate("lr_scheduler", scheduler, LRScheduler, optimizer)
    check_step(f"{field}={spec!r}" + (f" with parameter_groups={groups!r}" if groups else ""), optimizer)
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

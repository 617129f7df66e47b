"""Which parameters belong to actor, critic and optimizer groups, and L2 penalties on them."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

from torch import Tensor, nn

from lightning_rl.functional import squared_norm
from lightning_rl.policies.sharding import whole
from lightning_rl.validation import ConfigurationError, check, check_number, to_plain_data

ActorOrCritic = Literal["actor", "critic"]
"""A half of the network and of the loss."""
SCALE = "learning_rate_scale"
ParameterGroups = dict[str, dict[str, Any]]
"""Optimizer options by pattern of parameter names."""


def group_options(groups: Any) -> ParameterGroups:  # it is checked here
    """Return `optimizer.groups` as plain data, after checking them."""
    plain: Any = to_plain_data("optimizer.groups", groups)
    is_dict = isinstance(plain, dict) and all(isinstance(options, dict) for options in plain.values())
    check(is_dict, "optimizer.groups", groups, "a dict: pattern of names → dict of options")
    for pattern, options in plain.items():
        check_number(f"optimizer.groups: {pattern}: {SCALE}", options.get(SCALE, 1.0), at_least=0)
        for name in ("params", "lr"):
            check(name not in options, f"optimizer.groups: {pattern}", options, f"no {name!r}; {SCALE} sets the rate")
    return plain  # type: ignore[no-any-return]


def is_of_critic(name: str) -> bool:
    """Whether a parameter of a policy belongs only to the critic, by its name."""
    return name.startswith(("critic_", "value_"))


def parameters_of_other_half(policy: nn.Module, half: ActorOrCritic) -> list[nn.Parameter]:
    """Return the parameters that do not affect the loss of `half`."""
    has_own_encoder = getattr(policy, "critic_encoder", None) is not None
    has_own_core = getattr(policy, "critic_core", None) is not None
    actors = ("action_head", "actor_core") if has_own_core else ("action_head",)

    def is_other(name: str) -> bool:
        if half == "actor":
            return is_of_critic(name)
        return not is_of_critic(name) if has_own_encoder else name.startswith(actors)

    return [parameter for name, parameter in policy.named_parameters() if is_other(name)]


def parameters_of_policy(policy: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that affect actions, including a shared encoder."""
    return [parameter for name, parameter in policy.named_parameters() if not is_of_critic(name)]


def check_critic(policy: nn.Module, field: str, value: object) -> None:
    """Check that a policy has trainable parameters of the critic only, which the option `field` needs."""
    names = [name for name, parameter in policy.named_parameters() if parameter.requires_grad]
    expected = (
        f"a policy with parameters that belong only to the critic, whose names begin with critic_ or value_, since "
        f"only these are trained; make_policy() returned {type(policy).__name__} with {', '.join(names)}"
    )
    check(any(map(is_of_critic, names)), field, value, expected)


def split_parameters(
    policy: nn.Module, groups: ParameterGroups, separate: bool
) -> list[dict[str | None, list[nn.Parameter]]]:
    """Return the parameters of each optimizer by pattern; None has the parameters that match no pattern.

    A pattern is a module or parameter (`critic_encoder`, `action_head.log_std`), or a shell pattern (`*.bias`). A
    parameter belongs to the first matching pattern. With `separate`, the second optimizer has the critic. Raises a
    `ConfigurationError` if no parameter belongs to a pattern, or actor and critic share parameters.
    """
    named = dict(policy.named_parameters())
    critics = [name for name in named if separate and is_of_critic(name)]
    if separate:
        # A custom policy without `critic_encoder` names the parameters of its critic.
        if getattr(policy, "critic_encoder", policy) is None or len(critics) == len(named):
            raise ConfigurationError(
                "optimizer.critic is set, but actor and critic share parameters: expected separate encoders "
                "(policy.shared_encoder=false; of PPG, architecture=dual)"
            )
        check_critic(policy, "optimizer.critic", True)
    belongs = {name: next((p for p in groups if _fits(name, p)), None) for name in named}
    for pattern in groups:
        is_first = pattern in belongs.values()
        check(is_first, "optimizer.groups", pattern, "a pattern that comes first for some of " + ", ".join(named))
    halves = [[name for name in named if name not in critics], critics][: 1 + separate]
    patterns: list[str | None] = [None, *groups]
    return [
        {pattern: found for pattern in patterns if (found := [named[n] for n in half if belongs[n] == pattern])}
        for half in halves
    ]


def _fits(name: str, pattern: str) -> bool:
    return name == pattern or name.startswith(f"{pattern}.") or fnmatchcase(name, pattern)


def check_penalized(policy: nn.Module, coefficients: Mapping[str, float]) -> None:
    """Check that a policy has the weights that `weight_penalty` penalizes."""
    for part, coefficient in coefficients.items():
        expected = "0: all such weights are frozen, or actor and critic share nothing (set l2.policy and l2.value)"
        check(bool(weights_by_part(policy)[part]), f"optimizer.l2.{part}", coefficient, expected)


def weight_penalty(policy: nn.Module, coefficients: Mapping[str, float]) -> Tensor:
    """Return the sum of squared weights, with a coefficient for some of `policy`, `value` and `shared`.

    Weights are the matrices of layers, without biases, standard deviations, gains of normalization layers and
    embeddings. Unlike weight decay, the penalty is part of the gradient that is clipped and that Adam averages.
    """
    weights = weights_by_part(policy)
    penalties = (c * squared_norm([whole(x) for x in weights[part]]) for part, c in coefficients.items())
    return functools.reduce(operator.add, penalties)


def weights_by_part(policy: nn.Module) -> dict[str, list[Tensor]]:
    """Return the weights of an `ActorCritic` for `policy`, `value` and `shared`."""
    pairs = (("actor_encoder", "critic_encoder"), ("actor_core", "critic_core"))
    shared = tuple(actors for actors, critics in pairs if getattr(policy, critics, None) is None)
    parts: dict[str, list[Tensor]] = {"policy": [], "value": [], "shared": []}
    for name, module in policy.named_modules():
        if isinstance(module, nn.Embedding) or name.endswith(".tables"):  # the latter are of the autoregressive head
            continue
        for parameter_name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() < 2 or parameter_name.endswith("bias") or not parameter.requires_grad:
                continue
            if is_of_critic(name):
                parts["value"].append(parameter)
            else:
                parts["shared" if name.startswith(shared) else "policy"].append(parameter)
    return parts


Part = Literal["policy", "critic", "normalizers"]
PARTS: tuple[Part, ...] = get_args(Part)


def part_of(name: str) -> Part | None:
    """Return the part of an entry of an algorithm's `state_dict`, or None."""
    # The value normalizer belongs to the critic, whose outputs are in its units.
    if "normalizer" in name and not name.startswith("policy.value_"):
        return "normalizers"
    if not name.startswith("policy."):
        return None
    return "critic" if name.startswith(("policy.critic_", "policy.value_")) else "policy"

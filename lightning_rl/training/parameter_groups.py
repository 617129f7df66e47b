"""Parameters of actor and critic: optimizer groups, parts of a checkpoint, L2 penalties."""

from __future__ import annotations

import functools
import operator
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

from torch import Tensor, nn

from lightning_rl.functional import squared_norm
from lightning_rl.policies.actor_critic import ActorCritic
from lightning_rl.validation import (
    ConfigurationError,
    check,
    check_number,
    to_plain_data,
)

ActorOrCritic = Literal["actor", "critic"]
"""A half of the loss: that of the policy, or that of the value."""
SCALE = "learning_rate_scale"
ParameterGroups = dict[str, dict[str, Any]]
"""Options of some parameters, by a pattern of their names."""


def group_options(groups: Any) -> ParameterGroups:  # noqa: ANN401 - it is checked here
    """Return `optimizer.groups` as plain data.

    Raises:
        ConfigurationError: It is no dict of dicts, or a scale is negative.
    """
    plain: Any = to_plain_data("optimizer.groups", groups)
    is_dict = isinstance(plain, dict) and all(isinstance(options, dict) for options in plain.values())
    check(is_dict, "optimizer.groups", groups, "a dict: pattern of names → dict of options")
    for pattern, options in plain.items():
        check_number(f"optimizer.groups: {pattern}: {SCALE}", options.get(SCALE, 1.0), at_least=0)
        for name in ("params", "lr"):
            check(name not in options, f"optimizer.groups: {pattern}", options, f"no {name!r}; {SCALE} is for the rate")
    return plain  # type: ignore[no-any-return]


def is_of_critic(name: str) -> bool:
    """Whether a policy's parameter of that name is the critic's alone: its encoder, where it has one, and its head."""
    return name.startswith(("critic_", "value_"))


def has_separate_critic(policy: nn.Module) -> bool:
    """Whether the critic shares no parameter with the actor."""
    return getattr(policy, "critic_encoder", None) is not None


def parameters_of_other_half(policy: nn.Module, half: ActorOrCritic) -> list[nn.Parameter]:
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
            "optimizer.critic is given, but actor and critic share parameters: expected separate encoders "
            "(policy.shared_encoder=false)"
        )
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


class WeightPenalty:
    """Adds up the squares of weights, each part times a coefficient of its own.

    Weights are the matrices of layers: no biases, no standard deviations, no gains of normalising layers and no
    embeddings. Unlike weight decay, the penalty goes through the optimiser's moments and the clipping of gradients.

    Args:
        policy: Coefficient for what only the actor has.
        value: For what only the critic has.
        shared: For what both have.
    """

    def __init__(self, policy: float = 0.0, value: float = 0.0, shared: float = 0.0) -> None:
        self.coefficients = {"policy": policy, "value": value, "shared": shared}

    def check_policy(self, policy: nn.Module) -> None:
        """Raise unless the weights that a penalty is wanted on can be told apart, and there are some.

        Raises:
            ConfigurationError: The policy is no `ActorCritic`, or has no such weights.
        """
        for part, coefficient in self.coefficients.items():
            if coefficient:
                known = isinstance(policy, ActorCritic)
                expected = f"0, since actor and critic of a {type(policy).__name__} cannot be told apart"
                check(known, f"optimizer.l2.{part}", coefficient, expected)
                expected = "0, since actor and critic share nothing: set optimizer.l2.policy and optimizer.l2.value"
                check(bool(weights_by_part(policy)[part]), f"optimizer.l2.{part}", coefficient, expected)

    def __call__(self, policy: nn.Module) -> Tensor | None:
        """Return the penalty on the weights of a policy, a scalar; None where there is none."""
        wanted = {part: coefficient for part, coefficient in self.coefficients.items() if coefficient}
        if not wanted:
            return None
        weights = weights_by_part(policy)
        return functools.reduce(operator.add, (c * squared_norm(weights[part]) for part, c in wanted.items()))


def weights_by_part(policy: nn.Module) -> dict[str, list[Tensor]]:
    """Return the weights of an actor-critic that belong to `policy`, `value` and `shared`."""
    pairs = (("actor_encoder", "critic_encoder"), ("actor_core", "critic_core"))
    shared = tuple(actors for actors, critics in pairs if getattr(policy, critics, None) is None)
    parts: dict[str, list[Tensor]] = {"policy": [], "value": [], "shared": []}
    for name, module in policy.named_modules():
        if isinstance(module, nn.Embedding):
            continue
        for parameter in module.parameters(recurse=False):
            if parameter.dim() < 2:
                continue
            if is_of_critic(name):
                parts["value"].append(parameter)
            else:
                parts["shared" if name.startswith(shared) else "policy"].append(parameter)
    return parts


Part = Literal["policy", "critic", "normalizers"]
PARTS: tuple[Part, ...] = get_args(Part)


def part_of(name: str) -> Part | None:
    """Return the part that a tensor of an algorithm's `state_dict` belongs to; None for what counts a run."""
    if "normalizer" in name and not name.startswith("policy.value_"):  # in whose units the critic predicts
        return "normalizers"
    if not name.startswith("policy."):
        return None
    return "critic" if name.startswith(("policy.critic_", "policy.value_")) else "policy"

"""Chooses the action head of an action space."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from gymnasium import spaces
from torch import nn

from lightning_rl.masks import MAX_INTEGER_CHOICES, ActionMask, MaskLayout, num_choices
from lightning_rl.nested import join, map_space, part_at, replace_leaves, space_leaves
from lightning_rl.policies.distributions.autoregressive import MAX_COMBINATIONS, AutoregressiveHead, is_suitable
from lightning_rl.policies.distributions.continuous import BetaHead, GaussianHead, SquashedGaussianHead
from lightning_rl.policies.distributions.discrete import BernoulliHead, CategoricalHead, MultiCategoricalHead
from lightning_rl.policies.distributions.joint import JointHead
from lightning_rl.validation import ConfigurationError, check, check_arguments, instantiate, is_one_of, to_class_spec

ActionDistribution: TypeAlias = "str | dict[str, Any] | None"
"""Of a part: the name of a kind, `{"kind": name, option: value, …}`, `{"class_path": …, "init_args": …}` of a head, or
None for the kind that the space has by default. Of a `Dict` or `Tuple` space: one for each path, None, or
`autoregressive` for all of it."""
_FIELD = "action_distribution"
_AUTOREGRESSIVE = "autoregressive"


class _Kind(NamedTuple):
    """How to make a head, which spaces it suits, in code and in words, and what can be said about it."""

    make: Callable[..., nn.Module]
    suits: Callable[[spaces.Space[Any]], bool]
    expected: str
    options: tuple[str, ...]
    preset: Mapping[str, Any]


def _is_continuous(space: spaces.Space[Any]) -> bool:
    return isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating)


def _is_bounded(space: spaces.Space[Any]) -> bool:
    return _is_continuous(space) and space.is_bounded() and bool((space.low < space.high).all())  # type: ignore[attr-defined]


def _has_choices(space: spaces.Space[Any]) -> bool:
    if isinstance(space, spaces.Box) and not _is_continuous(space):
        return max(num_choices(space)) <= MAX_INTEGER_CHOICES
    return isinstance(space, spaces.Discrete | spaces.MultiDiscrete)


def _categorical(in_features: int, space: Any, **options: Any) -> nn.Module:  # noqa: ANN401
    head = CategoricalHead if isinstance(space, spaces.Discrete) else MultiCategoricalHead
    return head(in_features, space, **options)


_CHOICES = (
    _has_choices,
    f"Discrete, MultiDiscrete, or an integer Box with at most {MAX_INTEGER_CHOICES} values in each component",
)
_COMBINED = (
    is_suitable,
    f"MultiDiscrete, MultiBinary, integer Box, and Dict and Tuple of these and Discrete, with at most "
    f"{MAX_COMBINATIONS} combinations",
)
_SWITCHES = (lambda space: isinstance(space, spaces.MultiBinary)), "MultiBinary"
_CONTINUOUS = _is_continuous, "a floating-point Box"
_BOUNDED = _is_bounded, "a floating-point Box with finite bounds on every side, low below high"
_TF_AGENTS_STD = {"std_transform": "softplus", "initial_std": 0.35, "initialization": "tf_agents"}
_DEVIATION = ("std", "std_transform", "min_std", "max_std", "initial_std", "initialization")
KINDS: dict[str, _Kind] = {
    "categorical": _Kind(_categorical, *_CHOICES, ("initialization",), {}),
    "bernoulli": _Kind(BernoulliHead, *_SWITCHES, ("initialization",), {}),
    "gaussian": _Kind(GaussianHead, *_CONTINUOUS, ("mean_transform", *_DEVIATION), {}),
    "squashed_gaussian": _Kind(SquashedGaussianHead, *_BOUNDED, _DEVIATION, {}),
    "beta": _Kind(BetaHead, *_BOUNDED, ("initialization",), {}),
    _AUTOREGRESSIVE: _Kind(AutoregressiveHead, *_COMBINED, ("hidden_size", "order", "initialization"), {}),
    "tf_agents_categorical": _Kind(_categorical, *_CHOICES, (), {"initialization": "tf_agents"}),
    "tf_agents_normal": _Kind(
        GaussianHead, *_BOUNDED, ("mean_transform", *_DEVIATION), {"mean_transform": "tanh", **_TF_AGENTS_STD}
    ),
    "tf_agents_squashed_normal": _Kind(SquashedGaussianHead, *_BOUNDED, _DEVIATION, _TF_AGENTS_STD),
}
"""The kinds by name."""
_DEFAULTS = ("categorical", "bernoulli", "gaussian")


def make_action_head(
    space: spaces.Space[Any],
    in_features: int,
    initial_log_std: float = 0.0,
    action_distribution: ActionDistribution = None,
    mask_space: spaces.Space[Any] | None = None,
) -> nn.Module:
    """Return the head for an action space.

    Args:
        space: `Discrete`, `MultiDiscrete`, `MultiBinary`, `Box`, or any nesting of these in `Dict` and `Tuple`.
        in_features: Number of features.
        initial_log_std: Logarithm of the initial standard deviation of Gaussians that have no `initial_std`.
        action_distribution: Which distributions to take.
        mask_space: Of masks, nested as actions are, which the head then takes after the features; None without any.

    Raises:
        ConfigurationError: The space is of another kind, or a distribution or a mask does not suit it; names the part.
    """
    masks = [] if mask_space is None else MaskLayout(space, mask_space).masks
    if not isinstance(space, spaces.Dict | spaces.Tuple) or _is_autoregressive(action_distribution, space):
        return _make_head(_FIELD, space, in_features, initial_log_std, action_distribution, mask_space)
    parts = space_leaves(space)
    made_of: list[spaces.Space[Any]] = []
    map_space(made_of.append, space)
    if not parts or len(parts) != len(made_of):
        raise ConfigurationError(f"action_space={space} is not supported: expected parts, with a path of its own each")
    choices = action_distribution or {}
    is_mapping = isinstance(choices, Mapping) and set(choices) <= set(parts)
    expected = f"a mapping from parts of the action to distributions; the parts are {', '.join(parts)}"
    check(is_mapping, _FIELD, action_distribution, expected)
    paths = iter(parts)

    def make(part: spaces.Space[Any]) -> nn.Module:
        path = next(paths)
        choice = choices.get(path) if isinstance(choices, Mapping) else None
        own_masks = _masks_of(path, mask_space) if path in masked else None
        return _make_head(f"{_FIELD}.{path}", part, in_features, initial_log_std, choice, own_masks)

    masked = [path for path in parts if any(mask == path or mask.startswith(join(path, "")) for mask in masks)]
    return JointHead(map_space(make, space), list(parts), masked)


def _is_autoregressive(choice: ActionDistribution, space: spaces.Space[Any]) -> bool:
    """Whether a choice is about all of a `Dict` or `Tuple`, and not about a part called `kind`."""
    if not isinstance(choice, Mapping):
        return choice == _AUTOREGRESSIVE
    chosen = choice.get("kind") == _AUTOREGRESSIVE
    clear = not chosen or "kind" not in space_leaves(space)
    check(clear, _FIELD, choice, f"{_AUTOREGRESSIVE!r} alone, since a part of the action is called 'kind'")
    return chosen


def _masks_of(path: str, mask_space: spaces.Space[Any] | None) -> spaces.Space[Any]:
    """Return the masks of a leaf of the action, components called as if it were all of the action."""

    def local(_: str, mask: Any) -> spaces.Space[Any]:  # noqa: ANN401
        return ActionMask(mask.shape, mask.given and mask.given.removeprefix(join(path, "")))

    return replace_leaves(local, part_at(mask_space, path))


def _check_masks(field: str, mask_space: spaces.Space[Any], head: nn.Module) -> None:
    """Raise unless a head that chooses each component independently can do what masks ask for."""
    is_one = isinstance(mask_space, ActionMask) and mask_space.given is None
    takes = "mask" in inspect.signature(head.forward).parameters
    check(takes, field, type(head).__name__, "a head whose forward takes 'mask' too, since this part has a mask")
    expected = f"{_AUTOREGRESSIVE}, since there are masks of single components or that depend on another's choice"
    check(is_one or isinstance(head, AutoregressiveHead), field, type(head).__name__, expected)


def _make_head(
    field: str,
    space: spaces.Space[Any],
    in_features: int,
    initial_log_std: float,
    choice: ActionDistribution,
    mask_space: spaces.Space[Any] | None,
) -> nn.Module:
    if isinstance(choice, dict) and "class_path" in choice:
        spec = to_class_spec(field, choice)
        check_arguments(field, spec, nn.Module, "in_features", "space")
        head: nn.Module = instantiate(field, spec, nn.Module, in_features=in_features, space=space)
    else:
        head = _make_kind(field, space, in_features, initial_log_std, choice, mask_space)
    if mask_space is not None:
        _check_masks(field, mask_space, head)
    return head


def _make_kind(
    field: str,
    space: spaces.Space[Any],
    in_features: int,
    initial_log_std: float,
    choice: ActionDistribution,
    mask_space: spaces.Space[Any] | None,
) -> nn.Module:
    kind, options = _parse(field, space, choice)
    unknown = sorted(set(options) - set(kind.options))
    known = f"of its options {', '.join(kind.options)}" if kind.options else "none, since it has no options"
    check(not unknown, f"{field}.kind={choice['kind']}" if isinstance(choice, dict) else field, unknown, known)
    options = {**kind.preset, **options}
    if "std" in kind.options:
        options["initial_log_std"] = initial_log_std
    if kind.make is AutoregressiveHead:
        options["mask_space"] = mask_space
    return kind.make(in_features, space, **options)


def _parse(field: str, space: spaces.Space[Any], choice: ActionDistribution) -> tuple[_Kind, dict[str, Any]]:
    """Return the kind and its options, after a look at the space."""
    expected = f"one of {', '.join(KINDS)}, or a mapping with one of them as 'kind' and its options"
    check(choice is None or isinstance(choice, str | dict), field, choice, expected)
    options: dict[str, Any] = {}
    name = choice
    if isinstance(choice, dict):
        options = dict(choice)
        name = options.pop("kind", None)
        check(isinstance(name, str), field, choice, expected)
    if not all(np.prod(leaf.shape or ()) for leaf in space_leaves(space).values()):
        raise ConfigurationError(f"action_space={space} is not supported: expected at least one component")
    if name is None:
        name = next((one for one in _DEFAULTS if KINDS[one].suits(space)), None)
        if name is None:
            raise ConfigurationError(
                f"action_space={space} is not supported: expected {_CHOICES[1]}, MultiBinary, a floating-point Box, or "
                "a Dict or Tuple of these"
            )
    check(is_one_of(name, KINDS), field, name, expected)
    kind = KINDS[str(name)]
    check(kind.suits(space), field, name, f"a distribution for {space}; this one is for {kind.expected}")
    return kind, options

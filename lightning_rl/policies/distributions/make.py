"""Chooses the action head of an action space."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

from gymnasium import spaces
from torch import nn

from lightning_rl.masks import MAX_INTEGER_CHOICES, ActionMask, MaskLayout, is_categorical, is_continuous
from lightning_rl.nested import join, map_paths, part_at, replace_leaves, space_leaves
from lightning_rl.options import types_of
from lightning_rl.policies.distributions.base import Initialization
from lightning_rl.policies.distributions.continuous import BetaHead, GaussianHead, SquashedGaussianHead
from lightning_rl.policies.distributions.discrete import BernoulliHead, CategoricalHead, MultiCategoricalHead
from lightning_rl.policies.distributions.joint import MAX_COMBINATIONS, AutoregressiveHead, JointHead, is_suitable
from lightning_rl.validation import ConfigurationError, check, check_type, instantiate, is_one_of, to_class_spec

ActionDistribution: TypeAlias = "str | dict[str, Any] | None"
"""Value of the option `action_distribution`, see `PolicyConfig`; also `{"class_path": …, "init_args": …}` of a head."""
_FIELD = "policy.action_distribution"
_AUTOREGRESSIVE = "autoregressive"


class _Kind(NamedTuple):
    """How to make a head, which spaces it is for, in code and in words, and presets of its options."""

    make: Callable[..., nn.Module]
    suits: Callable[[spaces.Space[Any]], bool]
    expected: str
    preset: Mapping[str, Any] = MappingProxyType({})

    @property
    def options(self) -> dict[str, Any]:
        """Types of the arguments of the head that users choose."""
        given = ("in_features", "space", "initial_log_std", "mask_space")
        types = types_of(self.make, include_extras=True)
        return {name: hint for name, hint in types.items() if name not in given}


def _is_bounded(space: spaces.Space[Any]) -> bool:
    return is_continuous(space) and space.is_bounded() and bool((space.low < space.high).all())  # type: ignore[attr-defined]


def _categorical(in_features: int, space: Any, *, initialization: Initialization = "orthogonal") -> nn.Module:
    head = CategoricalHead if isinstance(space, spaces.Discrete) else MultiCategoricalHead
    return head(in_features, space, initialization=initialization)


_CHOICES = (
    is_categorical,
    f"Discrete, MultiDiscrete, or an integer Box with at most {MAX_INTEGER_CHOICES} values in each component",
)
_COMBINED = (
    is_suitable,
    f"MultiDiscrete, MultiBinary, integer Box, and Dict and Tuple of these and Discrete, with at most "
    f"{MAX_COMBINATIONS} combinations",
)
_SWITCHES = (lambda space: isinstance(space, spaces.MultiBinary)), "MultiBinary"
_CONTINUOUS = is_continuous, "a floating-point Box"
_BOUNDED = _is_bounded, "a floating-point Box with finite bounds on every side, low below high"
_TF_AGENTS_STD = {"std_transform": "softplus", "initial_std": 0.35, "initialization": "tf_agents"}
KINDS: dict[str, _Kind] = {
    "categorical": _Kind(_categorical, *_CHOICES),
    "bernoulli": _Kind(BernoulliHead, *_SWITCHES),
    "gaussian": _Kind(GaussianHead, *_CONTINUOUS),
    "squashed_gaussian": _Kind(SquashedGaussianHead, *_BOUNDED),
    "beta": _Kind(BetaHead, *_BOUNDED),
    _AUTOREGRESSIVE: _Kind(AutoregressiveHead, *_COMBINED),
    "tf_agents_categorical": _Kind(_categorical, *_CHOICES, {"initialization": "tf_agents"}),
    "tf_agents_normal": _Kind(GaussianHead, *_BOUNDED, {"mean_transform": "tanh", **_TF_AGENTS_STD}),
    "tf_agents_squashed_normal": _Kind(SquashedGaussianHead, *_BOUNDED, _TF_AGENTS_STD),
}
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
        initial_log_std: See `PolicyConfig`; for Gaussians without the option `initial_std`.
        action_distribution: See `PolicyConfig`.
        mask_space: Space of the masks, nested as actions are. The head then takes masks as second argument.

    Raises:
        ConfigurationError: The space is not supported, or a distribution or a mask does not suit it.
    """
    masks = [] if mask_space is None else MaskLayout(space, mask_space).masks
    kind = action_distribution.get("kind") if isinstance(action_distribution, dict) else action_distribution
    if not isinstance(space, spaces.Dict | spaces.Tuple) or kind == _AUTOREGRESSIVE:
        return _make_head(_FIELD, space, in_features, initial_log_std, action_distribution, mask_space)
    parts = space_leaves(space)
    choices = action_distribution or {}
    if not isinstance(choices, dict) or not set(choices) <= set(parts):
        expected = f"a mapping from parts of the action to distributions; the parts are {', '.join(parts)}"
        raise ConfigurationError(f"{_FIELD}={choices!r} is not valid: expected {expected}")
    masked = [path for path in parts if any(mask == path or mask.startswith(join(path, "")) for mask in masks)]

    def make(path: str, part: spaces.Space[Any]) -> nn.Module:
        own_masks = _masks_of(path, mask_space) if path in masked else None
        return _make_head(f"{_FIELD}.{path}", part, in_features, initial_log_std, choices.get(path), own_masks)

    return JointHead(map_paths(make, space), list(parts), masked)


def _masks_of(path: str, mask_space: spaces.Space[Any] | None) -> spaces.Space[Any]:
    """Return the masks of a part of the action, with the names of components relative to this part."""

    def local(_: str, mask: Any) -> spaces.Space[Any]:
        return ActionMask(mask.shape, mask.given and mask.given.removeprefix(join(path, "")))

    return replace_leaves(local, part_at(mask_space, path))


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
        head: nn.Module = instantiate(field, spec, nn.Module, in_features=in_features, space=space)
    else:
        kind, options = _kind_and_options(field, space, choice)
        if "std" in kind.options:
            options["initial_log_std"] = initial_log_std
        if kind.make is AutoregressiveHead:
            options["mask_space"] = mask_space
        head = kind.make(in_features, space, **options)
    if mask_space is not None:
        is_one = isinstance(mask_space, ActionMask) and mask_space.given is None
        expected = f"{_AUTOREGRESSIVE}, since there are masks of single components or that depend on another's choice"
        check(is_one or isinstance(head, AutoregressiveHead), field, type(head).__name__, expected)
        expected = "a head whose forward takes features and a mask, since there are masks for its part of the action"
        try:
            inspect.signature(head.forward).bind("features", "mask")
        except TypeError:
            check(False, field, type(head).__name__, expected)
    return head


def _kind_and_options(field: str, space: spaces.Space[Any], choice: ActionDistribution) -> tuple[_Kind, dict[str, Any]]:
    expected = f"one of {', '.join(KINDS)}, or a mapping with one of them as 'kind' and its options"
    options = dict(choice) if isinstance(choice, dict) else {}
    name = options.pop("kind", None) if isinstance(choice, dict) else choice
    check(choice is None or isinstance(name, str), field, choice, expected)
    if name is None:
        name = next((one for one in _DEFAULTS if KINDS[one].suits(space)), None)
        if name is None:
            raise ConfigurationError(
                f"action_space={space} is not supported: expected {_CHOICES[1]}, MultiBinary, a floating-point Box, or "
                "a Dict or Tuple of these"
            )
    check(is_one_of(name, KINDS), field, name, expected)
    kind = KINDS[name]
    check(kind.suits(space), field, name, f"a distribution for {space}; this one is for {kind.expected}")
    unknown = sorted(set(options) - set(kind.options))
    check(not unknown, f"{field}.kind={name}", unknown, f"some of its options {', '.join(kind.options)}")
    for option, value in options.items():
        check_type(f"{field}.{option}", value, kind.options[option])
    return kind, {**kind.preset, **options}

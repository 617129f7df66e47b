"""Action masks: a space for masks in observations, and how masks belong to the components of an action."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces

from lightning_rl.nested import Nested, join, leaves, part_at, space_leaves
from lightning_rl.validation import ConfigurationError, check

MAX_INTEGER_CHOICES = 256
"""A component of an integer `Box` with more values than this would need too many logits."""
_CHOICES = spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary


class ActionMask(spaces.MultiBinary):
    """The space of a mask, 1 where a choice is allowed; the policy finds its masks by this class.

    Args:
        n: Shape of the mask; see `mask_shape`.
        given: Component whose choice selects the row of a conditional mask `[its choices, own choices]`.
        seed: Seed of samples.
    """

    def __init__(
        self, n: Sequence[int] | int, given: str | None = None, seed: int | np.random.Generator | None = None
    ) -> None:
        super().__init__((n,) if isinstance(n, int | np.integer) else n, seed)
        self.given = given

    def __repr__(self) -> str:
        return f"ActionMask({self.n})" if self.given is None else f"ActionMask({self.n}, given={self.given!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ActionMask) and (self.n, self.given) == (other.n, other.given)

    __hash__ = None  # type: ignore[assignment]


def num_choices(space: spaces.Space[Any]) -> list[int]:
    """Return the number of choices of every component of a leaf; a floating-point `Box` counts as one component."""
    if isinstance(space, spaces.Discrete):
        return [int(space.n)]
    if isinstance(space, spaces.MultiBinary):
        return [2] * int(np.prod(space.shape))
    if isinstance(space, spaces.MultiDiscrete):
        return [int(n) for n in space.nvec.ravel()]
    assert isinstance(space, spaces.Box)
    if is_continuous(space):
        return [int(np.prod(space.shape))]
    # Python's integers, since the difference of two bounds may overflow 64 bits.
    return [int(high) - int(low) + 1 for low, high in zip(space.low.ravel(), space.high.ravel(), strict=True)]


def is_continuous(space: spaces.Space[Any]) -> bool:
    """Whether a leaf of an action space is a floating-point `Box`."""
    return isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating)


def has_choices(space: spaces.Space[Any]) -> bool:
    """Whether a leaf of an action space is `Discrete`, `MultiDiscrete`, `MultiBinary` or an integer `Box`."""
    return isinstance(space, _CHOICES) or (isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.integer))


def is_categorical(space: spaces.Space[Any]) -> bool:
    """Whether each choice of a leaf of an action space has a logit: no switches, and no `Box` of many integers."""
    if isinstance(space, spaces.Box) and not is_continuous(space):
        return max(num_choices(space)) <= MAX_INTEGER_CHOICES
    return isinstance(space, spaces.Discrete | spaces.MultiDiscrete)


def mask_shape(space: spaces.Space[Any]) -> tuple[int, ...]:
    """Return the shape of the mask of a leaf.

    `[n]` for `Discrete`; the choices of all components, concatenated, for `MultiDiscrete` and integer `Box`;
    `[*shape, 2]` for `MultiBinary`: whether each switch may be 0, and whether it may be 1. `[a]` for a floating-point
    `Box`: whether the action has the component.
    """
    if isinstance(space, spaces.MultiBinary):
        return (*space.shape, 2)
    return (sum(num_choices(space)),)


def component_names(space: spaces.Space[Any], path: str = "") -> list[str]:
    """Return the names of the components of the leaf at `path`: `arm.0`, `arm.1`; `path` itself for `Discrete`."""
    if not has_choices(space) or isinstance(space, spaces.Discrete):
        return [path]
    return [join(path, place) for place in range(len(num_choices(space)))]


def find_masks(space: spaces.Space[Any]) -> str | None:
    """Return the path to the outermost part of an observation space that contains only masks; None without masks.

    Several such parts, one outside a `Dict`, or nothing else to observe raise a `ConfigurationError`.
    """
    paths = [path for path, leaf in space_leaves(space).items() if isinstance(leaf, ActionMask)]
    if not paths:
        return None
    keys = paths[0].split(".") if paths[0] else []
    for length in range(len(keys) + 1):
        root = ".".join(keys[:length])
        part = part_at(space, root)
        if all(isinstance(leaf, ActionMask) for leaf in space_leaves(part).values()):
            break
    in_dicts = all(isinstance(part_at(space, ".".join(keys[:i])), spaces.Dict) for i in range(length))
    if not root or not in_dicts or len(space_leaves(part)) != len(paths):
        raise ConfigurationError(
            f"observation_space={space} has action masks at {', '.join(paths) or 'its root'}: expected one part of a "
            "Dict, all others being something to observe"
        )
    return root


class _Part(NamedTuple):
    """A leaf of the masks: its path, number of dimensions, components with their choices, and where each begins."""

    path: str
    dims: int
    components: list[tuple[str, int]]
    begins: np.ndarray[Any, Any]


class MaskLayout:
    """Assigns masks to the components of an action.

    Args:
        action_space: The action space.
        mask_space: An `ActionMask`, or a nesting of masks like the action space, in which the components of a leaf may
            have separate masks by index. Components without a mask may take every choice.

    Attributes:
        masks: Masks by path.
        choices: Number of choices of each component of the action, by name.
        given: For components with a conditional mask, the component that it depends on.

    Raises:
        ConfigurationError: A mask has a wrong shape, belongs to no part, or depends on no component.
    """

    def __init__(self, action_space: spaces.Space[Any], mask_space: spaces.Space[Any]) -> None:
        self.masks: dict[str, ActionMask] = space_leaves(mask_space)  # type: ignore[assignment]
        parts = space_leaves(action_space)
        pairs = {
            path: list(zip(component_names(leaf, path), num_choices(leaf), strict=True)) for path, leaf in parts.items()
        }
        self.choices = {name: n for path in parts for name, n in pairs[path]}
        self._optional = {path for path, leaf in parts.items() if not has_choices(leaf)}
        self.given = {path: str(mask.given) for path, mask in self.masks.items() if mask.given is not None}
        self._parts = []
        for path, mask in self.masks.items():
            if path in parts and mask.given is None:
                expected, components = mask_shape(parts[path]), pairs[path]
            else:
                expected, components = self._shape_of_component(path, mask, list(parts)), [(path, self.choices[path])]
            if mask.shape != expected:
                name = f"action_mask.{path}".rstrip(".")
                raise ConfigurationError(f"{name} has the shape {mask.shape}: expected {expected}")
            begins = np.cumsum([0, *(n for _, n in components[:-1])])
            self._parts.append(_Part(path, len(expected), components, begins))
        # Components that depend on others come first: `allowed` passes their masks on to the others.
        self._links = sorted(self.given.items(), key=lambda link: -self._depth(link[0]))

    def _shape_of_component(self, path: str, mask: ActionMask, parts: list[str]) -> tuple[int, ...]:
        known = ", ".join(dict.fromkeys(filter(None, [*parts, *self.choices]))) or "the action as a whole"
        if path not in self.choices:
            raise ConfigurationError(f"action_mask: the part {path!r} has no choices to mask: expected {known}")
        if mask.given is None:
            return (self.choices[path],)
        is_other = mask.given in self.choices and mask.given != path
        check(is_other, f"action_mask.{path}: given", mask.given, f"another component: one of {known}")
        return (self.choices[mask.given], self.choices[path])

    def _depth(self, name: str) -> int:
        chain = [name]
        while (other := self.given.get(chain[-1])) is not None:
            check(other not in chain, "action_mask: given", self.given, "no component that depends on itself")
            chain.append(other)
        return len(chain) - 1

    def allowed(self, masks: Nested) -> dict[str, Any]:
        """Return the allowed choices of each masked component, `[..., n]`, or `[..., m, n]` for conditional masks.

        A choice is not allowed either if it leaves a component that depends on it without choices. `masks` are arrays
        or tensors `[..., *shape]`, nested as the mask space.
        """
        allowed: dict[str, Any] = {}
        for path, dims, components, _ in self._parts:
            x = part_at(masks, path) != 0
            if path in self.given:
                allowed[path] = x
                continue
            # Not -1, which is ambiguous without rows: a rank may have none.
            leading, begin = x.ndim - dims, 0
            flat = x.reshape(*x.shape[:leading], math.prod(x.shape[leading:]))
            for name, n in components:
                allowed[name] = flat[..., begin : begin + n]
                begin += n
        for name, other in self._links:
            has_choice = allowed[name].any(-1)
            own = allowed.get(other)
            if own is not None:
                has_choice = own & (has_choice[..., None, :] if other in self.given else has_choice)
            allowed[other] = has_choice
        return allowed

    def nothing_allowed(self, masks: Nested) -> tuple[str, np.ndarray[Any, Any]] | None:
        """Return the name of a component without allowed choices, and the rows `[...]` where; None if there is none.

        A floating-point `Box` may have no component in an action that has other parts.
        """
        if not self._links and self._all_allow_something(masks):
            return None
        nothing = {name: ~allowed.any(-1) for name, allowed in self.allowed(masks).items() if name not in self.given}
        everywhere = len(nothing) == len(self.choices) and np.logical_and.reduce([*nothing.values()])
        for name, rows in nothing.items():
            found = rows & everywhere if name in self._optional else rows
            if found.any():
                return name, found
        return None

    def _all_allow_something(self, masks: Nested) -> bool:
        """Whether every component has an allowed choice; one pass over each leaf, which is fast for many components."""
        for x, part in zip(leaves(masks), self._parts, strict=True):
            flat = x.reshape(*x.shape[: x.ndim - part.dims], -1)
            if not np.logical_or.reduceat(flat, part.begins, -1).all():
                return False
        return True

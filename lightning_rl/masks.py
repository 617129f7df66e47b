"""Which choices an action may take at a step: masks as parts of observations, and what they say of each component.

A mask that is observed is collected, stored, learned from, evaluated and resumed with like everything else that is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces

from lightning_rl.nested import Nested, join, leaves, part_at, space_leaves
from lightning_rl.validation import ConfigurationError, check

_CHOICES = spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary


class ActionMask(spaces.MultiBinary):
    """The space of masks, 1 where a choice is allowed; a policy knows from the space which observation is its mask.

    Args:
        n: Shape of the masks; see `mask_shape`.
        given: Component of the action whose choice picks the row that counts, of a mask `[its choices, own choices]`.
        seed: Of samples.
    """

    def __init__(
        self, n: Sequence[int] | int, given: str | None = None, seed: int | np.random.Generator | None = None
    ) -> None:
        super().__init__((n,) if isinstance(n, int) else n, seed)
        self.given = given

    def __repr__(self) -> str:
        """Tell it from a `MultiBinary`."""
        return f"ActionMask({self.n})" if self.given is None else f"ActionMask({self.n}, given={self.given!r})"

    def __eq__(self, other: object) -> bool:
        """Whether the other one is a space of the same masks."""
        return isinstance(other, ActionMask) and (self.n, self.given) == (other.n, other.given)

    __hash__ = None  # type: ignore[assignment]


def num_choices(space: spaces.Space[Any]) -> list[int]:
    """Return the number of choices of every component; Python's integers, since bounds may be 64 bits apart.

    Args:
        space: `Discrete`, `MultiDiscrete`, `MultiBinary`, or an integer `Box`.
    """
    if isinstance(space, spaces.Discrete):
        return [int(space.n)]
    if isinstance(space, spaces.MultiBinary):
        return [2] * int(np.prod(space.shape))
    if isinstance(space, spaces.MultiDiscrete):
        return [int(n) for n in space.nvec.ravel()]
    assert isinstance(space, spaces.Box)
    return [int(high) - int(low) + 1 for low, high in zip(space.low.ravel(), space.high.ravel(), strict=True)]


def has_choices(space: spaces.Space[Any]) -> bool:
    """Whether a leaf of an action space is made up of choices."""
    return isinstance(space, _CHOICES) or (isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.integer))


def mask_shape(space: spaces.Space[Any]) -> tuple[int, ...]:
    """Return the shape of the mask of a leaf.

    `[n]` for `Discrete`; the choices of all components, one after the other, for `MultiDiscrete` and integer `Box`;
    `[*shape, 2]` for `MultiBinary`: whether each switch may be 0, and whether it may be 1.
    """
    if isinstance(space, spaces.MultiBinary):
        return (*space.shape, 2)
    return (sum(num_choices(space)),)


def component_names(space: spaces.Space[Any], path: str = "") -> list[str]:
    """Return what the components of a leaf are called: `arm.0`, `arm.1`; the only one of a `Discrete` as the leaf."""
    if isinstance(space, spaces.Discrete):
        return [path]
    return [join(path, place) for place in range(len(num_choices(space)))]


def find_masks(space: spaces.Space[Any]) -> str | None:
    """Return the path to the masks in an observation space, the outermost part that is nothing else; None without any.

    Raises:
        ConfigurationError: There are masks in several parts, or outside of a `Dict`, or there is nothing else.
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
    expected = "one part of a Dict, all others being something to observe"
    in_dicts = all(isinstance(part_at(space, ".".join(keys[:i])), spaces.Dict) for i in range(length))
    if not root or not in_dicts or len(space_leaves(part)) != len(paths):
        where = ", ".join(paths) or "its root"
        raise ConfigurationError(f"observation_space={space} has action masks at {where}: expected {expected}")
    return root


class _Part(NamedTuple):
    """A leaf of masks: where it is, how many dimensions it has, and the components it is about with their choices."""

    path: str
    dims: int
    components: list[tuple[str, int]]


class MaskLayout:
    """How masks belong to the components of an action.

    Args:
        action_space: The masks are for.
        mask_space: An `ActionMask`, or these nested as the action space is; those of components of a leaf by their
            place, those of the entries of a `Tuple` by that too. What has no mask may do anything.

    Attributes:
        masks: The spaces of the masks by their path.
        choices: Number of choices of each component of the action that has any, by its name.
        given: Of components whose mask depends on another's choice: that other one.

    Raises:
        ConfigurationError: A mask is of another shape, is for no part with choices, or depends on no component.
    """

    def __init__(self, action_space: spaces.Space[Any], mask_space: spaces.Space[Any]) -> None:
        self.masks: dict[str, ActionMask] = space_leaves(mask_space)  # type: ignore[assignment]
        parts = {path: leaf for path, leaf in space_leaves(action_space).items() if has_choices(leaf)}
        names = {path: component_names(leaf, path) for path, leaf in parts.items()}
        counts = {path: num_choices(leaf) for path, leaf in parts.items()}
        pairs = {path: list(zip(names[path], counts[path], strict=True)) for path in parts}
        self.choices = {name: n for path in parts for name, n in pairs[path]}
        self.given = {path: str(mask.given) for path, mask in self.masks.items() if mask.given is not None}
        self._parts = []
        for path, mask in self.masks.items():
            if path in parts and mask.given is None:
                shape, components = mask_shape(parts[path]), pairs[path]
            else:
                shape, components = self._shape_of_component(path, mask, list(parts)), [(path, self.choices[path])]
            _check_shape(path, mask, shape)
            self._parts.append(_Part(path, len(shape), components))
        # Where each component begins among the entries of its mask.
        self._starts = [(part.dims, np.cumsum([0, *(n for _, n in part.components[:-1])])) for part in self._parts]
        masked = [name for part in self._parts for name, _ in part.components]
        for name in masked:
            check(masked.count(name) == 1, "action_mask", name, "one mask for each component, not one for its part too")
        # Before a component is asked whether it allows anything, those that depend on it are.
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
        """Return how many components one depends on, directly or not."""
        chain = [name]
        while (other := self.given.get(chain[-1])) is not None:
            check(other not in chain, "action_mask: given", self.given, "no component that depends on itself")
            chain.append(other)
        return len(chain) - 1

    def allowed(self, masks: Nested) -> dict[str, Any]:
        """Return which choices of each component are allowed, `[..., n]`, or `[..., m, n]` given another's choice.

        A choice after which a component that depends on it could do nothing is not allowed either. Components that
        nothing is said about are left out.

        Args:
            masks: Arrays or tensors `[..., *shape]`, nested as the space is.
        """
        allowed: dict[str, Any] = {}
        for path, dims, components in self._parts:
            x = part_at(masks, path) != 0
            if path in self.given:
                allowed[path] = x
                continue
            flat, start = x.reshape(*x.shape[: x.ndim - dims], -1), 0
            for name, n in components:
                allowed[name] = flat[..., start : start + n]
                start += n
        for name, other in self._links:
            goes_on = allowed[name].any(-1)
            own = allowed.get(other)
            if own is not None:
                goes_on = own & (goes_on[..., None, :] if other in self.given else goes_on)
            allowed[other] = goes_on
        return allowed

    def nothing_allowed(self, masks: Nested) -> tuple[str, np.ndarray[Any, Any]] | None:
        """Return a component with rows `[...]` that may do nothing, and which these are; None if there is none.

        Args:
            masks: Arrays `[..., *shape]`, nested as the space is, in its order.
        """
        if not self._links and self._all_allow_something(masks):
            return None
        for name, allowed in self.allowed(masks).items():
            if name not in self.given and not (rows := allowed.any(-1)).all():
                return name, ~rows
        return None

    def _all_allow_something(self, masks: Nested) -> bool:
        """Whether every component may do something, at the cost of one pass over each leaf."""
        for x, (dims, starts) in zip(leaves(masks), self._starts, strict=True):
            flat = x.reshape(*x.shape[: x.ndim - dims], -1)
            if not np.logical_or.reduceat(flat, starts, -1).all():
                return False
        return True


def _check_shape(path: str, mask: ActionMask, expected: tuple[int, ...]) -> None:
    if mask.shape != expected:
        name = f"action_mask.{path}".rstrip(".")
        raise ConfigurationError(f"{name} has the shape {mask.shape}: expected {expected}")


MAX_INTEGER_CHOICES = 256
"""A component of an integer `Box` with more values than this would need as many logits."""

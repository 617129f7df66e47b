"""Functions for nested observations, actions and spaces: dicts and tuples of leaves, or a single leaf."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

from gymnasium import spaces

Nested = Any
"""A leaf, or a dict or tuple of `Nested`; Python's types cannot express this for leaves of any type."""

T = TypeVar("T")
_DICTS, _TUPLES = (dict, spaces.Dict), (tuple, spaces.Tuple)


def map_leaves(function: Callable[..., T], first: Nested, *rest: Nested) -> Nested:
    """Apply `function` to every leaf of `first` and the leaves at the same place in `rest`."""
    if isinstance(first, dict):
        return {key: map_leaves(function, x, *(other[key] for other in rest)) for key, x in first.items()}
    if isinstance(first, tuple):
        return tuple(map_leaves(function, *parts) for parts in zip(first, *rest, strict=True))
    return function(first, *rest)


def leaves(x: Nested) -> list[Any]:
    """Return every leaf, in the order of keys and entries."""
    if not isinstance(x, (dict, tuple)):  # a union would take twice as long
        return [x]
    found = []
    for part in x.values() if isinstance(x, dict) else x:
        if isinstance(part, (dict, tuple)):
            found += leaves(part)
        else:
            found.append(part)
    return found


def first_leaf(x: Nested) -> Any:
    """Return the first leaf, for properties that all leaves share, such as the leading dimensions."""
    while isinstance(x, (dict, tuple)):
        x = next(iter(x.values() if isinstance(x, dict) else x))
    return x


def map_stacked(function: Callable[[list[Any]], T], xs: Sequence[Nested]) -> Nested:
    """Apply `function` to the list of leaves at each place in `xs`: `map_stacked(torch.stack, actions)`."""
    return map_leaves(lambda *parts: function(list(parts)), *xs)


def map_space(function: Callable[[spaces.Space[Any]], T], space: spaces.Space[Any]) -> Nested:
    """Apply `function` to every leaf of a space, and return a dict for a `Dict`, a tuple for a `Tuple`."""
    return map_paths(lambda _, leaf: function(leaf), space)


def replace_leaves(
    function: Callable[[str, spaces.Space[Any]], spaces.Space[Any]], space: spaces.Space[Any], path: str = ""
) -> spaces.Space[Any]:
    """Return a space with each leaf replaced by `function(path, leaf)`."""
    if isinstance(space, spaces.Dict):
        return spaces.Dict({k: replace_leaves(function, part, join(path, k)) for k, part in space.items()})
    if isinstance(space, spaces.Tuple):
        return spaces.Tuple([replace_leaves(function, part, join(path, i)) for i, part in enumerate(space)])
    return function(path, space)


def space_leaves(space: spaces.Space[Any], path: str = "") -> dict[str, spaces.Space[Any]]:
    """Return the leaves of a space by path: `{"camera": …, "arm.0": …}`; the path of a flat space is ''."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        parts = space.items() if isinstance(space, spaces.Dict) else enumerate(space)
        return {name: leaf for key, part in parts for name, leaf in space_leaves(part, join(path, key)).items()}
    return {path: space}


def map_paths(function: Callable[[str, Any], T], x: Nested, path: str = "") -> Nested:
    """Apply `function(path, leaf)` to every leaf of nested values or of a space; `x` itself is at `path`."""
    if isinstance(x, _DICTS):
        return {key: map_paths(function, part, join(path, key)) for key, part in x.items()}
    if isinstance(x, _TUPLES):
        return tuple(map_paths(function, part, join(path, index)) for index, part in enumerate(x))
    return function(path, x)


def nested_paths(x: Nested) -> Nested:
    """Return the path of every leaf of nested values or of a space, nested as these."""
    return map_paths(lambda path, _: path, x)


def part_at(x: Nested, path: str) -> Any:
    """Return the part of nested values or of a space at a path; all of it for the path ''."""
    for key in path.split(".") if path else ():
        x = x[int(key)] if isinstance(x, tuple | spaces.Tuple) else x[key]
    return x


def without(x: Nested, paths: Collection[str], path: str = "") -> Nested:
    """Return a nested dict or `Dict` space without the parts at some paths, not in tuples, and without empty dicts."""
    if not isinstance(x, _DICTS):
        return x
    parts = {k: without(part, paths, join(path, k)) for k, part in x.items() if join(path, k) not in paths}
    kept = {k: part for k, part in parts.items() if not isinstance(part, _DICTS) or len(part)}
    return kept if isinstance(x, dict) else spaces.Dict(kept)


def join(path: str, key: str | int) -> str:
    """Return the path of the part `key` of the part at `path`."""
    return f"{path}.{key}" if path else str(key)


def module_name(path: str) -> str:
    """Return a name for a submodule that belongs to a leaf; names of submodules must not contain dots."""
    return ":" + path.replace(".", ":")

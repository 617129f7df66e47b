"""Groups of options, such as `PPO(optimizer={"max_grad_norm": 1.0})`: frozen dataclasses as defaults of parameters.

The package reads options by full names, such as `optimizer.max_grad_norm`; checkpoints hold nested dicts.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, get_args, get_type_hints

from lightning_rl.validation import ConfigurationError, check, check_type, did_you_mean

Group = Any
"""An instance of a frozen dataclass."""
T = TypeVar("T")
# Evaluating annotations would take most of the time in which an algorithm is constructed.
_hints_of: Callable[..., dict[str, Any]] = functools.cache(get_type_hints)
if TYPE_CHECKING:
    OrDict: TypeAlias = T | Mapping[str, Any]
    OrClass: TypeAlias = T | Callable[..., Any]
else:

    class OrDict:
        """Type of an option that takes a group or a dict of the fields to change.

        At runtime it is the class of the group, because jsonargparse would ask for the `class_path` of a union.
        """

        def __class_getitem__(cls, group: type) -> type:
            return group

    OrClass = OrDict  # of plain data, or a class, or a `functools.partial` of one, which becomes a class path


def parameters_of(cls: type) -> Iterator[inspect.Parameter]:
    """Yield the parameters of the constructors of a class and its bases, the bases first."""
    for base in reversed(cls.__mro__):
        if base is not object and "__init__" in vars(base):
            yield from inspect.signature(base).parameters.values()


def constructor_arguments(instance: object) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments of an instance's running constructors, as given, and as passed on to the bases."""
    # On the command line, `save_hyperparameters` leaves out options that a subclass sets for its base class.
    given: dict[str, Any] = {}
    passed: dict[str, Any] = {}
    frame = inspect.currentframe()
    while frame is not None:
        names, _, keywords, values = inspect.getargvalues(frame)
        if frame.f_code.co_name == "__init__" and names and values.get(names[0]) is instance:
            own = {name: values[name] for name in names[1:]} | (values[keywords] if keywords else {})
            given, passed = given | own, own | passed
        frame = frame.f_back
    return given, passed


def defaults_of(cls: type) -> dict[str, Any]:
    """Return the default of every parameter of a class's constructor and of its bases' constructors.

    The most derived class decides. A dict as the default of a group changes single fields of the base class's default.
    """
    defaults: dict[str, Any] = {}
    for name, value in ((x.name, x.default) for x in parameters_of(cls) if x.default is not x.empty):
        before = defaults.get(name)
        is_change = is_dataclass(before) and isinstance(value, Mapping)
        defaults[name] = changed(name, before, value) if is_change else value
    return defaults


def default_groups(cls: type) -> dict[str, Group]:
    """Return the default of every group among the parameters of a class's constructor and its bases' constructors."""
    return {name: value for name, value in defaults_of(cls).items() if is_dataclass(value)}


def types_of(source: Callable[..., Any], include_extras: bool = False) -> dict[str, Any]:
    """Return the type of each option of a function or class by its full name, such as `optimizer.max_grad_norm`.

    Options of a base class are included if the constructor passes `**kwargs` on to it. `include_extras` keeps the
    ranges of options that are not in a group.
    """
    types: dict[str, Any] = {}
    for function in (
        [vars(cls)["__init__"] for cls in source.__mro__ if "__init__" in vars(cls)]
        if isinstance(source, type)
        else [source]
    ):
        parameters = list(inspect.signature(function).parameters.values())
        hints = _hints_of(function, include_extras=include_extras)
        for parameter in parameters:
            if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) and parameter.name in hints:
                types |= _leaf_types(parameter.name, hints[parameter.name])
        if all(parameter.kind != parameter.VAR_KEYWORD for parameter in parameters):
            break
    return types


def _leaf_types(name: str, hint: Any) -> dict[str, Any]:
    group = next((one for one in (hint, *get_args(hint)) if isinstance(one, type) and is_dataclass(one)), None)
    if group is None:
        return {name: hint}
    fields_of_group = _hints_of(group).items()
    return {
        key: leaf for field, inner in fields_of_group for key, leaf in _leaf_types(f"{name}.{field}", inner).items()
    }


def refuse_unknown_options(cls: type, unknown: Mapping[str, object]) -> None:
    """Raise a `ConfigurationError` with similar names, or all, for options that neither a class nor its bases have."""
    for name, value in unknown.items():
        known = defaults_of(cls)
        hint = did_you_mean(name, flat(known, default_groups(cls))) or f"; {cls.__name__} has {', '.join(known)}"
        raise ConfigurationError(f"{name}={value!r} is no option of {cls.__name__}{hint}")


def changed(name: str, group: Group, given: Any) -> Group:  # what a user gave
    """Return a group with the fields changed that a dict names; a group of the same class changes all of them.

    A group inside either may be a dict too. Anything else, unknown fields and values out of the range in the type of
    their field raise a `ConfigurationError`.
    """
    if isinstance(given, type(group)):
        given = vars(given)
    check(isinstance(given, Mapping), name, given, f"{type(group).__name__}(...) or a dict of its options")
    known = _hints_of(type(group), include_extras=True)
    changes = {}
    for key, value in given.items():
        if key not in known:
            hint = did_you_mean(str(key), known) or f"; {name} has {', '.join(known)}"
            raise ConfigurationError(f"{name}.{key}={value!r} is no option{hint}")
        current, option = getattr(group, key), f"{name}.{key}"
        check_type(option, value, known[key])
        changes[key] = changed(option, current, value) if is_dataclass(current) else value
    return replace(group, **changes)


def with_changes(stored: Mapping[str, Any], given: Mapping[str, Any], groups: Mapping[str, Group]) -> dict[str, Any]:
    """Return the given options; one that is a dict changes single options of the stored group."""
    before = {name: changed(name, groups[name], stored[name]) for name in groups.keys() & stored.keys() & given.keys()}
    return {name: changed(name, before[name], x) if name in before else x for name, x in given.items()}


def flat(options: Mapping[str, Any], groups: Mapping[str, Group]) -> dict[str, Any]:
    """Return options by their full names: `{"gamma": 0.99, "optimizer.max_grad_norm": 0.5, ...}`.

    A group among the `options` may be a dict of some fields; the others are taken from `groups`, the defaults. Unknown
    fields raise a `ConfigurationError`.
    """
    result: dict[str, Any] = {}
    for name, value in options.items():
        result |= _leaves(name, changed(name, groups[name], value), groups[name]) if name in groups else {name: value}
    return result


def _leaves(name: str, value: Any, default: Any) -> dict[str, Any]:
    if not is_dataclass(default):  # a dataclass that is the value of an option is no group
        return {name: value}
    found: dict[str, Any] = {}
    for field, inner in vars(default).items():
        found |= _leaves(f"{name}.{field}", getattr(value, field), inner)
    return found


def nested(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options by parameter of the constructor, groups as nested dicts: the inverse of `flat`."""
    result: dict[str, Any] = {}
    for name, value in options.items():
        *outer, last = name.split(".")
        place = result
        for one in outer:
            place = place.setdefault(one, {})
        place[last] = value
    return result

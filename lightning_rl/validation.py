"""Checks of what users pass: options, class paths, and the modules that loaded data may import."""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    TypeGuard,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import numpy as np

T = TypeVar("T")
_ALWAYS = ("lightning_rl", "torch", "gymnasium")
# None outside of `loading`, where the user named the classes.
_trusted: ContextVar[tuple[str, ...] | None] = ContextVar("trusted", default=None)


@contextmanager
def loading(trust: Iterable[str] = ()) -> Iterator[None]:
    """Treat class paths, modules and environment ids inside as loaded data, which may not import every module.

    Modules of `lightning_rl`, `torch`, `gymnasium` and packages in `trust`, and imported ones, may be imported.
    """
    token = _trusted.set((trust,) if isinstance(trust, str) else tuple(trust))
    try:
        yield
    finally:
        _trusted.reset(token)


def is_loading() -> bool:
    """Return whether `loading` is active."""
    return _trusted.get() is not None


def may_import(module: str) -> bool:
    """Return whether a module may be imported; outside of `loading` every module may."""
    trusted = _trusted.get()
    if trusted is None or module in sys.modules:
        return True
    # Importing `package.__main__` runs a program.
    parents = module.split(".")
    return "__main__" not in parents and any(f"{module}.".startswith(f"{name}.") for name in (*_ALWAYS, *trusted))


ClassSpec = dict[str, Any]
"""`{"class_path": "package.Class", "init_args": {...}}`, the plain-data form of a class and its arguments."""
_LARGEST = float(np.finfo(np.float32).max)


class ExplainedError(Exception):
    """An error whose message says what is wrong; the command line prints it without a traceback."""


class ConfigurationError(ExplainedError, ValueError):
    """A setting that cannot work; the message names the field, the value and the expected values."""


def check(condition: bool, field: str, value: object, expected: str) -> None:
    """Raise a `ConfigurationError` unless `condition` holds."""
    if not condition:
        raise ConfigurationError(f"{field}={value!r} is not valid: expected {expected}")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a question to end a message with, or an empty string if no known name is similar.

    Groups may be left out or come last, and words shortened to initials: `l2_policy` and `policy_l2` suggest
    `optimizer.l2.policy`, and `lr` suggests `learning_rate`.
    """
    initials: dict[str, list[str]] = {}
    endings: dict[str, list[str]] = {}
    for full in sorted(known, key=lambda full: full.count(".")):
        parts = full.lower().split(".")
        initials.setdefault("".join(word[:1] for word in parts[-1].split("_")), []).append(full)
        for start in range(len(parts)):
            for words in (parts[start:], parts[start:][::-1]):
                endings.setdefault("_".join(words), []).append(full)
    meant = {**initials, **endings}
    asked = name.lower().split(".")
    exact = [short for start in range(len(asked)) if (short := "_".join(asked[start:])) in meant][:1]
    near = exact or difflib.get_close_matches(asked[-1], endings, cutoff=0.65)
    names = [*dict.fromkeys(full for short in near for full in meant[short])][:3]
    return f"; did you mean {' or '.join(names)}?" if names else ""


def is_int(value: object) -> TypeGuard[int]:
    """Whether `value` is an integer and not a boolean."""
    return isinstance(value, int) and not isinstance(value, bool)


def whole_number(value: T) -> T | int:
    """Return a whole float such as 1e6 as an integer, and other values unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def is_list(value: object) -> TypeGuard[Sequence[Any]]:
    """Whether `value` is a sequence such as a list, and neither a string nor bytes."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def as_list(given: T | Sequence[T] | None) -> list[T]:
    """Return a list, with one value if no list was given: `--record_as video` needs no brackets."""
    return [*given] if isinstance(given, list | tuple) else [] if given is None else [given]  # type: ignore[list-item]


def is_one_of(value: object, choices: Iterable[str]) -> TypeGuard[str]:
    """Whether `value` is one of some names. A list, a dict or an array is not, and does not raise."""
    return isinstance(value, str) and value in choices


def check_bool(field: str, value: T) -> T:
    """Return `value`, or raise unless it is True or False."""
    check(isinstance(value, bool), field, value, "true or false")
    return value


def check_positive_int(field: str, value: T) -> T:
    """Return `value`, or raise unless it is an integer of at least 1 that fits into 64 bits."""
    return check_int(field, value, 1)


def check_int(field: str, value: T, at_least: float) -> T:
    """Return `value`, or raise unless it is an integer of at least `at_least` that fits into 64 bits."""
    check(is_int(value) and value >= at_least, field, value, f"an integer of at least {at_least}")
    check(is_int(value) and value < 2**63, field, value, "an integer of 64 bits")
    return value


def check_names(field: str, value: object, expected: str) -> None:
    """Raise unless `value` is a list of strings, none of them empty."""
    check(is_list(value) and all(isinstance(name, str) and name for name in value), field, value, expected)


def check_keywords(field: str, value: object) -> None:
    """Raise unless `value` is a dict whose keys are strings."""
    is_valid = isinstance(value, dict) and all(isinstance(name, str) for name in value)
    check(is_valid, field, value, "a dict of arguments")


def check_number(field: str, value: float, **bounds: float | None) -> float:
    """Return `value`, or raise unless it is a finite number in the `Range` of the bounds, and float32 can hold it."""
    is_number, limits = isinstance(value, int | float) and not isinstance(value, bool), Range(**bounds)
    check(is_number and value in limits, field, value, f"a number {limits}")
    check(abs(value) <= _LARGEST, field, value, f"a number of at most {_LARGEST:.3g}, the largest of float32")
    return value


@dataclass(frozen=True)
class Range:
    """Bounds of a number, as part of its type: `Annotated[float, Range(above=0)]`. An integer needs `at_least`."""

    above: float | None = None
    at_least: float | None = None
    at_most: float | None = None

    def __contains__(self, x: float) -> bool:
        is_above = (self.above is None or x > self.above) and (self.at_least is None or x >= self.at_least)
        is_below = self.at_most is None or x <= self.at_most
        return is_above and is_below and (isinstance(x, int) or math.isfinite(x))

    def __str__(self) -> str:
        return " and ".join(f"{name.replace('_', ' ')} {x:g}" for name, x in vars(self).items() if x is not None)


PositiveInt = Annotated[int, Range(at_least=1)]
NonNegativeInt = Annotated[int, Range(at_least=0)]
PositiveFloat = Annotated[float, Range(above=0)]
NonNegativeFloat = Annotated[float, Range(at_least=0)]
UnitFloat = Annotated[float, Range(at_least=0, at_most=1)]


def check_type(field: str, value: Any, hint: Any) -> None:
    """Raise unless `value` has a type: `bool`, a `Literal`, `Sequence[str]`, a dict with text as keys, or a number.

    Numbers are only checked if the type has a `Range`. None is valid if it is part of the type. Values of other types
    are not checked.
    """
    is_union = get_origin(hint) in (Union, UnionType)
    kinds = [kind for kind in (get_args(hint) if is_union else [hint]) if kind is not NoneType]
    is_optional = is_union and NoneType in get_args(hint)
    if len(kinds) > 1 or (is_optional and value is None):
        return
    origin, arguments = get_origin(kinds[0]), get_args(kinds[0])
    if kinds[0] is bool:
        check_bool(field, value)
    elif origin is Literal:
        expected = f"{'null or ' if is_optional else ''}one of {', '.join(arguments)}"
        check(is_one_of(value, arguments), field, value, expected)
    elif origin is Sequence and arguments == (str,):
        check_names(field, value, "a list of names")
    elif origin is dict:
        check_keywords(field, value)
    elif origin is Annotated and arguments[0] is int:
        check_int(field, value, arguments[1].at_least)
    elif origin is Annotated:
        check_number(field, value, **asdict(arguments[1]))


def make_folder(field: str, folder: str | Path) -> None:
    """Make a folder if it does not exist, or raise a `ConfigurationError` if it cannot be written."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigurationError(
            f"{field}={str(folder)!r} is not valid: expected a folder that can be written: {error.strerror}"
        ) from error


def to_class_spec(field: str, value: ClassSpec | Callable[..., Any] | str) -> ClassSpec:
    """Reduce a class, a `functools.partial` of one, a class path or a spec to plain data.

    A callable that cannot be rebuilt from its name, such as a lambda, raises a `ConfigurationError`.
    """
    if isinstance(value, str):
        return {"class_path": value, "init_args": {}}
    if isinstance(value, dict):
        check("class_path" in value, field, value, "a dict with 'class_path' and, if needed, 'init_args'")
        extra = sorted(map(str, set(value) - {"class_path", "init_args"}))
        check(not extra, field, value, f"no keys besides 'class_path' and 'init_args', got {extra}")
        class_path, init_args = value["class_path"], value.get("init_args")
        check(isinstance(class_path, str), f"{field}: class_path", class_path, "the path of a class")
        if init_args is not None:
            check_keywords(f"{field}: init_args", init_args)
        return {"class_path": class_path, "init_args": dict(init_args or {})}
    if isinstance(value, partial) and not value.args:
        return {**to_class_spec(field, value.func), "init_args": dict(value.keywords)}
    if inspect.isclass(value) and "<locals>" not in value.__qualname__:
        return {"class_path": f"{value.__module__}.{value.__qualname__}", "init_args": {}}
    raise ConfigurationError(
        f"{field}={value!r} cannot be stored in a checkpoint: expected a class, functools.partial(Class, key=value) "
        "or {'class_path': 'package.Class', 'init_args': {...}}"
    )


def to_class_specs(field: str, value: Sequence[ClassSpec | Callable[..., Any] | str] | None) -> list[ClassSpec]:
    """Apply `to_class_spec` to a list; None is an empty list."""
    check(value is None or isinstance(value, list | tuple), field, value, "a list of classes, or None")
    return [to_class_spec(field, one) for one in value or ()]


def to_plain_data(field: str, value: Any) -> Any:
    """Return `value` as numbers, strings, None, and lists and dicts of these, for checkpoints.

    Any other value raises a `ConfigurationError` with its place in `value`.
    """
    if isinstance(value, dict):
        return {str(key): to_plain_data(f"{field}.{key}", entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain_data(field, entry) for entry in value]
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ConfigurationError(
        f"{field}={value!r} cannot be stored in a checkpoint: expected numbers, strings, or lists or dicts of them"
    )


def check_module(field: str, value: object, module: str) -> None:
    """Raise a `ConfigurationError` unless a module, named by the `value` of an option, may be imported."""
    if not may_import(module):
        package = module.partition(".")[0]
        raise ConfigurationError(
            f"{field}={value!r} names the module {module!r}, which loaded data may not import: expected one of "
            f"lightning_rl, torch, gymnasium or a module that you trust; to trust it, import it before, or give "
            f"trust=[{package!r}], or --trust {package} to export and push"
        )


def import_class(field: str, class_path: str, base: type[Any] | tuple[type[Any], ...]) -> type[Any]:
    """Import the class that a dotted path names, a subclass of (one of) `base`; nothing is constructed.

    A class that cannot be imported, has another base class or is not trusted raises a `ConfigurationError`.
    """
    module, _, name = class_path.rpartition(".")
    if module:
        check_module(field, class_path, module)
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        near = difflib.get_close_matches(name, dir(sys.modules[module]), 1) if module in sys.modules else []
        moved = "if the class was moved, its new path, or its own load_from_checkpoint to load a checkpoint"
        hint = f"did you mean {module}.{near[0]}?" if near else moved
        raise ConfigurationError(
            f"{field}={class_path!r} cannot be imported ({error}): expected package.module.Class in the current folder "
            f"or in PYTHONPATH; {hint}"
        ) from error
    check(inspect.isclass(found), field, class_path, "the path of a class")
    names = " or ".join(one.__name__ for one in (base if isinstance(base, tuple) else (base,)))
    check(issubclass(found, base), field, class_path, f"a subclass of {names}")
    return found  # type: ignore[no-any-return]


def check_arguments(field: str, spec: ClassSpec, base: type[Any], *given: str) -> None:
    """Raise a `ConfigurationError` unless the subclass of `base` takes its `init_args` and the arguments `given`."""
    cls = import_class(field, spec["class_path"], base)
    try:
        inspect.signature(cls).bind(**dict.fromkeys(given), **spec["init_args"])
    except TypeError as error:
        raise _refused(field, spec, error) from error


def _refused(field: str, spec: ClassSpec, error: BaseException) -> ConfigurationError:
    kind = "" if isinstance(error, TypeError | ValueError) else f"{type(error).__name__}: "
    return ConfigurationError(
        f"{field}: {spec['class_path']} refused the arguments {spec['init_args']!r}: {kind}{error}"
    )


def instantiate(
    field: str, spec: ClassSpec, base: type[Any] | tuple[type[Any], ...], /, *args: object, **kwargs: object
) -> Any:
    """Call the class of `spec`, a subclass of `base`, with `args`, `kwargs` and the `init_args` of the spec.

    A class that cannot be imported, has another base or refuses its arguments raises a `ConfigurationError`.
    """
    cls = import_class(field, spec["class_path"], base)
    try:
        return cls(*args, **kwargs, **_with_tuples(cls, spec["init_args"]))
    except Exception as error:
        raise _refused(field, spec, error) from error


def _with_tuples(cls: type[Any], init_args: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments with tuples in place of lists, as YAML has them, where a constructor takes tuples."""
    hints: dict[str, Any] = {}
    with suppress(NameError, TypeError):  # of annotations that only type checkers can read
        hints = get_type_hints(cls.__init__)
    kinds = {name: {get_origin(kind) or kind for kind in (hint, *get_args(hint))} for name, hint in hints.items()}
    takes_tuple = {name for name, found in kinds.items() if tuple in found and list not in found}
    return {name: tuple(x) if isinstance(x, list) and name in takes_tuple else x for name, x in init_args.items()}


def how_to_install(extra: str) -> str:
    """Return the commands that install an extra, with the package and in a checkout, to end a message with."""
    constraints = "" if extra == "robotics" else "-c constraints.txt "  # robotics needs an older MuJoCo
    quote = '"' if os.name == "nt" else "'"  # `cmd` of Windows knows no single quotes
    package, checkout = (f"{quote}{name}[{extra}]{quote}" for name in ("lightning-rl", "."))
    return f"pip install {package}, in a checkout pip install {constraints}-e {checkout}"


def check_installed(what: str, extra: str, *packages: str) -> None:
    """Raise a `ConfigurationError` with the command that installs an extra if a package is missing."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise ConfigurationError(f"{what} needs {package}, which is not installed: {how_to_install(extra)}")


if TYPE_CHECKING:
    class_only = classmethod
else:

    class class_only(classmethod):
        """A class method that is refused on an instance, which it would leave unchanged."""

        def __get__(self, instance: object, owner: type | None = None) -> Callable[..., Any]:
            def refused(*_: object, **__: object) -> None:
                call = f"{type(instance).__name__}.{self.__name__}"
                raise ConfigurationError(f"{self.__name__} returns a new object: expected {call}(...), on the class")

            return super().__get__(None, owner) if instance is None else refused


FROM_COMMAND_LINE = ("_class_path", "_instantiator")
"""Hyper-parameters that LightningCLI adds: the class, and the function that constructs it."""


def constructor_options(cls: type[Any], hyper_parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the stored hyper-parameters that the constructor of a class takes, without `FROM_COMMAND_LINE`."""
    parameters = inspect.signature(cls).parameters
    takes_all = any(x.kind is inspect.Parameter.VAR_KEYWORD for x in parameters.values())
    stored = {name: x for name, x in hyper_parameters.items() if name not in FROM_COMMAND_LINE}
    return {name: x for name, x in stored.items() if takes_all or name in parameters}

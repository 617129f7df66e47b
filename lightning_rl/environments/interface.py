"""What environments return, held to Gymnasium's interface and to their own spaces."""

from __future__ import annotations

import contextlib
import re
import reprlib
import traceback
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from lightning_rl.nested import Nested, map_leaves, nested_paths, space_leaves

Array = np.ndarray[Any, Any]

_EXPECTED = {
    "reset": "reset(*, seed=None, options=None) that returns two values, (observation, info)",
    "step": "step(action) that returns five values, (observation, reward, terminated, truncated, info)",
}
_UNPACKED = re.compile(r"values to unpack|cannot unpack")
_NO_KEYWORD = re.compile(r"reset\(\) got an unexpected keyword argument '(seed|options)'")
# Those who take apart what an environment returns.
_CALLERS = tuple(Path(file).parent for file in (__file__, gymnasium.__file__))


class Unexpected(Exception):
    """What an environment returned is not what its interface, or its space, says; the message says what it is."""


def older_interface(method: str, name: str, why: object) -> str:
    """Say that an environment does not have the interface that is expected of it.

    Args:
        method: `reset` or `step`.
        name: Of the environment.
        why: How that was found out.
    """
    return (
        f"does not have the interface of Gymnasium 0.26 and later ({why}): expected of {name} a {_EXPECTED[method]}; "
        "the package shimmy wraps environments of older versions"
    )


def tells_of_older_interface(error: BaseException) -> bool:
    """Whether an error comes from calling an environment, or from taking apart what it returned, as of today."""
    if isinstance(error, TypeError) and _NO_KEYWORD.search(str(error)):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    return (
        isinstance(error, TypeError | ValueError)
        and bool(_UNPACKED.search(str(error)))
        and any(Path(frames[-1].filename).is_relative_to(folder) for folder in _CALLERS)
    )


def to_number(reward: Any) -> float:  # noqa: ANN401 - whatever an environment returns
    """Return a reward as a Python number.

    Raises:
        Unexpected: It is none, or more than one.
    """
    with contextlib.suppress(TypeError, ValueError):
        if not isinstance(reward, str | bytes) and np.ndim(reward) == 0:
            return float(reward)
    raise Unexpected(f"returned reward {reward!r}: expected a number")


def to_flag(name: str, flag: Any) -> bool:  # noqa: ANN401
    """Return `terminated` or `truncated` as Python's boolean.

    Raises:
        Unexpected: It is no boolean, and no number 0 or 1, nor an array or tensor of such a one.
    """
    with contextlib.suppress(TypeError, ValueError, RuntimeError):
        plain = np.asarray(flag)
        if plain.size == 1 and plain.item() in (0, 1):
            return bool(plain.item())
    raise Unexpected(f"returned {name} {reprlib.repr(flag)}: expected True or False")


def check_info(info: Any) -> None:  # noqa: ANN401
    """Raise `Unexpected` if `info` is no dict."""
    if not isinstance(info, dict):
        raise Unexpected(f"returned info {reprlib.repr(info)}: expected a dict")


class ObservationForm:
    """The structure, shapes and types that observations of a space have.

    Args:
        space: Of one environment.

    Attributes:
        paths: Of the leaves, nested as observations are.
        leaves: Their spaces by path.
    """

    def __init__(self, space: spaces.Space[Any]) -> None:
        self.paths = nested_paths(space)
        self.leaves = space_leaves(space)
        self._space = space

    def fit(self, observation: Any) -> Nested:  # noqa: ANN401
        """Return an observation in this form.

        Args:
            observation: Whatever an environment returned.

        Returns:
            Its leaves; those of a type that not every backend would take are converted to the type of their space.
            Floating-point numbers of another width, which all take, are left as they are.

        Raises:
            Unexpected: The structure, or the shape of a leaf, is another; or a leaf has no numbers, or such as lose by
                becoming what their space has.
        """
        try:
            return map_leaves(self._fit_leaf, self.paths, observation)
        except (LookupError, TypeError, ValueError) as error:
            raise Unexpected(
                f"returned an observation of another structure than its space has ({type(error).__name__}: {error}): "
                f"expected one in {self._space}"
            ) from None

    def _fit_leaf(self, path: str, x: Any) -> Any:  # noqa: ANN401
        name, space = f"an observation {path}".rstrip(), self.leaves[path]
        try:
            given = np.asarray(x)
        except ValueError:  # rows of different lengths
            raise Unexpected(f"returned {name} of shape unknown: expected {space.shape}") from None
        except (TypeError, RuntimeError) as error:  # a tensor of a GPU, or one with a gradient
            raise Unexpected(f"returned {name} that is no array ({type(error).__name__}: {error})") from None
        if given.shape != space.shape:
            raise Unexpected(f"returned {name} of shape {given.shape}: expected {space.shape}")
        wanted: Any = space.dtype
        if given.dtype == wanted or (given.dtype.kind == "f" and wanted.kind == "f"):
            return x
        try:
            return stored(given, wanted)
        except Unexpected as error:
            raise Unexpected(f"returned {name} {error}") from None


def stored(given: Array, dtype: np.dtype[Any]) -> Array:
    """Return numbers as those of another type.

    Raises:
        Unexpected: They are no numbers, or are integers or bits of `dtype` only with a loss. What floating-point
            numbers round is none.
    """
    no_numbers = Unexpected(f"of {given.dtype}: expected {dtype}")
    if given.dtype.kind not in "biufO":
        raise no_numbers
    try:
        with np.errstate(invalid="ignore"):  # NaN, which is none of the integers
            result: Array = given.astype(dtype)
    except (TypeError, ValueError, OverflowError):  # of objects
        raise no_numbers from None
    if dtype.kind in "biu" and not np.array_equal(result, given):
        raise Unexpected(f"of {given.dtype}, which loses by becoming {dtype}: expected {dtype}")
    return result


def misfit(space: spaces.Space[Any], x: Any) -> tuple[str, bool] | None:  # noqa: ANN401 - whatever was observed
    """Say which number of an observation is outside of the bounds of its leaf's space, None if none is.

    Returns:
        What is wrong, and whether that cannot be learned from. Numbers outside of a `Box` can.
    """
    low, high = _bounds(space)
    if low is None:
        return None
    rounded = np.asarray(x).astype(space.dtype)
    outside = np.argwhere((rounded < low) | (rounded > high))
    if not len(outside):
        return None
    place = tuple(int(i) for i in outside[0])
    entry = f" (entry {', '.join(map(str, place))})" if place else ""
    bounds = [np.broadcast_to(bound, rounded.shape)[place] for bound in (low, high)]
    return f"{entry} {rounded[place]}: expected {bounds[0]} to {bounds[1]}".strip(), not isinstance(space, spaces.Box)


def _bounds(space: spaces.Space[Any]) -> tuple[Any, Any]:
    """Return the least and the largest that each entry can be; None of other spaces."""
    if isinstance(space, spaces.Box):
        return space.low, space.high
    if isinstance(space, spaces.Discrete):
        return space.start, space.start + space.n - 1
    if isinstance(space, spaces.MultiDiscrete):
        return space.start, space.start + space.nvec - 1
    return (0, 1) if isinstance(space, spaces.MultiBinary) else (None, None)

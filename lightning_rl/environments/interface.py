"""What environments return, held to Gymnasium's interface and to their own spaces where that costs nothing."""

from __future__ import annotations

import re
import traceback
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

_EXPECTED = {
    "reset": "reset(*, seed=None, options=None) that returns two values, (observation, info)",
    "step": "step(action) that returns five values, (observation, reward, terminated, truncated, info)",
}
_UNPACKED = re.compile(r"values to unpack|cannot unpack")
_NO_KEYWORD = re.compile(r"reset\(\) got an unexpected keyword argument '(seed|options)'")
# Those who take apart what an environment returns.
_CALLERS = tuple(Path(file).parent for file in (__file__, gymnasium.__file__))


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


def tells_of_older_interface(error: Exception) -> bool:
    """Whether an error comes from calling an environment, or from taking apart what it returned, as of today."""
    if isinstance(error, TypeError) and _NO_KEYWORD.search(str(error)):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    return (
        isinstance(error, TypeError | ValueError)
        and bool(_UNPACKED.search(str(error)))
        and any(Path(frames[-1].filename).is_relative_to(folder) for folder in _CALLERS)
    )


def misfit(space: spaces.Space[Any], x: Any) -> tuple[str, bool] | None:  # noqa: ANN401 - whatever was observed
    """Say what of an observation does not fit the space of its leaf, None if nothing.

    Returns:
        What is wrong, and whether that cannot be learned from. Numbers outside of a `Box` can.
    """
    given = np.asarray(x)
    low, high = _bounds(space)
    if low is None or given.dtype.kind not in "biuf":
        return None
    with np.errstate(invalid="ignore"):  # NaN, which has an error of its own
        stored = given.astype(space.dtype)
    if stored.dtype.kind in "iu" and not np.array_equal(stored, given):
        return f"of {given.dtype}, which loses by becoming {stored.dtype}: expected {stored.dtype}", True
    outside = np.argwhere((stored < low) | (stored > high))
    if not len(outside):
        return None
    place = tuple(int(i) for i in outside[0])
    entry = f" (entry {', '.join(map(str, place))})" if place else ""
    bounds = [np.broadcast_to(bound, stored.shape)[place] for bound in (low, high)]
    return f"{entry} {stored[place]}: expected {bounds[0]} to {bounds[1]}".strip(), not isinstance(space, spaces.Box)


def _bounds(space: spaces.Space[Any]) -> tuple[Any, Any]:
    """Return the least and the largest that each entry can be; None of other spaces."""
    if isinstance(space, spaces.Box):
        return space.low, space.high
    if isinstance(space, spaces.Discrete):
        return space.start, space.start + space.n - 1
    if isinstance(space, spaces.MultiDiscrete):
        return space.start, space.start + space.nvec - 1
    return (0, 1) if isinstance(space, spaces.MultiBinary) else (None, None)

"""Looking for NaN and infinity at next to no cost."""

from __future__ import annotations

from typing import Any

import numpy as np

_LARGEST = float(np.finfo(np.float32).max)
# A sum of squares below this has no term that float32 could not hold.
_SAFE_SQUARES = 1e76


def surely_finite(x: np.ndarray[Any, Any]) -> bool:
    """Whether every entry is certainly finite: one product; False for NaN, infinity and all that is very large."""
    return float(np.vdot(x, x)) < _SAFE_SQUARES


def first_not_finite(x: np.ndarray[Any, Any]) -> tuple[int, ...] | None:
    """Return the place of the first entry that float32 cannot hold as a finite number, None if there is none."""
    places = np.argwhere(~(np.abs(x) <= _LARGEST))
    return tuple(int(i) for i in places[0]) if len(places) else None


def complaint(what: str, x: np.ndarray[Any, Any]) -> str | None:
    """Say what is wrong with an observation or reward that float32 cannot hold as finite numbers, None if nothing."""
    if surely_finite(x) or (bad := first_not_finite(x)) is None:
        return None
    entry = f" (entry {', '.join(map(str, bad))})" if bad else ""
    return f"returned {what}{entry} {x[bad]}: expected a finite number that float32 can hold"

"""Looking for NaN and infinity at next to no cost."""

from __future__ import annotations

from typing import Any

import numpy as np

_LARGEST = float(np.finfo(np.float32).max)
# A sum of squares below this has no term that float32 could not hold.
_SAFE_SQUARES = 1e76


def surely_finite(x: np.ndarray[Any, Any]) -> bool:
    """Whether every entry is certainly finite: one product; False for NaN, infinity and all that is very large."""
    flat = x.ravel()
    return float(np.dot(flat, flat)) < _SAFE_SQUARES


def first_not_finite(x: np.ndarray[Any, Any]) -> tuple[int, ...] | None:
    """Return the place of the first entry that float32 cannot hold as a finite number, None if there is none."""
    places = np.argwhere(~(np.abs(x) <= _LARGEST))
    return tuple(int(i) for i in places[0]) if len(places) else None

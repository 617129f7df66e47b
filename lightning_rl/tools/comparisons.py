"""Comparisons of final scores `[N, M]` of runs and environments, as in `rliable` (Agarwal et al. 2021)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from lightning_rl.validation import check

Array = np.ndarray[Any, Any]
RESAMPLES = 2000


def performance_profile(scores: Array, thresholds: Array) -> Array:
    """Return the share of runs, `[K]`, with a score above each of the `thresholds`, `[K]` (section 4.2)."""
    return np.asarray((scores[..., None] > thresholds).mean((0, 1)))


def probability_of_improvement(scores: Array, others: Array) -> Array:
    """Return the probability that a run of the first algorithm beats one of the second, averaged over environments.

    This is the Mann-Whitney statistic of scores `[N, M]` and `[L, M]`, in which ties count half.
    """
    differences = scores[:, None] - others[None]
    return np.asarray(((differences > 0) + 0.5 * (differences == 0)).mean())


def interquartile_mean(scores: Array) -> Array:
    """Return the mean of the middle half of the scores of all runs and environments (section 4.3)."""
    ordered = np.sort(scores, axis=None)
    trim = ordered.size // 4
    return np.asarray(ordered[trim : ordered.size - trim].mean())


def interval(
    statistic: Callable[..., Array], *scores: Array, confidence: float = 0.95, resamples: int = RESAMPLES
) -> tuple[Array, Array]:
    """Return the percentile bootstrap interval of a statistic of one or more algorithms' scores, `[N, M]` each.

    The bootstrap is stratified: in each environment, runs are drawn with replacement. The seed is fixed.
    """
    check(0 < confidence < 1, "confidence", confidence, "a number between 0 and 1")
    random = np.random.RandomState(0)  # rliable draws with this generator
    drawn = []
    for _ in range(resamples):
        rows = [np.asarray(random.choice(len(one), one.shape)) for one in scores]
        drawn.append(statistic(*(np.take_along_axis(one, row, 0) for one, row in zip(scores, rows, strict=True))))
    low, high = np.quantile(drawn, [(1 - confidence) / 2, (1 + confidence) / 2], axis=0)
    return low, high


def min_max_normalized(scores: dict[str, Array]) -> dict[str, Array]:
    """Return scores `[N, M]` in which the lowest of all algorithms is 0 and the highest 1, in each environment."""
    together = np.concatenate(list(scores.values()))
    low, high = together.min(0), together.max(0)
    span = np.where(high > low, high - low, 1.0)
    return {name: (one - low) / span for name, one in scores.items()}

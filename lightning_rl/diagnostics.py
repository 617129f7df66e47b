"""What is recorded while one rollout is learned from, without waiting for the device."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


class Diagnostics:
    """Scalars of the updates from one rollout, and whether updates still go on.

    Everything stays on the device: sums of the recorded terms, and a flag that gates each step of the optimiser. The
    host reads them once per rollout.

    Args:
        device: Of the parameters.
    """

    def __init__(self, device: torch.device) -> None:
        self.open = torch.ones((), dtype=torch.bool, device=device)
        """Whether further updates are made: false from the first loss or gradient that is not finite, or an early
        stop, on."""
        self.num_updates = torch.zeros((), dtype=torch.int64, device=device)
        """Number of updates that were made."""
        self.observed: set[str] = set()
        """Names of the terms that describe an update but take no part in it."""
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}

    def add(self, **terms: Tensor) -> None:
        """Record scalar terms of one minibatch that make up the update; their mean over minibatches is reported."""
        for name, term in terms.items():
            # In bfloat16 a sum over minibatches would soon stop growing.
            term = term.detach().to(torch.promote_types(term.dtype, torch.float32))
            self._sums[name] = self._sums[name] + term if name in self._sums else term
            self._counts[name] = self._counts.get(name, 0) + 1

    def observe(self, **terms: Tensor) -> None:
        """Record terms that may be NaN or infinite without harm to the parameters."""
        self.observed.update(terms)
        self.add(**terms)

    def observe_first(self, name: str, term: Callable[[], Tensor]) -> None:
        """Observe a scalar once, at the first call for this rollout."""
        if name not in self._sums:
            self.observe(**{name: term()})

    def close_unless(self, condition: Tensor) -> None:
        """Make no further update from this rollout if `condition` is false."""
        self.open = self.open & condition

    @property
    def known_closed(self) -> bool:
        """Whether it is certain, without waiting for the device, that no further update will be made."""
        return self.open.device.type == "cpu" and not self.open

    def means(self) -> dict[str, float]:
        """Return the mean of every term: the one point at which the host waits for the device."""
        if not self._sums:
            return {}
        values = torch.stack(list(self._sums.values())).tolist()
        return {name: value / self._counts[name] for name, value in zip(self._sums, values, strict=True)}

    def not_finite(self, means: dict[str, float]) -> dict[str, float]:
        """Return those of the means that no update may come from."""
        return {n: x for n, x in means.items() if not math.isfinite(x) and n not in self.observed}

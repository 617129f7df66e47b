"""What is recorded while one rollout is learned from, without waiting for the device."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from lightning_rl.distributed import average

T = TypeVar("T")


class UpdateRecord:
    """Scalars of the updates from one rollout, and whether updates still go on.

    Everything stays on the device: the recorded terms, and a flag that decides about each step of the optimizer. The
    host reads them once per rollout.

    Args:
        device: Of the parameters.
    """

    def __init__(self, device: torch.device) -> None:
        self.is_open = torch.ones((), dtype=torch.bool, device=device)
        """Whether further updates are made: false from the first loss or gradient that is not finite, or an early
        stop, on."""
        self.finite = self.is_open
        """Whether every loss and gradient has been finite: false for good, where an early stop ends one phase."""
        self.num_updates = torch.zeros((), dtype=torch.int64, device=device)
        """Number of updates that were made."""
        self.observed: set[str] = set()
        """Names of the terms that describe an update but take no part in it."""
        # Each with whether the minibatch that recorded it was still to be learned from.
        self._terms: dict[str, list[tuple[Tensor, Tensor]]] = {}
        # Likewise, but several terms at a time, by their names.
        self._together: dict[tuple[str, ...], list[tuple[Tensor, Tensor]]] = {}
        # And terms of which the sum of absolute values is wanted.
        self._absolute: dict[str, list[tuple[Tensor, Tensor]]] = {}
        self._counts = self.is_open
        self._prefix = ""

    def next_minibatch(self) -> None:
        """Begin a minibatch: what it records counts if updates still go on; where the device knows better, too."""
        self._counts = self.is_open

    def add(self, **terms: Tensor | float) -> None:
        """Record scalar terms of one minibatch that make up the update; their mean over minibatches is reported."""
        for name, term in self._named(terms).items():
            if not isinstance(term, Tensor):
                term = torch.tensor(float(term), device=self.is_open.device)
            elif term.requires_grad:
                term = term.detach()
            self._terms.setdefault(name, []).append((term, self._counts))

    def add_together(self, names: Sequence[str], terms: Tensor, observed: Collection[str] = ()) -> None:
        """Record terms of one minibatch as `add` does, which are one vector.

        Args:
            names: Of the terms.
            terms: `[len(names)]`, without gradient.
            observed: Those of the names that `observe` would be for.
        """
        self.observed.update(self._prefix + name for name in observed)
        key = tuple(self._prefix + name for name in names) if self._prefix else tuple(names)
        self._together.setdefault(key, []).append((terms, self._counts))

    def add_absolute(self, name: str, terms: Tensor) -> None:
        """Record the sum of the absolute values that terms of one minibatch, `[M]`, have on average over ranks.

        Ranks talk to each other about all minibatches at once, in `means`.
        """
        self._absolute.setdefault(self._prefix + name, []).append((terms.detach(), self._counts))

    def observe(self, **terms: Tensor | float) -> None:
        """Record terms that may be NaN or infinite without harm to the parameters."""
        self.observed.update(self._named(terms))
        self.add(**terms)

    def _named(self, terms: dict[str, T]) -> dict[str, T]:
        return {self._prefix + name: term for name, term in terms.items()} if self._prefix else terms

    def stop_unless(self, condition: Tensor) -> None:
        """Make no further update from this rollout if `condition` is false."""
        self.is_open = self.is_open & condition

    def stop_all_phases_unless(self, finite: Tensor) -> None:
        """Make no further update from this rollout in any phase if `finite` is false."""
        no_early_stop = self.is_open is self.finite
        self.finite = self.finite & finite
        self.is_open = self.finite if no_early_stop else self.is_open & finite

    def set_state(self, is_open: Tensor, finite: Tensor, num_updates: Tensor) -> None:
        """Set what a whole step has made of these."""
        self.is_open, self.finite, self.num_updates = is_open, finite, num_updates

    def start_phase(self, prefix: str) -> None:
        """Begin another phase of updates, whose terms are named with a prefix of its own.

        An early stop ended only the phase before, what was not finite ends this one too.
        """
        self.is_open = self._counts = self.finite
        self._prefix = prefix

    @property
    def stopped(self) -> bool:
        """Whether it is certain, without waiting for the device, that no further update will be made."""
        return self.is_open.device.type == "cpu" and not self.is_open

    def means(self) -> dict[str, float]:
        """Return the mean of every term: the one point at which the host waits for the device.

        With several ranks it is a collective call.
        """
        recorded = self._recorded()
        if not recorded:
            return {}
        # By identity: minibatches between which nothing happened share one. What was recorded keeps them alive.
        flags = {id(flag): flag for _, _, some in recorded for flag in some}
        blocks = [terms.flatten() for _, terms, _ in recorded]
        blocks.append(torch.stack([*flags.values()]).to(blocks[0].dtype))
        told = torch.cat(blocks).cpu().numpy().astype(np.float64)
        *values, are_open = np.split(told, np.cumsum([len(block) for block in blocks[:-1]]))
        is_open = dict(zip(flags, are_open != 0, strict=True))
        totals: dict[str, tuple[float, float]] = {}
        for (names, _, some), of_names in zip(recorded, values, strict=True):
            counted = np.array([is_open[id(flag)] for flag in some])
            sums = of_names.reshape(len(some), len(names))[counted].sum(0)
            for name, total in zip(names, sums.tolist(), strict=True):
                before = totals.get(name, (0.0, 0.0))
                totals[name] = before[0] + total, before[1] + float(counted.sum())
        return {name: total / count for name, (total, count) in totals.items() if count}

    def _recorded(self) -> list[tuple[Sequence[str], Tensor, list[Tensor]]]:
        """Return names, values `[minibatches, names]` or `[minibatches]`, and the flag of each minibatch."""
        # First several together, for what they say of the loss comes before its gradient.
        single = (((name,), some) for name, some in (self._terms | self._absolute_sums()).items())
        return [
            (names, _at_least_float32(torch.stack([terms for terms, _ in some])), [flag for _, flag in some])
            for names, some in (*self._together.items(), *single)
        ]

    def _absolute_sums(self) -> dict[str, list[tuple[Tensor, Tensor]]]:
        """Return, as single terms, what `add_absolute` has recorded."""
        if not self._absolute:
            return {}
        minibatches = [terms for entries in self._absolute.values() for terms, _ in entries]
        values = average(_at_least_float32(torch.cat(minibatches))).abs()
        places = torch.repeat_interleave(torch.tensor([len(terms) for terms in minibatches])).to(values.device)
        sums = iter(values.new_zeros(len(minibatches)).index_add_(0, places, values).unbind())
        return {name: [(next(sums), flag) for _, flag in entries] for name, entries in self._absolute.items()}

    def not_finite(self, means: dict[str, float]) -> dict[str, float]:
        """Return those of the means that no update may come from."""
        return {n: x for n, x in means.items() if not math.isfinite(x) and n not in self.observed}


def _at_least_float32(terms: Tensor) -> Tensor:
    """Return terms in a precision in which a sum over minibatches does not soon stop growing, as in bfloat16."""
    return terms.to(torch.promote_types(terms.dtype, torch.float32))

"""The loss over a minibatch: named terms with one number per row, and what is observed beside them."""

from __future__ import annotations

import functools
import operator
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from lightning_rl import functional as rl
from lightning_rl.policies.normalization import ValueNormalizer
from lightning_rl.rollouts.batch import Batch
from lightning_rl.training.parameter_groups import ActorOrCritic


class Loss:
    """A weighted sum of named terms over a minibatch, as an algorithm adds them up.

    The algorithm gives one number per row. The means are over the rows of all ranks that count: masks, step weights
    and the padding of sequences are dealt with here, as are the units of the value head.

    Args:
        batch: The minibatch; terms may also be over another one.
        value_normalizer: In whose units the value head predicts returns; None: in those of the rewards.
        part: The half of the network that is learned, so that there are its terms alone; None: both.
        scale: Factor of all terms in the sum; they are recorded without it.

    Attributes:
        batch: The minibatch.
        terms: The terms of the sum, each with its weight.
        metrics: What is recorded of the terms, by name, without gradient; none of it may be infinite or NaN.
        observed: Further numbers that are recorded; these may be.
        first_log_ratios: Logarithms of the importance ratios, `[N]`; None where there are none.
        limits: Names of observed numbers that end the updates from this rollout if their mean over all ranks is larger
            than the limit, and these limits.
        has_value: Whether `add_value` was called.
    """

    def __init__(
        self,
        batch: Batch,
        value_normalizer: ValueNormalizer | None = None,
        part: ActorOrCritic | None = None,
        scale: float = 1.0,
    ) -> None:
        self.batch = batch
        self.value_normalizer = value_normalizer
        self.part = part
        self.scale = scale
        self.terms: list[Tensor] = []
        self.metrics: dict[str, Tensor] = {}
        self.observed: dict[str, Tensor] = {}
        self.first_log_ratios: Tensor | None = None
        self.limits: dict[str, float] = {}
        self.has_value = False
        self._total: Tensor | None = None

    @property
    def total(self) -> Tensor:
        """The sum of all terms, a scalar with a graph: what is minimized; no term can be added any more.

        Raises:
            ValueError: There is no term.
        """
        if self._total is None:  # not a cached property, whose lock PyTorch's compiler cannot trace
            if not self.terms:
                raise ValueError("the loss has no term: expected a call of loss.add or loss.add_value")
            self._total = functools.reduce(operator.add, self.terms)
        return self._total

    def add(self, name: str, rows: Tensor, weight: Tensor | float = 1.0, batch: Batch | None = None) -> None:
        """Add a term: the mean of `rows`, times `weight`.

        Args:
            name: What the mean is recorded by; a second term of the same name is added to the first.
            rows: One number per row, `[N]`.
            weight: Factor of the mean in the sum.
            batch: Whose rows they are; None: those of the minibatch.

        Raises:
            ValueError: There is not one number per row.
        """
        if self.part != "critic":
            mean = self._mean(name, rows, batch)
            self._record(name, mean)
            self._sum(mean, weight)

    def add_entropy(self, entropies: Mapping[str, Tensor], coef: Tensor | float, batch: Batch | None = None) -> None:
        """Subtract the mean entropy, times `coef`, and record it and that of each part of the actions.

        A coefficient of 0 leaves it out of the sum: the entropy of actions that are impossible has no gradient.

        Args:
            entropies: Of each row, `[N]`, by path of the part of the action: `distribution.entropies()`.
            coef: Its coefficient.
            batch: Whose rows they are; None: those of the minibatch.
        """
        if self.part != "critic":
            means = {path: self._rows(batch).mean(x) for path, x in entropies.items()}
            total = functools.reduce(operator.add, means.values())
            self._record("entropy", total)
            for path, mean in means.items():
                if path:
                    name = f"entropy.{path}"
                    self.observed[name] = self.observed.get(name, 0) + mean.detach()
            if isinstance(coef, Tensor) or coef:
                self._sum(total, -coef)

    def add_value(
        self,
        values: Tensor,
        weight: Tensor | float = 1.0,
        *,
        name: str = "value_loss",
        returns: Tensor | None = None,
        clip_range: float | None = None,
        huber_delta: float | None = None,
        batch: Batch | None = None,
    ) -> None:
        """Add a value loss, in the units of the value head: ½(V - return)², or Huber's.

        Args:
            values: By the current critic, `[N]`.
            weight: Factor of the mean in the sum.
            name: What it is recorded by.
            returns: To be predicted, `[N]`; None: those of the batch.
            clip_range: Bound on the change of the value since the rollout, whose loss is taken where it is larger;
                None: none.
            huber_delta: Errors above this count on a line; None: all squared.
            batch: Whose rows they are; None: those of the minibatch.
        """
        self.has_value = True
        if self.part == "actor":
            return
        rows = self._rows(batch)
        values, returns, old_values = self.normalized(values, rows.returns if returns is None else returns, rows.values)
        mean = rows.mean(_value_rows(values, returns, old_values, clip_range, huber_delta))
        self._record(name, mean)
        self._sum(mean, weight)

    def normalized(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Return values and returns, of any shape, in the units of the value head."""
        normalizer = self.value_normalizer
        return values if normalizer is None else tuple(normalizer(value) for value in values)

    def add_scalar(self, name: str | None, value: Tensor, weight: Tensor | float = 1.0) -> None:
        """Add a term that is no mean over rows, such as a penalty on a mean.

        Args:
            name: What it is recorded by; None: it is not.
            value: A scalar, the same on every rank.
            weight: Its factor in the sum.
        """
        if self.part != "critic":
            if name is not None:
                self._record(name, value)
            self._sum(value, weight)

    def add_penalty(self, name: str, value: Tensor) -> None:
        """Add a penalty on parameters, a scalar, which is there whatever half of the network is learned."""
        self._record(name, value)
        self.terms.append(value)

    def log_ratios(self, log_probs: Tensor) -> Tensor:
        """Return the logarithms of the importance ratios, `[N]`; those of a rollout's first minibatch are watched.

        There the policy that learns is the one that acted: `first_ratio_error` is 0 but for rounding.
        """
        log_ratios = log_probs - self.batch.log_probs
        self.watch_ratios(log_ratios)
        return log_ratios

    def watch_ratios(self, log_ratios: Tensor) -> None:
        """Have the distance of importance ratios from 1 recorded if this is the first minibatch of a rollout."""
        if self.part != "critic":
            self.first_log_ratios = log_ratios.detach()

    def observe(self, *, batch: Batch | None = None, **rows: Tensor) -> None:
        """Record the means of numbers that describe an update but take no part in it, `[N]` each, or scalars."""
        if self.part != "critic":
            with torch.no_grad():
                for name, x in rows.items():
                    self.observed[name] = self._mean(name, x, batch) if x.dim() else x.detach()

    def stop_above(self, name: str, limit: float) -> None:
        """Make no further update from this rollout if an observed mean, over all ranks, is above a limit.

        Raises:
            ValueError: Nothing of that name is observed.
        """
        if self.part != "critic":
            if name not in self.observed:
                raise ValueError(f"stop_above: {name!r} is not observed: expected one of {', '.join(self.observed)}")
            self.limits[name] = limit

    def recorded(self) -> tuple[tuple[str, ...], Tensor, Collection[str]]:
        """Return names and values of all that is recorded, and those of the names that may be NaN or infinite."""
        everything = self.metrics | {"loss": self.total.detach()} | self.observed
        return tuple(everything), torch.stack([*everything.values()]), self.observed

    def _mean(self, name: str, rows: Tensor, batch: Batch | None) -> Tensor:
        own = self._rows(batch)
        if rows.shape != (len(own),):
            raise ValueError(
                f"{name}: rows have the shape {tuple(rows.shape)}: expected ({len(own)},), one number per row of the "
                "batch; add_scalar takes what is no mean over rows"
            )
        return own.mean(rows)

    def _rows(self, batch: Batch | None) -> Batch:
        return self.batch if batch is None else batch

    def _record(self, name: str, value: Tensor) -> None:
        known = self.metrics.get(name)
        self.metrics[name] = value.detach() if known is None else known + value.detach()

    def _sum(self, value: Tensor, weight: Tensor | float) -> None:
        for factor in (weight, self.scale):
            if isinstance(factor, Tensor) or factor != 1:  # a factor of 1 is a kernel for nothing
                value = factor * value
        self.terms.append(value)


def _value_rows(
    values: Tensor, returns: Tensor, old_values: Tensor, clip_range: float | None, huber_delta: float | None
) -> Tensor:
    """Return the value loss of each row; for the arguments see `Loss.add_value`."""

    def error(predictions: Tensor) -> Tensor:
        if huber_delta is None:
            return rl.value_loss(predictions, returns)
        return rl.huber_value_loss(predictions, returns, huber_delta)

    losses = error(values)
    if clip_range is None:
        return losses
    change = (values - old_values).clamp(-clip_range, clip_range)
    return torch.maximum(losses, error(old_values + change))

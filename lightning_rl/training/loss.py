"""The loss of a minibatch: named terms with one number per row, and further numbers to log."""

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
    """A weighted sum of named terms over a minibatch.

    Each term has one number per row, `[N]`. `Loss` takes the mean over the rows of all ranks; it applies masks, step
    weights, sequence padding and the units of the value head. Methods with a `batch` argument accept rows of another
    batch. In all methods `name` is the recorded name, and `weight` the factor of a mean in the sum.

    Args:
        batch: The minibatch.
        value_normalizer: Defines the units of the value head. None: units of the rewards.
        part: Keep only the terms of this half of the network. None: both.

    Attributes:
        scale: Factor of all terms added from now on. Recorded terms do not include it.
        terms: Weighted terms of the sum.
        metrics: Recorded terms by name, without gradient; must be finite.
        observed: Further recorded numbers; may be NaN or infinite.
        first_log_ratios: Log-ratios `[N]` for `first_ratio_error`, or None.
        limits: Maximum mean over all ranks of observed numbers, by name. A larger mean stops the updates.
        has_value: Whether `add_value` was called.
    """

    def __init__(
        self, batch: Batch, value_normalizer: ValueNormalizer | None = None, part: ActorOrCritic | None = None
    ) -> None:
        self.batch = batch
        self.value_normalizer = value_normalizer
        self.part = part
        self.scale = 1.0
        self.terms: list[Tensor] = []
        self.metrics: dict[str, Tensor] = {}
        self.observed: dict[str, Tensor] = {}
        self.first_log_ratios: Tensor | None = None
        self.limits: dict[str, float] = {}
        self.has_value = False

    @property
    def total(self) -> Tensor:
        """The sum of all terms so far, a scalar to minimize; raises a `ValueError` if there is none."""
        if not self.terms:
            expected = "a call of loss.add or loss.add_value"
            if self.part == "critic":
                expected = "a call of loss.add_value, since optimizer.num_value_epochs or critic_warmup_steps trains "
                expected += "the critic alone"
            raise ValueError(f"the loss has no term: expected {expected}")
        return functools.reduce(operator.add, self.terms)

    def add(self, name: str, rows: Tensor, weight: Tensor | float = 1.0, batch: Batch | None = None) -> None:
        """Add the mean of `rows` `[N]` times `weight`; terms with the same name are added up.

        Raises a `ValueError` if `rows` does not have one number per row.
        """
        if self.part != "critic":
            mean = self._rows(batch).mean(rows, name)
            self._record(name, mean)
            self._sum(mean, weight)

    def add_entropy(
        self, entropies: Mapping[str, Tensor] | Tensor, coef: Tensor | float, batch: Batch | None = None
    ) -> None:
        """Subtract the mean entropy times `coef`, and record the entropy and its parts.

        `entropies` is the result of `distribution.entropies()`, `[N]` by part of the action, or of
        `distribution.entropy()`. With `coef` 0 the sum does not contain the entropy.
        """
        if self.part != "critic":
            parts = {"": entropies} if isinstance(entropies, Tensor) else entropies
            means = {path: self._rows(batch).mean(x, "entropy") for path, x in parts.items()}
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
        """Add the value loss ½(V - return)², or the Huber loss, in units of the value head.

        Args:
            values: Values of the current critic, `[N]`.
            weight: Factor of the mean in the sum.
            name: Recorded name.
            returns: Value targets, `[N]`. None: `batch.returns`.
            clip_range: Clip the change of the value since the rollout, and take the larger of both losses.
            huber_delta: Errors above this count linearly. None: all errors are squared.
            batch: Batch of the rows. None: the minibatch.
        """
        self.has_value = True
        if self.part == "actor":
            return
        rows = self._rows(batch)
        values, returns = self.normalized(values, rows.returns if returns is None else returns)
        if clip_range is None:
            losses = rl.value_loss(values, returns, huber_delta)
        else:
            (old_values,) = self.normalized(rows.values)
            losses = rl.clipped_value_loss(values, returns, old_values, clip_range, huber_delta)
        mean = rows.mean(losses, name)
        self._record(name, mean)
        self._sum(mean, weight)

    def normalized(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Return values or returns of any shape in units of the value head."""
        normalizer = self.value_normalizer
        return values if normalizer is None else tuple(normalizer(value) for value in values)

    def add_scalar(self, name: str | None, value: Tensor, weight: Tensor | float = 1.0) -> None:
        """Add a term that is not a mean over rows, such as a penalty on a mean; a scalar that is equal on all ranks.

        Without a name it is not recorded.
        """
        if self.part != "critic":
            if name is not None:
                self._record(name, value)
            self._sum(value, weight)

    def add_penalty(self, name: str, value: Tensor) -> None:
        """Add a penalty on parameters, a scalar, whatever `part` is."""
        self._record(name, value)
        self.terms.append(value)

    def log_ratios(self, log_probs: Tensor) -> Tensor:
        """Return the log importance ratios `[N]`, and check the ratios of a rollout's first minibatch.

        The first minibatch is learned by the policy that acted, so `first_ratio_error` must be 0 up to rounding.
        """
        log_ratios = log_probs - self.batch.log_probs
        self.watch_ratios(log_ratios)
        return log_ratios

    def watch_ratios(self, log_ratios: Tensor) -> None:
        """Record the distance of the importance ratios from 1, in the first minibatch of a rollout only."""
        if self.part != "critic":
            self.first_log_ratios = log_ratios.detach()

    def observe(self, *, batch: Batch | None = None, **rows: Tensor) -> None:
        """Record scalars, or means over rows `[N]`, that are not part of the sum."""
        if self.part != "critic":
            with torch.no_grad():
                for name, x in rows.items():
                    self.observed[name] = self._rows(batch).mean(x, name) if x.dim() else x.detach()

    def stop_above(self, name: str, limit: float) -> None:
        """Stop the updates from this rollout if an observed mean over all ranks exceeds a limit."""
        if self.part != "critic":
            if name not in self.observed and name not in self.metrics:
                raise ValueError(f"stop_above({name!r}): expected a name that was observed or added before")
            self.limits[name] = limit

    @property
    def recorded(self) -> tuple[tuple[str, ...], Tensor, Collection[str]]:
        """Names and values of all recorded numbers, and the names of those that may be NaN or infinite."""
        everything = self.metrics | {"loss": self.total.detach()} | self.observed
        return tuple(everything), torch.stack([*everything.values()]), tuple(self.observed)

    def _rows(self, batch: Batch | None) -> Batch:
        return self.batch if batch is None else batch

    def _record(self, name: str, value: Tensor) -> None:
        known = self.metrics.get(name)
        self.metrics[name] = value.detach() if known is None else known + value.detach()

    def _sum(self, value: Tensor, weight: Tensor | float) -> None:
        for factor in (weight, self.scale):
            if isinstance(factor, Tensor) or factor != 1:  # skip a useless kernel
                value = factor * value
        if value.dim():
            found = tuple(value.shape)
            raise ValueError(f"a term of the loss has the shape {found}: expected a scalar; add takes a number per row")
        self.terms.append(value)

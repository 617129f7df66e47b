"""A critic that predicts returns in units of their running deviation, so that its targets have a size that is known.

Outside of the value head everything stays in units of return: values are collected, bootstrapped from and logged as
they would be without. Like those of observations the moments are frozen while a rollout is collected and learned from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from lightning_rl.distributed import Reduce
from lightning_rl.normalization import RunningMoments
from lightning_rl.validation import check, is_one_of

ValueNormalization = Literal["running_std", "popart"]


class ValueNormalizer(nn.Module):
    """The value head predicts returns over their running deviation; nothing is subtracted, as DI-engine's `value_norm`.

    When the deviation changes, so does what the head is taken to mean.

    Args:
        epsilon: Added to the variance.
    """

    def __init__(self, epsilon: float = 1e-8) -> None:
        super().__init__()
        self.moments = RunningMoments()
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """Return differences of values or returns, of any shape, in units of the head: as they are before any data."""
        return x * self.moments.scale(self.epsilon).to(x.dtype)

    def denormalize(self, outputs: Tensor) -> Tensor:
        """Return outputs of the head, of any shape, in units of return and at least float32."""
        outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        return outputs / self.moments.scale(self.epsilon).to(outputs.dtype)

    def update(self, returns: Tensor, heads: Sequence[nn.Linear], reduce: Reduce) -> None:
        """Take in returns `[N]`, now that they have been learned from; each of `heads` predicts such."""
        self.moments.update(returns, reduce)


class PopArt(ValueNormalizer):
    """The head predicts returns less their running mean, over their deviation (van Hasselt et al. 2016).

    When the moments change, its weights are rescaled such that every value stays what it was. The moments are those of
    all returns so far, in place of the paper's moving averages.
    """

    def denormalize(self, outputs: Tensor) -> Tensor:
        """Return outputs of the head, of any shape, in units of return and at least float32."""
        values = super().denormalize(outputs)
        return values + self.moments.mean.to(values.dtype)

    @torch.no_grad()
    def update(self, returns: Tensor, heads: Sequence[nn.Linear], reduce: Reduce) -> None:
        """Take in returns `[N]`, and rescale `heads`."""
        mean, deviation = self.moments.mean.clone(), 1 / self.moments.scale(self.epsilon)
        super().update(returns, heads, reduce)
        scale = self.moments.scale(self.epsilon)
        for head in heads:
            bias = (head.bias.to(mean.dtype) * deviation + mean - self.moments.mean) * scale
            head.weight.copy_(head.weight.to(mean.dtype) * deviation * scale)
            head.bias.copy_(bias)


def make_value_normalizer(kind: ValueNormalization | None) -> ValueNormalizer | None:
    """Return the normaliser of that name; None for None.

    Raises:
        ConfigurationError: There is none.
    """
    kinds = get_args(ValueNormalization)
    check(kind is None or is_one_of(kind, kinds), "value_normalization", kind, "null or one of " + ", ".join(kinds))
    if kind is None:
        return None
    return PopArt() if kind == "popart" else ValueNormalizer()

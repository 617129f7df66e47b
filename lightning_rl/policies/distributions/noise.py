"""The noise that samples are made of."""

from __future__ import annotations

import torch
from torch import Tensor


def fill_log_exponential(x: Tensor, generator: torch.Generator | None) -> Tensor:
    """Fill `x` with log E, E ~ Exp(1): the negative of Gumbel's distribution."""
    return x.exponential_(generator=generator).log_()


def fill_normal(x: Tensor, generator: torch.Generator | None) -> Tensor:
    """Fill `x` with standard normal numbers."""
    return x.normal_(generator=generator)


def fill_uniform(x: Tensor, generator: torch.Generator | None) -> Tensor:
    """Fill `x` with numbers between 0 and 1, 1 excluded."""
    return x.uniform_(generator=generator)

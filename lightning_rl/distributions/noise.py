"""The noise of samples, drawn for many steps at once where it is known that many come."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

MOST_AHEAD = 2**16
"""Numbers that are drawn at once; of more of them, drawing takes longer than starting to draw."""


class BlockGenerator(torch.Generator):
    """A generator that draws the noise of several steps together within `drawn_ahead`, and as any other does elsewhere.

    For the actions of a few environments, starting to draw takes several times as long as drawing.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        super().__init__()  # the device is for `__new__`
        self.steps = 0
        # Of each kind, shape and dtype what is left, the next last.
        self._left: dict[Any, list[Tensor]] = {}

    def draw(self, fill: Callable[[Tensor, torch.Generator], Tensor], like: Tensor) -> Tensor:
        """Return a tensor like another one, filled with noise that nobody has been given.

        Args:
            fill: Fills a tensor in place with independent numbers, and returns it.
            like: Of the same shape, dtype and device.
        """
        key = fill, like.shape, like.dtype
        rows = self._left.get(key)
        if not rows:
            steps = max(1, min(self.steps, MOST_AHEAD // max(1, like.numel())))
            rows = self._left[key] = [*fill(like.new_empty(steps, *like.shape), self).unbind()][::-1]
        return rows.pop()

    def forget(self) -> None:
        """Drop what was drawn ahead, so that the state of the generator is all there is to go on from."""
        self.steps = 0
        self._left.clear()


@contextlib.contextmanager
def drawn_ahead(generator: torch.Generator, steps: int) -> Iterator[None]:
    """Let a `BlockGenerator` draw the noise of `steps` steps together in here; another one draws as ever.

    What has not been used at the end is dropped: a run that is resumed there draws the same.
    """
    if not isinstance(generator, BlockGenerator):
        yield
        return
    generator.steps = steps
    try:
        yield
    finally:
        generator.forget()


def noise_like(
    like: Tensor, generator: torch.Generator | None, fill: Callable[[Tensor, torch.Generator | None], Tensor]
) -> Tensor:
    """Return noise in the shape, dtype and place of a tensor.

    Args:
        like: A tensor.
        generator: Draws it; None: PyTorch's own.
        fill: Fills a tensor in place with independent numbers, and returns it.
    """
    if isinstance(generator, BlockGenerator) and generator.steps:
        return generator.draw(fill, like)
    return fill(torch.empty_like(like), generator)


def fill_log_exponential(x: Tensor, generator: torch.Generator | None) -> Tensor:
    """Fill `x` with log E, E ~ Exp(1): the negative of Gumbel's distribution."""
    return x.exponential_(generator=generator).log_()


def fill_normal(x: Tensor, generator: torch.Generator | None) -> Tensor:
    """Fill `x` with standard normal numbers."""
    return x.normal_(generator=generator)


def fill_uniform(x: Tensor, generator: torch.Generator | None) -> Tensor:
    """Fill `x` with numbers between 0 and 1, 1 excluded."""
    return x.uniform_(generator=generator)

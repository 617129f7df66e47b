"""What the steps of a rollout give one by one."""

from __future__ import annotations

from collections.abc import Callable
from operator import setitem
from typing import Any

import torch
from torch import Tensor

from lightning_rl.fast_layers import numpy_sees
from lightning_rl.nested import Nested, map_leaves


class StepStorage:
    """Memory for what the steps of a rollout give one by one, allocated at the first of them.

    Small tensors that are kept one by one would come to lie between the images that an encoder makes and forgets at
    each step, and hold the heap in pieces.

    Args:
        length: Number of steps `T`.

    Attributes:
        whole: `[T, B, ...]`, nested as what was put in; None where nothing was.
    """

    def __init__(self, length: int) -> None:
        self.whole: Nested | None = None
        self._length = length
        self._store: Nested = None

    def put(self, t: int, x: Nested) -> None:
        """Store `x`, `[B, ...]`, without gradient, as what step `t` gave."""
        if self.whole is None:
            with torch.inference_mode(False):  # the rollout outlives the mode
                self.whole = map_leaves(lambda leaf: leaf.new_empty(self._length, *leaf.shape), x)
                self._store = map_leaves(_storing, self.whole)
        if isinstance(x, Tensor):  # not nested: no detour in every step
            self._store(t, x)
        else:
            map_leaves(lambda store, leaf: store(t, leaf), self._store, x)


def _storing(whole: Tensor) -> Callable[[int, Tensor], Any]:
    """Return what stores a row: NumPy, whose way to do so is half as long, where it can."""
    if numpy_sees(whole):
        array: Any = whole.numpy()
        return lambda t, x: setitem(array, t, x.numpy())
    rows = whole.unbind()
    return lambda t, x: rows[t].copy_(x)

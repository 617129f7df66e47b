"""What the steps of a rollout give one by one."""

from __future__ import annotations

import torch
from torch import Tensor

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

    def put(self, t: int, x: Nested) -> None:
        """Store `x`, `[B, ...]`, without gradient, as what step `t` gave."""
        if self.whole is None:
            with torch.inference_mode(False):  # the rollout outlives the mode
                self.whole = map_leaves(lambda leaf: leaf.new_empty(self._length, *leaf.shape), x)
        if isinstance(self.whole, Tensor):  # not nested, as most actions are
            self.whole[t].copy_(x)
        else:
            map_leaves(lambda whole, leaf: whole[t].copy_(leaf), self.whole, x)

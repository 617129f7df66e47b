"""The bounds of a `Box` as tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor


class Bounds:
    """Bounds of the components of a `Box`, flattened to `[a]`, in any dtype and on any device.

    No buffers: a module in bfloat16 would round them.

    Args:
        space: The box.

    Attributes:
        low: Lowest values, float64.
        high: Highest values, float64.
        log_volume: Logarithm of the volume of the box.
    """

    def __init__(self, space: spaces.Box) -> None:
        self.low = space.low.astype(np.float64).ravel()
        self.high = space.high.astype(np.float64).ravel()
        with np.errstate(divide="ignore"):
            self.log_volume = float(np.log(self.high - self.low).sum())
        self._tensors: dict[tuple[torch.device, torch.dtype], tuple[Tensor, ...]] = {}

    @property
    def any_finite(self) -> bool:
        """Whether some component is bounded on some side."""
        return bool(np.isfinite(self.low).any() or np.isfinite(self.high).any())

    def from_unit(self, x: Tensor) -> Tensor:
        """Map [-1, 1] to the bounds, shape `[..., a]`."""
        _, _, center, half_width = self._on(x)
        return center + half_width * x

    def outside(self, x: Tensor) -> Tensor:
        """Return where components lie outside the bounds, shape `[..., a]`."""
        low, high, _, _ = self._on(x)
        return (x < low) | (x > high)

    def _on(self, x: Tensor) -> tuple[Tensor, ...]:
        key = (x.device, x.dtype)
        if key not in self._tensors:
            # Halves first: their sum and difference may be too large for the dtype, or infinite minus infinite.
            with np.errstate(invalid="ignore"):
                arrays = (self.low, self.high, self.high / 2 + self.low / 2, self.high / 2 - self.low / 2)
            with torch.inference_mode(False):  # made while acting, used while learning
                self._tensors[key] = tuple(torch.as_tensor(array, dtype=x.dtype, device=x.device) for array in arrays)
        return self._tensors[key]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_tensors": {}}  # copies may live elsewhere

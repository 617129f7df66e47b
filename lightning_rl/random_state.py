"""Random generators of a process as plain data."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def _uses_cuda() -> bool:
    # Asking for the generators would initialise CUDA in a process that computes on the CPU.
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def random_state() -> dict[str, Any]:
    """Return the states of the generators of Python, NumPy and torch, as tensors and plain values."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, list(words), gauss],
        "numpy": [kind, [int(key) for key in keys], int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if _uses_cuda() else [],
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Take over what `random_state` returned; generators of devices that are missing here are left out."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.asarray(keys, np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([one.cpu() for one in state["cuda"]])

"""Bounded memories of earlier steps, on the CPU and in the dtypes of the rollouts."""

from __future__ import annotations

from lightning_rl.rollouts.replay.base import Fields, Layout, Replay, drop_unless_alike
from lightning_rl.rollouts.replay.phase_memory import RolloutMemory
from lightning_rl.rollouts.replay.row_buffer import UseLimitedBuffer
from lightning_rl.rollouts.replay.unroll_memory import ReplayPolicy, UnrollMemory, layout_of_unrolls

__all__ = [
    "Fields",
    "Layout",
    "Replay",
    "ReplayPolicy",
    "RolloutMemory",
    "UnrollMemory",
    "UseLimitedBuffer",
    "drop_unless_alike",
    "layout_of_unrolls",
]

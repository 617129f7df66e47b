"""Bounded memories of what was collected, kept on the CPU: rows come to the device by the minibatch.

Everything is stored once, in the type it came with, so that images stay bytes.
"""

from lightning_rl.replay.base import Fields, Layout, Replay, drop_unless_alike
from lightning_rl.replay.rollouts import RolloutMemory
from lightning_rl.replay.rows import UseLimitedBuffer
from lightning_rl.replay.unrolls import ReplayPolicy, UnrollMemory, layout_of_unrolls

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

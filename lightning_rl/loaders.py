"""The loader of data that do not exist before they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class OnDemandLoader(Generic[T]):
    """A loader that makes each batch at the moment when the Trainer asks for it.

    It has a length because Lightning fetches one batch ahead from a loader that has none: each rollout would be
    collected with the parameters from before the last update.

    Args:
        make_batch: Called for each batch.
        length: Number of batches.
    """

    def __init__(self, make_batch: Callable[[], T], length: int) -> None:
        self.make_batch = make_batch
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[T]:
        for _ in range(self.length):
            yield self.make_batch()

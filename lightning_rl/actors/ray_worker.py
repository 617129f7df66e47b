"""What an actor does in a process that Ray has started, on this machine or another."""

from __future__ import annotations

import os
import platform
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_only  # type: ignore[attr-defined]
from numpy.typing import NDArray
from torch import nn

from lightning_rl.actors.transport import PackedRollout, pack
from lightning_rl.actors.weights import move_into_one_block
from lightning_rl.actors.worker import ActorSetup, Failure
from lightning_rl.policy_interface import Policy
from lightning_rl.sampler import Sampler


class RayWorker:
    """Environments and a copy of the policy, in a process of Ray's.

    It makes its environments at the first rollout that it is asked for, and seeds them by the number of that: whoever
    takes the place of one that died was never asked for the same rollout, so it plays other episodes.

    Args:
        setup: What actors are told.
        actor: Which one this is.
        policy: On the CPU.
        num_threads: That networks may use.
    """

    def __init__(self, setup: ActorSetup, actor: int, policy: nn.Module, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        if actor > 0:  # all would say the same
            rank_zero_only.rank = actor  # type: ignore[attr-defined]
        self._setup, self._actor = setup, actor
        self._policy = policy.requires_grad_(False)
        self._weights: NDArray[np.uint8] = move_into_one_block(self._policy).numpy()
        self._sampler: Sampler | None = None

    def join(self) -> str:
        """Say where this actor is: that it is there."""
        return f"process {os.getpid()} on {platform.node()}"

    def collect(self, number: int, weights: NDArray[np.uint8], version: int) -> PackedRollout | Failure:
        """Collect a rollout; what ends an actor is returned, since not every exception can be sent.

        Args:
            number: Of all that this actor and those before it were asked for; none is asked for twice.
            weights: To act with, in memory that may not be written.
            version: Number of updates they have seen.
        """
        try:
            if self._sampler is None:
                self._sampler = self._setup.start_sampler(self._policy, self._setup.seed_of(self._actor, number))
            self._weights[:] = weights
            rollout = self._sampler.collect(cast(Policy, self._policy), version)
            return _as_array(pack(rollout, self._actor, share=False))
        except Exception as error:
            return Failure.of(self._actor, error)


def _as_array(packed: PackedRollout) -> PackedRollout:
    """Make the block what Ray writes into its store without copying it first."""
    as_array: Any = np.frombuffer(cast(bytearray, packed.block), np.uint8)
    return replace(packed, block=as_array)

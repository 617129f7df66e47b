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
from lightning_rl.policies.interface import Policy
from lightning_rl.sampler import Sampler


class RayWorker:
    """Environments and a copy of the policy, in a process of Ray's.

    It makes its environments at the first rollout that it is asked for, and seeds them by the number of that: whoever
    takes the place of one that died was never asked for the same rollout, so it plays other episodes.
    The policy comes when it joins, since Ray keeps no objects for processes that it may start later.

    Args:
        setup: What actors are told.
        actor: Which one this is.
        num_threads: That networks may use.
    """

    def __init__(self, setup: ActorSetup, actor: int, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        if actor > 0:  # all would say the same
            rank_zero_only.rank = actor  # type: ignore[attr-defined]
        self._setup, self._actor = setup, actor
        self._policy: nn.Module | None = None
        self._weights: NDArray[np.uint8] = np.zeros(0, np.uint8)
        self._sampler: Sampler | None = None

    def join(self, policy: nn.Module) -> str:
        """Take over the policy, and say where this actor is.

        Args:
            policy: On the CPU.
        """
        self._policy = policy.requires_grad_(False)
        self._weights = move_into_one_block(policy).numpy()
        return f"process {os.getpid()} on {platform.node()}"

    def collect(self, number: int, weights: NDArray[np.uint8], version: int) -> PackedRollout | Failure | None:
        """Collect a rollout; what ends an actor is returned, since not every exception can be sent.

        None is returned where another process was meant, whose place this one has taken without having joined yet.

        Args:
            number: Of all that this actor and those before it were asked for; none is asked for twice.
            weights: To act with, in memory that may not be written.
            version: Number of updates they have seen.
        """
        if self._policy is None:
            return None
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

"""Options of asynchronous actors, and what actors of every kind share: seeds, policy lag, and sending of rollouts."""

from __future__ import annotations

import copy
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_only  # type: ignore[attr-defined]
from torch import Tensor, nn

from lightning_rl.data.collector import Sampler
from lightning_rl.environments import Backend
from lightning_rl.environments.contract import ACTORS, Failure, closed_on_failure, derive_seed
from lightning_rl.environments.workers import to_shared_memory
from lightning_rl.nested import map_leaves
from lightning_rl.options import OrDict
from lightning_rl.rollouts.rollout import Rollout
from lightning_rl.validation import NonNegativeInt, PositiveFloat, PositiveInt, check, check_installed

# Seconds after which the learner, while it waits, checks its actors again.
POLL_SECONDS = 0.5
# Smaller tensors go through the pipe: shared memory costs a connection for each tensor.
_MAX_IN_PIPE = 2**18
StartMethod = Literal["fork", "spawn"]
ActorBackend = Literal["processes", "ray"]


@dataclass(frozen=True)
class ActorConfig:
    """Options of asynchronous actors.

    Args:
        count: Number of asynchronous actors on each rank. Each is a process with `num_envs` environments and a copy of
            the policy, which collects while the learner trains. Rollouts are then from earlier versions of the policy,
            and the algorithm must correct for this policy lag. With 0 the learner collects, and runs are reproducible.
        prefetch: Maximum number of rollouts per actor that are ready or in progress. None is 2 with several processes,
            so that no actor idles while the learner trains on another actor's rollout, else 1.
        start_method: How processes are started: `fork` or `spawn`. None is `fork` where it is Python's default.
        timeout: Maximum seconds for one rollout, including the start of the actor. An actor that takes longer counts
            as hung and ends the run.
        max_policy_lag: Maximum policy lag of a rollout, in updates. Older rollouts are dropped and counted as
            `rollout/dropped`. None sets no limit.
        backend: `processes` runs actors on this machine. `ray` runs them on any machine of a Ray cluster; they start
            when the cluster has room and are replaced when they die (counted as `rollout/actors_lost`).
        resources: Ray resources of each actor. None is `{CPU: 1}`. Networks use as many threads as CPUs.
        ray_address: Address of the Ray cluster for `ray.init`. None uses the cluster that Ray finds, or starts one on
            this machine. Ignored if this process has a Ray session already.
    """

    count: NonNegativeInt = 0
    prefetch: PositiveInt | None = None
    start_method: StartMethod | None = None
    timeout: PositiveFloat = 300.0
    max_policy_lag: NonNegativeInt | None = None
    backend: ActorBackend = "processes"
    resources: dict[str, float] | None = None
    ray_address: str | None = None

    def check(self, environments: Backend) -> None:
        if self.backend == "ray":
            check_installed("actors.backend='ray'", "ray", "ray")
            expected = "None with actors.backend='ray', which starts processes in its own way"
            check(self.start_method is None, "actors.start_method", self.start_method, expected)
        else:
            for name in ("resources", "ray_address"):
                value = getattr(self, name)
                check(value is None, f"actors.{name}", value, "None, but with actors.backend='ray'")
        if not self.count:
            for default in fields(self):
                given = getattr(self, default.name)
                expected = f"{default.default} where actors.count is 0"
                check(given == default.default, f"actors.{default.name}", given, expected)
            return
        expected = "sync, native or envpool beside actors.count: an actor is a process that steps its own environments"
        check(environments not in ("async", "torch"), "backend", environments, expected)

    @property
    def rollouts_ahead(self) -> int:
        """`prefetch` or its default; 1 with Ray, where a second request would fix the weights one rollout earlier."""
        return self.prefetch or (2 if self.count > 1 and self.backend == "processes" else 1)


ActorOptions = OrDict[ActorConfig]


class Actors(ABC):
    """Asynchronous actors: they receive policies from the learner, and return rollouts when one is ready.

    `version` is the version of the policy that they start with. Each request for a rollout has the current settings of
    the environments, see `RolloutDataModule.set_env_settings`.
    """

    def __init__(self, options: ActorConfig, setup: ActorSetup, version: int) -> None:
        self.options, self.setup, self._version = options, setup, version

    @abstractmethod
    def send_policy(self, policy: nn.Module, version: int) -> None:
        """Send a policy to the actors for their next rollouts; raise an `EnvironmentFailure` if one has ended."""

    @abstractmethod
    def receive(self) -> Rollout | None:
        """Wait up to `POLL_SECONDS` for a rollout; None if there is none yet.

        An actor that failed, died or hung, and was not replaced, raises an `EnvironmentFailure`.
        """

    @abstractmethod
    def close(self) -> None:
        """End the actors; may be called twice."""

    def publish(self, policy: nn.Module, version: int) -> None:
        """Send a policy to the actors if its version is a new one."""
        if version != self._version:
            self.send_policy(policy, version)
            self._version = version

    def next_rollout(self, while_waiting: Callable[[], None] = lambda: None) -> Rollout:
        """Wait for a rollout that is recent enough; it includes the failures and losses of those that were dropped.

        `while_waiting` is called twice a second, and its exceptions end the wait.
        """
        begin, dropped, lost, failures = time.perf_counter(), 0, 0, list[str]()
        max_lag = self.options.max_policy_lag
        while True:
            if (rollout := self.receive()) is None:
                while_waiting()
                continue
            failures += rollout.failures or []
            lost += rollout.actors_lost or 0
            if max_lag is None or self._version - rollout.policy_version <= max_lag:
                break
            dropped += 1
        rollout.failures = None if rollout.failures is None else failures
        rollout.actors_lost = None if rollout.actors_lost is None else lost
        rollout.dropped = dropped
        rollout.seconds = time.perf_counter() - begin
        return rollout


@dataclass(frozen=True)
class ActorSetup:
    """Environments and seeds of the actors of one rank; `sampler` is the learner's, which makes no environments."""

    sampler: Sampler
    seed: int
    rank: int

    def seed_of(self, actor: int, first: int = 0) -> int:
        """Return the seed of an actor; `first`, the number of its first rollout, is not 0 if it replaces another."""
        path = (self.seed, ACTORS, self.rank, actor, self.sampler.starts)
        return derive_seed(*path, first) if first else derive_seed(*path)

    def describe(self, actor: int) -> str:
        seed = self.seed_of(actor)
        sampler = self.sampler
        return f"actor {actor}, with {sampler.num_envs} environments {sampler.spec.env_id} (seeds from {seed}),"

    def start_sampler(self, policy: nn.Module, actor: int, first: int = 0) -> Sampler:
        """Make the environments of an actor in this process; the policy's dtype becomes PyTorch's default dtype."""
        if actor > 0:  # only actor 0 logs and warns, since all actors would log the same
            rank_zero_only.rank = actor  # type: ignore[attr-defined]
        dtype = next(policy.parameters()).dtype
        torch.set_default_dtype(dtype)  # as the Trainer's precision plugin does
        sampler = copy.copy(self.sampler)
        sampler.starts = 0
        with closed_on_failure(sampler):
            sampler.start(self.seed_of(actor, first), 0, torch.device("cpu"), dtype)
        return sampler


def pack(rollout: Rollout, actor: int, share: bool = True) -> Rollout:
    """Return a copy of a rollout of an actor for another process: arrays, and shared memory for large tensors."""

    def copied(x: Tensor) -> Any:  # a tensor or an array
        if share and x.nbytes > _MAX_IN_PIPE:
            return to_shared_memory(x.clone())
        return x.numpy().copy()

    packed = copy.copy(rollout)
    vars(packed).update(map_leaves(copied, rollout.tensors()), actor=actor)
    return packed


def unpack(rollout: Rollout | Failure, actor: int) -> Rollout:
    """Turn the arrays of a packed rollout into tensors, in place, and return it; raise a failure of the actor."""
    if isinstance(rollout, Failure):
        raise rollout.to_error("the process of the actor", RuntimeError, f"actor {actor}: ")
    vars(rollout).update(map_leaves(lambda x: x if isinstance(x, Tensor) else torch.tensor(x), rollout.tensors()))
    return rollout


def weights_of(policy: nn.Module) -> list[Tensor]:
    """Return parameters and buffers of a policy, without gradients."""
    return [x.detach() for x in (*policy.parameters(), *policy.buffers())]


def copy_weights(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy the values of each source into its target."""
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)

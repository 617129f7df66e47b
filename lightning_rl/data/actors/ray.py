"""Asynchronous actors in a Ray cluster."""

from __future__ import annotations

import contextlib
import math
import os
import platform
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, cast

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_only, rank_zero_warn  # type: ignore[attr-defined]
from numpy.typing import NDArray
from torch import nn

from lightning_rl.data.actors.base import ActorConfig, ActorSetup, Failure
from lightning_rl.data.actors.transport import PackedRollout, WeightsCopy, move_into_one_block, pack, unpack
from lightning_rl.data.collector import Sampler
from lightning_rl.environments import EnvironmentFailure
from lightning_rl.environments.contract import MAX_RESTARTS_IN_A_ROW
from lightning_rl.policies.actor_critic import copy_to_cpu
from lightning_rl.policies.interface import Policy
from lightning_rl.rollouts.rollout import Rollout
from lightning_rl.validation import ConfigurationError


def connect(ray: ModuleType, address: str | None) -> bool:
    """Begin a session with Ray, unless there is one, and return whether that was done.

    Args:
        ray: The package.
        address: As `ray.init` has it.

    Raises:
        ConfigurationError: There is no cluster.
    """
    if ray.is_initialized():
        return False
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigurationError(
            f"actors.ray_address={address!r} leads to no cluster of Ray ({error}): expected its address, or None"
        ) from error
    finally:
        # Ray would have the signal end this process at once, where a run has a checkpoint to write.
        if handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)
    return True


def as_options(resources: Mapping[str, float]) -> dict[str, Any]:
    """Return resources, by their names, as the options of an actor in which Ray wants to be told of them."""
    named = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    own = {option: resources[name] for name, option in named.items() if name in resources}
    others = {name: amount for name, amount in resources.items() if name not in named}
    return {"num_cpus": 0} | own | ({"resources": others} if others else {})


def report_resources(ray: ModuleType, num_actors: int, resources: Mapping[str, float]) -> None:
    """Warn where not all actors find a place now.

    Args:
        ray: The package.
        num_actors: How many there shall be.
        resources: What each needs.
    """
    there = ray.cluster_resources()
    room = [there.get(name, 0) // amount for name, amount in resources.items() if amount]
    if room and min(room) < num_actors:
        rank_zero_warn(
            f"actors.count={num_actors}: the cluster of Ray has room for {math.floor(min(room))} of them, with "
            f"{dict(resources)} each; the others join when machines do"
        )


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


# Seconds after which the learner, while it waits, looks whether an actor takes too long.
_LOOK_EVERY = 0.5


@dataclass
class _Member:
    """What the learner knows of an actor.

    Attributes:
        handle: Of Ray's.
        life: How often it was lost.
        where: Its process and machine; None while Ray looks for a place, or starts it.
        since: When it was last heard of.
        asked: Rollouts that it was asked for, by all its lives.
        losses: How often it was lost since its last rollout.
    """

    handle: Any
    life: int = 0
    where: str | None = None
    since: float = 0.0
    asked: int = 0
    losses: int = 0


@dataclass(frozen=True)
class _Request:
    """What an actor in one of its lives was asked: for a rollout, or whether it is there."""

    actor: int
    life: int
    joining: bool


class RayActors:
    """Actors of Ray that collect while the learner learns: a source of rollouts.

    Ray places them, starts those that die anew, here or on another machine, and carries weights and rollouts through
    its object store: weights are put there once for each version. Once an actor says that it is there it is asked for
    `rollouts_ahead` rollouts; when one is taken, it is asked for another. What is ready first is taken first. A rollout
    that was under way where an actor died is not asked for again.

    Args:
        options: How many, what is set aside for each, and in which cluster.
        setup: What they are told.
        policy: Of the learner, on any device.
        version: Number of updates it has seen.

    Raises:
        ConfigurationError: There is no such cluster, or the policy cannot be sent.
    """

    def __init__(self, options: ActorConfig, setup: ActorSetup, policy: nn.Module, version: int) -> None:
        import ray

        self._ray: Any = ray
        self._options, self._setup = options, setup
        self._resources = dict(options.resources or {"CPU": 1})
        self._owns_session = connect(ray, options.ray_address)
        self._requests: dict[Any, _Request] = {}
        self._members: list[_Member] = []
        self._losses, self._warned_of_loss = 0, False
        self._nobody_since = time.monotonic()
        try:
            self._gathered = WeightsCopy(policy)
            self.publish(policy, version)
            report_resources(ray, options.count, self._resources)
            self._sent = self._send(copy_to_cpu(policy))
            self._start()
        except BaseException:
            self.close()
            raise

    def _send(self, policy: nn.Module) -> Any:  # noqa: ANN401 - of Ray's
        """Put the policy where actors that join find it, as long as the reference to it is kept."""
        try:
            return self._ray.put(policy)
        except Exception as error:  # whatever its parts raise
            raise ConfigurationError(
                f"actors.backend='ray' cannot send the policy to another process ({error}): expected one that can be "
                "pickled"
            ) from error

    def _start(self) -> None:
        """Have Ray start all actors, as soon as there is room for each."""
        # A rollout is not retried, so that none is seeded as another one was; whether an actor is there may be.
        kind = self._ray.remote(RayWorker).options(max_restarts=-1, max_task_retries=-1, **as_options(self._resources))
        num_threads = max(1, int(self._resources.get("CPU", 1)))
        for actor in range(self._options.count):
            self._members.append(_Member(kind.remote(self._setup, actor, num_threads)))
            self._ask_to_join(actor)

    def publish(self, policy: nn.Module, version: int) -> None:
        """Make a policy the one to collect with; see `RolloutSource`."""
        self._weights = self._ray.put(self._gathered.take(policy).numpy()), version

    def next_rollout(self, while_waiting: Callable[[], None]) -> Rollout:
        """Wait for a rollout; see `RolloutSource`."""
        try:
            while True:
                ready, _ = self._ray.wait(list(self._requests), num_returns=1, timeout=_LOOK_EVERY)
                packed = self._receive(ready[0]) if ready else None
                if packed is not None:
                    rollout = unpack(replace(packed, block=bytearray(packed.block)))  # Ray's memory is not for writing
                    rollout.actors_lost, self._losses = self._losses, 0
                    return rollout
                self._check_actors()
                while_waiting()
        except Exception:
            self.close()
            raise

    def close(self) -> None:
        """End the actors, and the session with Ray if it was begun here."""
        members, self._members = self._members, []
        self._requests.clear()
        for member in members:
            with contextlib.suppress(Exception):  # the cluster may be gone
                self._ray.kill(member.handle)
        if self._owns_session:
            self._owns_session = False
            self._ray.shutdown()

    def _ask_to_join(self, actor: int) -> None:
        member = self._members[actor]
        self._requests[member.handle.join.remote(self._sent)] = _Request(actor, member.life, joining=True)

    def _ask(self, actor: int) -> None:
        """Ask for a rollout, with the newest weights."""
        member = self._members[actor]
        collect = member.handle.collect.options(max_task_retries=0)
        self._requests[collect.remote(member.asked, *self._weights)] = _Request(actor, member.life, joining=False)
        member.asked += 1

    def _receive(self, reference: Any) -> PackedRollout | None:  # noqa: ANN401 - of Ray's
        """Return the rollout that has come, if it is one, and ask for the next."""
        request = self._requests.pop(reference)
        actor, member = request.actor, self._members[request.actor]
        try:
            got = self._ray.get(reference)
        except self._ray.exceptions.RayTaskError:  # not in an environment, which would be a failure
            raise
        except self._ray.exceptions.RayError as error:
            if request.life == member.life:
                self._lose(actor, error)
            return None
        if isinstance(got, Failure):
            raise got.to_error()
        if got is None:
            if request.life == member.life:
                self._lose(actor, EnvironmentFailure("another process is in its place"))
            return None
        if request.life == member.life:
            member.since = time.monotonic()
            if request.joining:
                member.where = got
            for _ in range(self._options.rollouts_ahead if request.joining else 1):
                self._ask(actor)
        if request.joining:
            return None
        member.losses = 0
        return got  # type: ignore[no-any-return]

    def _lose(self, actor: int, error: Exception) -> None:
        """Count an actor that is gone, and wait for the one that Ray puts in its place."""
        member = self._members[actor]
        who, was = self._setup.describe(actor), member.where or "not started"
        member.life, member.where, member.losses = member.life + 1, None, member.losses + 1
        self._losses += 1
        if member.losses > MAX_RESTARTS_IN_A_ROW:
            raise EnvironmentFailure(
                f"{who} is gone ({was}): {error}; {MAX_RESTARTS_IN_A_ROW} others in its place, without a rollout in "
                "between, did not help"
            ) from error
        if not self._warned_of_loss:
            self._warned_of_loss = True
            rank_zero_warn(
                f"{who} is gone ({was}): {error}. Ray starts another in its place, as of others that die; training "
                "goes on, and rollout/actors_lost counts them"
            )
        if not any(member.where for member in self._members):
            self._nobody_since = time.monotonic()
        self._ask_to_join(actor)

    def _check_actors(self) -> None:
        """Raise if an actor takes too long, or none finds a place."""
        limit, now = self._options.timeout, time.monotonic()
        there = [index for index, member in enumerate(self._members) if member.where]
        if not there and now - self._nobody_since > limit:
            raise EnvironmentFailure(
                f"no actor was started within actors.timeout={limit:g} seconds: each needs {self._resources}, and the "
                f"cluster of Ray has {self._ray.cluster_resources()}"
            )
        for index in there:
            member = self._members[index]
            if now - member.since > limit and not self._has_answered(index):
                raise EnvironmentFailure(
                    f"{self._setup.describe(index)} gave no rollout within actors.timeout={limit:g} seconds: its "
                    f"{member.where} was ended"
                )

    def _has_answered(self, actor: int) -> bool:
        """Whether there is something from an actor that only has to be taken."""
        own = [reference for reference, request in self._requests.items() if request.actor == actor]
        return bool(self._ray.wait(own, num_returns=1, timeout=0)[0])

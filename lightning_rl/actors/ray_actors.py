"""Actors of Ray: on any machine of a cluster, joining and leaving while the learner learns."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn  # type: ignore[attr-defined]
from torch import nn

from lightning_rl.actors.options import ActorOptions
from lightning_rl.actors.ray_session import as_options, connect, tell_of_room
from lightning_rl.actors.ray_worker import RayWorker
from lightning_rl.actors.transport import PackedRollout, unpack
from lightning_rl.actors.weights import WeightsCopy
from lightning_rl.actors.worker import ActorSetup, Failure
from lightning_rl.environments import EnvironmentFailure
from lightning_rl.environments.contract import MAX_RESTARTS_IN_A_ROW
from lightning_rl.policies.actor_critic import copy_to_cpu
from lightning_rl.rollouts.rollout import Rollout
from lightning_rl.validation import ConfigurationError

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

    def __init__(self, options: ActorOptions, setup: ActorSetup, policy: nn.Module, version: int) -> None:
        import ray

        self._ray: Any = ray
        self._options, self._setup = options, setup
        self._resources = dict(options.resources or {"CPU": 1})
        self._owns_session = connect(ray, options.ray_address)
        self._requests: dict[Any, _Request] = {}
        self._members: list[_Member] = []
        self._losses, self._told_of_loss = 0, False
        self._nobody_since = time.monotonic()
        try:
            self._gathered = WeightsCopy(policy)
            self.publish(policy, version)
            tell_of_room(ray, options.count, self._resources)
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
                f"actor_backend='ray' cannot send the policy to another process ({error}): expected one that can be "
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

    def take(self, while_waiting: Callable[[], None]) -> Rollout:
        """Wait for a rollout; see `RolloutSource`."""
        try:
            while True:
                ready, _ = self._ray.wait(list(self._requests), num_returns=1, timeout=_LOOK_EVERY)
                packed = self._receive(ready[0]) if ready else None
                if packed is not None:
                    rollout = unpack(replace(packed, block=bytearray(packed.block)))  # Ray's memory is not for writing
                    rollout.actors_lost, self._losses = self._losses, 0
                    return rollout
                self._look()
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
        if not self._told_of_loss:
            self._told_of_loss = True
            rank_zero_warn(
                f"{who} is gone ({was}): {error}. Ray starts another in its place, as of others that die; training "
                "goes on, and rollout/actors_lost counts them"
            )
        if not any(member.where for member in self._members):
            self._nobody_since = time.monotonic()
        self._ask_to_join(actor)

    def _look(self) -> None:
        """Raise if an actor takes too long, or none finds a place."""
        limit, now = self._options.timeout, time.monotonic()
        there = [index for index, member in enumerate(self._members) if member.where]
        if not there and now - self._nobody_since > limit:
            raise EnvironmentFailure(
                f"no actor was started within actor_timeout={limit:g} seconds: each needs {self._resources}, and the "
                f"cluster of Ray has {self._ray.cluster_resources()}"
            )
        for index in there:
            member = self._members[index]
            if now - member.since > limit and not self._has_answered(index):
                raise EnvironmentFailure(
                    f"{self._setup.describe(index)} gave no rollout within actor_timeout={limit:g} seconds: its "
                    f"{member.where} was ended"
                )

    def _has_answered(self, actor: int) -> bool:
        """Whether there is something from an actor that only has to be taken."""
        own = [reference for reference, request in self._requests.items() if request.actor == actor]
        return bool(self._ray.wait(own, num_returns=1, timeout=0)[0])

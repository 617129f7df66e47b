"""Asynchronous actors in a Ray cluster."""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn  # type: ignore[attr-defined]
from torch import Tensor, nn

from lightning_rl.data.actors import (
    POLL_SECONDS,
    ActorConfig,
    Actors,
    ActorSetup,
    copy_weights,
    pack,
    unpack,
    weights_of,
)
from lightning_rl.data.collector import Sampler
from lightning_rl.environments import EnvironmentFailure
from lightning_rl.environments.contract import MAX_RESTARTS_IN_A_ROW, EnvSettings, Failure, closed_on_failure
from lightning_rl.policies.actor_critic import copy_to_cpu
from lightning_rl.policies.interface import Policy
from lightning_rl.rollouts.rollout import Rollout
from lightning_rl.validation import ConfigurationError


class RayWorker:
    """Environments and a copy of the policy in a process of Ray.

    The environments are made at the first request, and their seeds depend on its number: a process that replaces
    another one plays other episodes. The policy arrives with `join`, not with the constructor, because Ray does not
    keep objects for processes that it may restart later.
    """

    def __init__(self, setup: ActorSetup, actor: int, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        self._setup, self._actor = setup, actor
        self._policy: nn.Module | None = None
        self._sampler: Sampler | None = None

    def join(self, policy: nn.Module) -> str:
        """Take over a policy on the CPU, and return process and machine of this actor."""
        self._policy = policy.requires_grad_(False)
        return f"process {os.getpid()} on {platform.node()}"

    def collect(
        self, number: int, settings: EnvSettings, weights: list[Tensor], version: int
    ) -> Rollout | Failure | None:
        """Return a rollout or a failure; None if this process has replaced another one and has not joined.

        `number` counts the requests to all processes of this actor.
        """
        if self._policy is None:
            return None
        try:
            if self._sampler is None:
                self._sampler = self._setup.start_sampler(self._policy, self._actor, number)
            self._sampler.set_env_settings(settings)
            copy_weights(weights_of(self._policy), weights)
            # Ray writes arrays into its store without an extra copy.
            return pack(self._sampler.collect(cast(Policy, self._policy), version), self._actor, share=False)
        except Exception as error:
            return Failure.of(error)


@dataclass
class _Member:
    """What the learner knows about an actor."""

    handle: Any
    life: int = 0  # how often the actor was lost
    where: str | None = None  # process and machine; None until it has joined
    since: float = 0.0  # time of its last answer
    requested: int = 0  # rollouts, of all its processes
    losses: int = 0  # since its last rollout


class RayActors(Actors):
    """Ray actors that collect rollouts while the learner trains.

    Ray places the actors, replaces those that die, and carries weights and rollouts through its object store. An actor
    that has joined has `rollouts_ahead` requests for rollouts. The rollout that an actor was collecting when it died is
    not requested again. A missing cluster raises a `ConfigurationError`.
    """

    def __init__(self, options: ActorConfig, setup: ActorSetup, policy: nn.Module, version: int) -> None:
        import ray

        self._ray: Any = ray
        super().__init__(options, setup, version)
        self._resources = dict(options.resources or {"CPU": 1})
        self._owns_session = _connect(ray, options.ray_address)
        self._requests: dict[Any, tuple[int, int, EnvSettings]] = {}  # actor, its life, and settings
        self._members: list[_Member] = []
        self._losses, self._warned_of_loss = 0, False
        self._nobody_since = time.monotonic()
        with closed_on_failure(self):
            self.send_policy(policy, version)
            self._warn_of_missing_resources()
            self._policy = ray.put(copy_to_cpu(policy))  # kept for actors that join later
            self._start()

    def _warn_of_missing_resources(self) -> None:
        available = self._ray.cluster_resources()
        room = [int(available.get(name, 0) // amount) for name, amount in self._resources.items() if amount]
        if room and min(room) < self.options.count:
            rank_zero_warn(
                f"actors.count={self.options.count}: the Ray cluster has room for {min(room)} of them, with "
                f"{self._resources} each; the others start when machines are added"
            )

    def _start(self) -> None:
        # Ray repeats a lost `join`, but not a lost rollout: a replacement must not repeat the seeds of another process.
        kind = self._ray.remote(RayWorker).options(max_restarts=-1, max_task_retries=-1, **_placement(self._resources))
        num_threads = max(1, int(self._resources.get("CPU", 1)))
        for actor in range(self.options.count):
            self._members.append(_Member(kind.remote(self.setup, actor, num_threads)))
            self._request_join(actor)

    def send_policy(self, policy: nn.Module, version: int) -> None:
        self._weights = self._ray.put([x.cpu() for x in weights_of(policy)]), version

    def receive(self) -> Rollout | None:
        ready, _ = self._ray.wait(list(self._requests), num_returns=1, timeout=POLL_SECONDS)
        rollout = self._take_answer(ready[0]) if ready else None
        if rollout is None:
            self._check_actors()
            return None
        rollout.actors_lost, self._losses = self._losses, 0
        return rollout

    def close(self) -> None:
        """End the actors, and Ray's session if it was started here."""
        members, self._members = self._members, []
        self._requests.clear()
        for member in members:
            with contextlib.suppress(Exception):  # the cluster may have ended
                self._ray.kill(member.handle)
        if self._owns_session:
            self._owns_session = False
            self._ray.shutdown()

    def _request_join(self, actor: int) -> None:
        member = self._members[actor]
        self._requests[member.handle.join.remote(self._policy)] = actor, member.life, self.setup.sampler.settings

    def _request_rollout(self, actor: int) -> None:
        member = self._members[actor]
        collect = member.handle.collect.options(max_task_retries=0)
        settings = self.setup.sampler.settings
        reference = collect.remote(member.requested, settings, *self._weights)
        self._requests[reference] = actor, member.life, settings
        member.requested += 1

    def _take_answer(self, reference: Any) -> Rollout | None:  # a type of Ray
        """Process an answer, and send the next request; return the rollout if the answer is one."""
        actor, life, settings = self._requests.pop(reference)
        member = self._members[actor]
        is_current = life == member.life  # the process has not been lost since the request
        try:
            answer = self._ray.get(reference)
            if answer is None:
                raise EnvironmentFailure("another process is in its place")
        except self._ray.exceptions.RayTaskError:  # a bug: exceptions of environments are returned as `Failure`
            raise
        except (self._ray.exceptions.RayError, EnvironmentFailure) as error:
            if is_current:
                self._replace(actor, error)
            return None
        joins = isinstance(answer, str)
        rollout = None if joins else unpack(answer, actor)
        if is_current:
            member.since = time.monotonic()
            if joins:
                member.where = answer
            for _ in range(self.options.rollouts_ahead if joins else 1):
                self._request_rollout(actor)
        if rollout is not None:
            member.losses = 0
            rollout.has_old_settings = settings is not self.setup.sampler.settings
        return rollout

    def _replace(self, actor: int, error: Exception) -> None:
        """Count a lost actor, and request that the process that replaces it joins."""
        member = self._members[actor]
        who = f"{self.setup.describe(actor)} is gone ({member.where or 'not started'}): {error}"
        member.life, member.where, member.losses = member.life + 1, None, member.losses + 1
        self._losses += 1
        if member.losses > MAX_RESTARTS_IN_A_ROW:
            raise EnvironmentFailure(
                f"{who}; {MAX_RESTARTS_IN_A_ROW} replacements in a row failed before they had collected a rollout"
            ) from error
        if not self._warned_of_loss:
            self._warned_of_loss = True
            rank_zero_warn(f"{who}. Ray replaces actors that die; rollout/actors_lost counts them")
        if not any(member.where for member in self._members):
            self._nobody_since = time.monotonic()
        self._request_join(actor)

    def _check_actors(self) -> None:
        limit, now = self.options.timeout, time.monotonic()
        if not any(member.where for member in self._members) and now - self._nobody_since > limit:
            raise EnvironmentFailure(
                f"no actor was started within actors.timeout={limit:g} seconds: each needs {self._resources}, and the "
                f"cluster of Ray has {self._ray.cluster_resources()}"
            )
        for index, member in enumerate(self._members):
            if member.where and now - member.since > limit:
                own = [reference for reference, (actor, *_) in self._requests.items() if actor == index]
                if not self._ray.wait(own, num_returns=1, timeout=0)[0]:  # it has not answered meanwhile
                    raise EnvironmentFailure(
                        f"{self.setup.describe(index)} gave no rollout within actors.timeout={limit:g} seconds: its "
                        f"{member.where} was ended"
                    )


def _connect(ray: Any, address: str | None) -> bool:  # a module
    """Return whether a session with Ray had to be started; without a cluster raise a `ConfigurationError`."""
    if ray.is_initialized():
        return False
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigurationError(
            f"actors.ray_address={address!r} leads to no Ray cluster ({error}): expected the address of one, or None"
        ) from error
    finally:
        # Ray's handler would end this process at once, before the run can save a checkpoint.
        if handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)
    return True


def _placement(resources: Mapping[str, float]) -> dict[str, Any]:
    """Return resources as options of a Ray actor, which has keywords for CPU, GPU and memory."""
    named = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    options = {option: resources[name] for name, option in named.items() if name in resources}
    others = {name: amount for name, amount in resources.items() if name not in named}
    return {"num_cpus": 0} | options | ({"resources": others} if others else {})

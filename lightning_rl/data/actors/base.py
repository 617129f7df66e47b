"""Asynchronous actors: options, the rollout source they implement, and bounded policy lag."""

from __future__ import annotations

import importlib.util
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

import torch
from gymnasium import spaces
from torch import nn

from lightning_rl.data.collector import Sampler
from lightning_rl.environments import Backend, EnvironmentFailure, EnvironmentSpec
from lightning_rl.environments.seeding import ACTORS, derive_seed
from lightning_rl.rollouts.rollout import Rollout
from lightning_rl.validation import (
    ConfigurationError,
    check,
    check_number,
    check_positive_int,
    how_to_install,
    is_int,
    is_one_of,
)

StartMethod = Literal["fork", "spawn", "forkserver"]
ActorBackend = Literal["processes", "ray"]


@dataclass(frozen=True)
class ActorConfig:
    """Options of asynchronous actors.

    Args:
        count: Asynchronous actors on each rank: processes with `num_envs` environments and a copy of the policy each,
            which collect while the learner learns, so that rollouts are of earlier versions of the policy. For
            algorithms that correct for that. 0: none, everything is collected in step and can be reproduced.
        prefetch: Rollouts that each of them may have ready or under way before the learner takes them; None: 2 of
            several processes, so that none waits while the learner is at a rollout of another's, and 1 of others.
        start_method: How their processes are started: `fork`, `spawn` or `forkserver`; None: as Python does.
        timeout: Seconds that an actor may take for a rollout, its start included, before it counts as hung.
        max_policy_lag: Versions of the policy that a rollout may be behind the learner's; older ones are dropped, and
            counted as `rollout/dropped`. None: any number.
        backend: What actors are: `processes` of this machine, or `ray`: actors of Ray, on any machine of its cluster,
            which join when there is room for them and are replaced when they die (counted as `rollout/actors_lost`).
        resources: What Ray sets aside for each of them, by its names: `{CPU: 1}`, which None is too. Networks have as
            many threads as CPUs.
        ray_address: Of Ray's cluster, as `ray.init` has it; None joins the one that it finds, or starts one on this
            machine. A session that is connected already is used as it is.
    """

    count: int = 0
    prefetch: int | None = None
    start_method: StartMethod | None = None
    timeout: float = 300.0
    max_policy_lag: int | None = None
    backend: ActorBackend = "processes"
    resources: dict[str, float] | None = None
    ray_address: str | None = None

    def check(self, environments: Backend) -> None:
        """Raise where an option is out of range or does not go with another one.

        Args:
            environments: Backend of the environments.

        Raises:
            ConfigurationError: Names the option as `actors.count`; or the environments have worker processes of their
                own, or live on the learner's device.
        """
        count, methods = self.count, get_args(StartMethod)
        check(is_int(count) and count >= 0, "actors.count", count, "an integer of at least 0")
        if self.prefetch is not None:
            check_positive_int("actors.prefetch", self.prefetch)
        known = self.start_method is None or is_one_of(self.start_method, methods)
        check(known, "actors.start_method", self.start_method, f"None or one of {', '.join(methods)}")
        check_number("actors.timeout", self.timeout, above=0)
        lag, expected = self.max_policy_lag, "None, or an integer of at least 0"
        check(lag is None or (is_int(lag) and lag >= 0), "actors.max_policy_lag", lag, expected)
        backends = get_args(ActorBackend)
        check(is_one_of(self.backend, backends), "actors.backend", self.backend, f"one of {', '.join(backends)}")
        self._check_ray()
        if not count:
            for default in fields(self):
                given = getattr(self, default.name)
                expected = f"{default.default} where actors.count is 0"
                check(given == default.default, f"actors.{default.name}", given, expected)
            return
        expected = "sync, native or envpool beside actors.count: an actor is a process that steps its own environments"
        check(environments not in ("async", "torch"), "backend", environments, expected)

    def _check_ray(self) -> None:
        """Raise where what is Ray's is asked of processes, or the other way round."""
        if self.backend != "ray":
            for name in ("resources", "ray_address"):
                value = getattr(self, name)
                check(value is None, f"actors.{name}", value, "None, but with actors.backend='ray'")
            return
        installed = importlib.util.find_spec("ray") is not None
        check(installed, "actors.backend", "ray", f"the package ray to be installed: {how_to_install('ray')}")
        expected = "None with actors.backend='ray', which starts processes in its own way"
        check(self.start_method is None, "actors.start_method", self.start_method, expected)
        address = self.ray_address
        check(address is None or isinstance(address, str), "actors.ray_address", address, "an address, or None")
        if self.resources is not None:
            names = isinstance(self.resources, Mapping) and all(isinstance(name, str) for name in self.resources)
            expected = "names with amounts, {CPU: 1}"
            check(names and len(self.resources) > 0, "actors.resources", self.resources, expected)
            for name, amount in self.resources.items():
                check_number(f"actors.resources[{name!r}]", amount, at_least=0)

    @property
    def rollouts_ahead(self) -> int:
        """How many rollouts each actor may have ready or under way before the learner takes them.

        Of several, one that is done waits for the learner, which is at a rollout of another's, unless it may go on.
        Not so with Ray, which gives an actor its weights when it is asked: they would be older by one rollout more.
        """
        return self.prefetch or (2 if self.count > 1 and self.backend == "processes" else 1)


if TYPE_CHECKING:
    ActorOptions = ActorConfig | Mapping[str, Any]
else:  # the command line knows the fields of the class alone
    ActorOptions = ActorConfig


class RolloutSource(Protocol):
    """Where rollouts come from that were collected elsewhere, with policies that were published before.

    What stands behind it, processes of this machine or of others, is its own affair: a learner publishes each version
    of its policy, and takes rollouts in the order in which they come.
    """

    def publish(self, policy: nn.Module, version: int) -> None:
        """Make a policy the one to collect with from now on.

        Raises:
            EnvironmentFailure: Nobody is there to act any more.
        """
        ...

    def next_rollout(self, while_waiting: Callable[[], None]) -> Rollout:
        """Wait for a rollout that nobody has taken yet; `actor` and `policy_version` say whose it is.

        Args:
            while_waiting: Called about twice a second until a rollout arrives; what it raises ends the wait.

        Raises:
            EnvironmentFailure: An actor failed, died or hung, and was not replaced.
        """
        ...

    def close(self) -> None:
        """End what collects; may be called twice."""
        ...


class BoundedLag:
    """A source of rollouts that leaves out those of policies too far behind.

    Args:
        source: Whose rollouts.
        max_policy_lag: Versions of the policy that a rollout may be behind; None: any number.
        version: Of the policy that was published.
    """

    def __init__(self, source: RolloutSource, max_policy_lag: int | None, version: int) -> None:
        self.source = source
        self.max_policy_lag = max_policy_lag
        self._version = version

    def publish(self, policy: nn.Module, version: int) -> None:
        """Make a policy the one to collect with from now on, unless it is that already."""
        if version != self._version:
            self.source.publish(policy, version)
            self._version = version

    def next_rollout(self, while_waiting: Callable[[], None] = lambda: None) -> Rollout:
        """Wait for a rollout that is young enough; what happened to environments in those before it is in it too."""
        begin, dropped, lost, failures = time.perf_counter(), 0, 0, list[str]()
        while True:
            rollout = self.source.next_rollout(while_waiting)
            failures += rollout.failures or []
            lost += rollout.actors_lost or 0
            if self.max_policy_lag is None or self._version - rollout.policy_version <= self.max_policy_lag:
                break
            dropped += 1
        rollout.failures = None if rollout.failures is None else failures
        rollout.actors_lost = None if rollout.actors_lost is None else lost
        rollout.dropped = dropped
        rollout.seconds = time.perf_counter() - begin
        return rollout

    def close(self) -> None:
        """End what collects; may be called twice."""
        self.source.close()


@dataclass(frozen=True)
class ActorSetup:
    """What actors are told when they are started, as plain data but for the spaces.

    Attributes:
        spec: Of one environment.
        num_envs: How many each actor has.
        rollout_length: Steps of each in a rollout.
        info_keys: Keys of `info` whose values are wanted.
        spaces: Observation and action space of one environment.
        seed: Root of all seeds.
        rank: Of the learner.
        start: How often this run has started actors or environments before, in the runs that it goes on from too.
    """

    spec: EnvironmentSpec
    num_envs: int
    rollout_length: int
    info_keys: tuple[str, ...]
    spaces: tuple[spaces.Space[Any], spaces.Space[Any]]
    seed: int
    rank: int
    start: int

    def seed_of(self, actor: int, first: int = 0) -> int:
        """Return the root of the seeds of one actor: of its environments, and of the actions it draws.

        Args:
            actor: Which one.
            first: Of the rollouts that were asked of it the one it begins with: not 0 where it takes another's place.
        """
        path = (self.seed, ACTORS, self.rank, actor, self.start)
        return derive_seed(*path, first) if first else derive_seed(*path)

    def describe(self, actor: int) -> str:
        """Say which actor this is, and what its environments are."""
        seed = self.seed_of(actor)
        return f"actor {actor}, with {self.num_envs} environments {self.spec.env_id} (seeds from {seed}),"

    def start_sampler(self, policy: nn.Module, seed: int) -> Sampler:
        """Make the environments of an actor in this process, which from now on computes in the policy's precision.

        Args:
            policy: On the CPU.
            seed: As `seed_of` returned it.
        """
        dtype = next(policy.parameters()).dtype
        torch.set_default_dtype(dtype)  # as the Trainer's precision has it
        sampler = Sampler(self.spec, self.num_envs, self.rollout_length, self.info_keys)
        try:
            sampler.start(self.spaces, seed, 0, torch.device("cpu"), dtype)
        except BaseException:
            sampler.close()
            raise
        return sampler


@dataclass(frozen=True)
class Failure:
    """What ended an actor, in words, since not every exception can be sent.

    Attributes:
        actor: Which one.
        kind: Class to raise it as.
        message: What happened; an environment's failure names environment, episode, seed and step.
        trace: Where, in the process of the actor.
    """

    actor: int
    kind: type[Exception]
    message: str
    trace: str

    @classmethod
    def of(cls, actor: int, error: Exception) -> Failure:
        """Describe an error, in the process of the actor."""
        known = (EnvironmentFailure, ConfigurationError)
        kind = next((kind for kind in known if isinstance(error, kind)), RuntimeError)
        what = str(error) if kind is not RuntimeError else f"{type(error).__name__}: {error}"
        return cls(actor, kind, what, "".join(traceback.format_exception(error)))

    def to_error(self) -> Exception:
        """Return what the learner raises."""
        error = self.kind(f"actor {self.actor}: {self.message}")
        error.add_note(f"In the process of the actor:\n{self.trace}")
        return error

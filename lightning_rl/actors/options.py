"""What a user may say about asynchronous actors, and what a source of rollouts is."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

from torch import nn

from lightning_rl.environments import EnvironmentSpec
from lightning_rl.rollouts.rollout import Rollout
from lightning_rl.validation import check, check_number, check_positive_int, how_to_install, is_int, is_one_of

StartMethod = Literal["fork", "spawn", "forkserver"]
ActorBackend = Literal["processes", "ray"]


@dataclass(frozen=True)
class ActorOptions:
    """Options of asynchronous actors.

    Args:
        count: Number of actors on each rank; 0: the learner collects itself, in step.
        prefetch: Rollouts that each actor may be ahead; None: two of several processes, one of others.
        start_method: How their processes are started; None: as Python does by default.
        timeout: Seconds that an actor may take for a rollout, its start included.
        max_policy_lag: Versions of the policy that a rollout may be behind the learner; None: any number.
        backend: What they are: processes of this machine, or actors of Ray on any machine of its cluster.
        resources: What Ray sets aside for each of them, by its names; None: one CPU.
        ray_address: Of Ray's cluster; None: the one that `ray.init` finds, or one of this machine alone.
    """

    count: int = 0
    prefetch: int | None = None
    start_method: StartMethod | None = None
    timeout: float = 300.0
    max_policy_lag: int | None = None
    backend: ActorBackend = "processes"
    resources: Mapping[str, float] | None = None
    ray_address: str | None = None

    def __post_init__(self) -> None:
        """Check ranges."""
        count, methods = self.count, get_args(StartMethod)
        check(is_int(count) and count >= 0, "num_actors", count, "an integer of at least 0")
        if self.prefetch is not None:
            check_positive_int("actor_prefetch", self.prefetch)
        known = self.start_method is None or is_one_of(self.start_method, methods)
        check(known, "actor_start_method", self.start_method, f"None or one of {', '.join(methods)}")
        check_number("actor_timeout", self.timeout, above=0)
        lag = self.max_policy_lag
        check(lag is None or (is_int(lag) and lag >= 0), "max_policy_lag", lag, "None, or an integer of at least 0")
        backends = get_args(ActorBackend)
        check(is_one_of(self.backend, backends), "actor_backend", self.backend, f"one of {', '.join(backends)}")
        for name, given, default in (
            ("actor_prefetch", self.prefetch, None),
            ("actor_start_method", self.start_method, None),
            ("actor_timeout", self.timeout, 300.0),
            ("max_policy_lag", lag, None),
            ("actor_backend", self.backend, "processes"),
        ):
            check(count > 0 or given == default, name, given, f"{default} where num_actors is 0")
        self._check_ray()

    def _check_ray(self) -> None:
        """Raise where what is Ray's is asked of processes, or the other way round."""
        if self.backend != "ray":
            check(self.resources is None, "actor_resources", self.resources, "None, but with actor_backend='ray'")
            check(self.ray_address is None, "ray_address", self.ray_address, "None, but with actor_backend='ray'")
            return
        installed = importlib.util.find_spec("ray") is not None
        check(installed, "actor_backend", "ray", f"the package ray to be installed: {how_to_install('ray')}")
        expected = "None with actor_backend='ray', which starts processes in its own way"
        check(self.start_method is None, "actor_start_method", self.start_method, expected)
        address = self.ray_address
        check(address is None or isinstance(address, str), "ray_address", address, "an address, or None")
        if self.resources is not None:
            names = isinstance(self.resources, Mapping) and all(isinstance(name, str) for name in self.resources)
            check(names and len(self.resources) > 0, "actor_resources", self.resources, "names with amounts, {CPU: 1}")
            for name, amount in self.resources.items():
                check_number(f"actor_resources[{name!r}]", amount, at_least=0)

    @property
    def rollouts_ahead(self) -> int:
        """How many rollouts each actor may have ready or under way before the learner takes them.

        Of several, one that is done waits for the learner, which is at a rollout of another's, unless it may go on.
        Not so with Ray, which gives an actor its weights when it is asked: they would be older by one rollout more.
        """
        return self.prefetch or (2 if self.count > 1 and self.backend == "processes" else 1)

    def check_environments(self, spec: EnvironmentSpec) -> None:
        """Raise unless actors can step such environments.

        Raises:
            ConfigurationError: They have worker processes of their own, or live on the learner's device.
        """
        expected = "sync, native or envpool beside num_actors: an actor is a process that steps its environments itself"
        check(not self.count or spec.backend not in ("async", "torch"), "backend", spec.backend, expected)


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

    def take(self, while_waiting: Callable[[], None]) -> Rollout:
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

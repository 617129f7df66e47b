"""What an actor does in its own process: acts with the newest weights, and hands over one rollout after another."""

from __future__ import annotations

import functools
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from gymnasium import spaces
from lightning.pytorch.utilities.rank_zero import rank_zero_only  # type: ignore[attr-defined]
from torch import nn
from torch.utils.data import IterableDataset, get_worker_info

from lightning_rl.actors.transport import PackedRollout, pack
from lightning_rl.actors.weights import SharedWeights
from lightning_rl.environments import EnvironmentFailure, EnvironmentSpec
from lightning_rl.environments.seeding import ACTORS, derive_seed
from lightning_rl.environments.workers import live_with_parent
from lightning_rl.policies.interface import Policy, PolicyOutput
from lightning_rl.sampler import Sampler
from lightning_rl.validation import ConfigurationError


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


class Signs:
    """Signs between learner and actors, in shared memory.

    Args:
        num_actors: How many actors there are.
    """

    def __init__(self, num_actors: int) -> None:
        now = time.monotonic()  # the same clock in all processes of a machine
        self._since = torch.full((num_actors,), now, dtype=torch.float64).share_memory_()  # type: ignore[no-untyped-call]
        self._stop = torch.zeros(1, dtype=torch.bool).share_memory_()  # type: ignore[no-untyped-call]

    def begin(self, actor: int) -> None:
        """Say that an actor begins a rollout."""
        self._since[actor] = time.monotonic()

    def rest(self, actor: int) -> None:
        """Say that an actor waits to be asked for the next one."""
        self._since[actor] = torch.inf

    def busy_for(self, actor: int) -> float:
        """Return for how many seconds an actor has been collecting, or starting; 0 of one that waits."""
        return max(0.0, time.monotonic() - float(self._since[actor]))

    def stop(self) -> None:
        """Ask all actors to leave their rollouts as they are."""
        self._stop.fill_(True)

    @property
    def stopped(self) -> bool:
        """Whether they were asked to."""
        return bool(self._stop)


class _Stopped(Exception):
    """The learner needs no more rollouts."""


def _act_unless_stopped(signs: Signs, act: Callable[..., PolicyOutput], *args: Any, **kwargs: Any) -> PolicyOutput:  # noqa: ANN401
    if signs.stopped:
        raise _Stopped
    return act(*args, **kwargs)


class Actors(IterableDataset[PackedRollout | Failure]):
    """What the worker processes of a `DataLoader` iterate over: each of them is one actor.

    Args:
        setup: What they are told.
        policy: On the CPU; each process acts with a copy of its own.
        weights: What the learner publishes.
        signs: Between learner and actors.
    """

    def __init__(self, setup: ActorSetup, policy: nn.Module, weights: SharedWeights, signs: Signs) -> None:
        self.setup, self.policy, self.weights, self.signs = setup, policy, weights, signs

    def __iter__(self) -> Iterator[PackedRollout | Failure]:
        """Yield the rollouts of one actor, or what has ended it."""
        worker = get_worker_info()
        assert worker is not None
        live_with_parent()
        if worker.id > 0:  # all would say the same
            rank_zero_only.rank = worker.id  # type: ignore[attr-defined]
        try:
            yield from self._act(worker.id)
        except _Stopped:
            pass
        except Exception as error:
            yield Failure.of(worker.id, error)
        finally:
            self.signs.rest(worker.id)

    def _act(self, actor: int) -> Iterator[PackedRollout]:
        policy = cast(Policy, self.policy)
        reader = self.weights.reader(self.policy.requires_grad_(False))
        sampler = self.setup.start_sampler(self.policy, self.setup.seed_of(actor))
        try:
            # A rollout may take long: it is left at the next step. Not a property of the class, which others share.
            vars(policy)["act"] = functools.partial(_act_unless_stopped, self.signs, policy.act)
            while True:
                self.signs.begin(actor)
                packed = pack(sampler.collect(policy, reader.refresh()), actor)
                self.signs.rest(actor)
                yield packed
        finally:
            sampler.close()

"""Asynchronous actors in processes of this machine."""

from __future__ import annotations

import atexit
import contextlib
import copy
import functools
import multiprocessing
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_only  # type: ignore[attr-defined]
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data._utils.signal_handling import _remove_worker_pids, _set_worker_pids  # type: ignore[attr-defined]

from lightning_rl.data.actors.base import ActorConfig, ActorSetup, Failure
from lightning_rl.data.actors.transport import PackedRollout, SharedWeights, WeightsLocked, pack, unpack
from lightning_rl.environments import EnvironmentFailure
from lightning_rl.environments.workers import kill, live_with_parent, none_left_on_failure, signals_waiting
from lightning_rl.policies.actor_critic import copy_to_cpu
from lightning_rl.policies.interface import Policy, PolicyOutput
from lightning_rl.rollouts.rollout import Rollout
from lightning_rl.validation import ConfigurationError


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


# Seconds after which the learner, while it waits, looks whether its actors are still there.
_LOOK_EVERY = 0.5
# Seconds that all actors together get to notice that they are no longer needed: some may be stopped, and an interrupted
# learner has to end within five.
_GRACE = 2.0


class ProcessActors:
    """Processes that collect while the learner learns: a source of rollouts.

    Each has environments and a copy of the policy, and is asked for `rollouts_ahead` rollouts at a time; when one is
    taken, it is asked for another. What is ready first is taken first.

    Args:
        options: How many, and how they are started.
        setup: What they are told.
        policy: Of the learner, on any device.
        version: Number of updates it has seen.

    Raises:
        ConfigurationError: The policy cannot be sent to a process of this kind.
    """

    def __init__(self, options: ActorConfig, setup: ActorSetup, policy: nn.Module, version: int) -> None:
        self._options, self._setup = options, setup
        context = multiprocessing.get_context(options.start_method)
        self._weights = SharedWeights(policy, context)
        self._weights.publish(policy, version)
        self._signs = Signs(options.count)
        without_locks: Any = copy.copy(context)
        without_locks.Event = _Flag
        loader = DataLoader(
            Actors(setup, copy_to_cpu(policy), self._weights, self._signs),
            batch_size=None,
            num_workers=options.count,
            collate_fn=_as_it_is,
            multiprocessing_context=without_locks,
            prefetch_factor=options.rollouts_ahead,
            timeout=_LOOK_EVERY,
            in_order=False,
        )
        self._iterator: Iterator[Any] | None = None
        with signals_waiting(), none_left_on_failure():
            self._iterator = self._start(loader)
            self._processes = cast(list[Any], self._iterator._workers)  # type: ignore[attr-defined]
            self._detect_dead_workers()
            # Before multiprocessing asks them to end, which they do not hear, and waits.
            self._at_exit = functools.partial(kill, self._processes)
            atexit.register(self._at_exit)

    def _start(self, loader: DataLoader[Any]) -> Iterator[Any]:
        try:
            return iter(loader)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            method = self._options.start_method or multiprocessing.get_start_method()
            raise ConfigurationError(
                f"actors.start_method={method!r} cannot send the policy to another process ({error}): expected a "
                "policy of classes and functions that can be imported, or 'fork' where the system has it"
            ) from error

    def _detect_dead_workers(self) -> None:
        """Have the death of an actor noticed where rollouts are taken.

        PyTorch would raise out of the signal that a child has ended, wherever the learner is: in half an update.
        """
        _remove_worker_pids(id(self._iterator))
        _set_worker_pids(id(self._iterator), ())  # for PyTorch to remove when the iterator ends

    def publish(self, policy: nn.Module, version: int) -> None:
        """Make a policy the one to collect with; see `RolloutSource`."""
        try:
            self._weights.publish(policy, version)
        except WeightsLocked as error:
            self._check_actors()
            raise EnvironmentFailure(f"{error}: an actor holds the lock") from error

    def next_rollout(self, while_waiting: Callable[[], None]) -> Rollout:
        """Wait for a rollout; see `RolloutSource`."""
        assert self._iterator is not None
        while True:
            self._check_actors()
            try:
                got = next(self._iterator)
            except RuntimeError as error:
                if "timed out" in str(error):
                    while_waiting()
                    continue
                self._check_actors()  # which knows more
                raise
            if not isinstance(got, Failure):
                return unpack(got)
            self.close()
            raise got.to_error()

    def close(self) -> None:
        """End the processes; those that do not hear, by force."""
        if self._iterator is None:
            return
        iterator: Any = self._iterator
        self._iterator = None
        self._signs.stop()
        deadline = time.monotonic() + _GRACE
        while time.monotonic() < deadline and self._busy():
            time.sleep(0.005)
        # Those that are stuck in an environment; the others may hold a lock that they share with this process.
        kill(self._processes[index] for index in self._busy())
        # PyTorch gives each process that does not answer five seconds more.
        force = threading.Timer(max(1.0, deadline - time.monotonic()), self._kill_at_once)
        force.start()
        iterator._shutdown_workers()
        force.cancel()
        kill(self._processes)
        atexit.unregister(self._at_exit)

    def _kill_at_once(self) -> None:
        """Kill the processes without waiting for their end, which is up to the main thread."""
        for process in self._processes:
            process.kill()

    def _busy(self) -> list[int]:
        """Return which actors are alive and in the middle of a rollout."""
        alive = [index for index, process in enumerate(self._processes) if process.is_alive()]
        return [index for index in alive if self._signs.busy_for(index)]

    def _check_actors(self) -> None:
        """Raise if an actor is gone, or takes too long."""
        limit = self._options.timeout
        for index, process in enumerate(self._processes):
            if not process.is_alive():
                what = f"is gone: its process {process.pid} {_ended(process.exitcode)}"
            elif self._signs.busy_for(index) > limit:
                what = f"gave no rollout within actors.timeout={limit:g} seconds: its process {process.pid} was ended"
                kill([process])
            else:
                continue
            with contextlib.suppress(Exception):  # what is wrong is known
                self.close()
            raise EnvironmentFailure(f"{self._setup.describe(index)} {what}")


class _Flag:
    """An event between processes without a lock, which a process that is killed would keep for ever."""

    def __init__(self) -> None:
        self._flag = torch.zeros(1, dtype=torch.bool).share_memory_()  # type: ignore[no-untyped-call]

    def set(self) -> None:
        """Set the flag in all processes."""
        self._flag.fill_(True)

    def is_set(self) -> bool:
        """Whether a process has set the flag."""
        return bool(self._flag)


def _as_it_is(x: object) -> object:
    return x


def _ended(exit_code: int) -> str:
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    return f"was killed by {signal.Signals(-exit_code).name}"

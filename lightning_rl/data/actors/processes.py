"""Asynchronous actors in processes of this machine."""

from __future__ import annotations

import atexit
import contextlib
import functools
import multiprocessing
import pickle
import queue
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any, cast

import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.utilities.rank_zero import rank_zero_only  # type: ignore[attr-defined]
from torch import nn

from lightning_rl.data.actors.base import ActorConfig, ActorSetup, Failure
from lightning_rl.data.actors.transport import PackedRollout, SharedWeights, WeightsLocked, pack, unpack
from lightning_rl.environments import EnvironmentFailure
from lightning_rl.environments.workers import kill, live_with_parent, none_left_on_failure, signals_waiting
from lightning_rl.policies.actor_critic import copy_to_cpu
from lightning_rl.policies.interface import Policy, PolicyOutput
from lightning_rl.rollouts.rollout import Rollout
from lightning_rl.validation import ConfigurationError

# Seconds after which a waiting learner checks its actors again.
_LOOK_EVERY = 0.5
# Seconds that all actors together get to end by themselves: some may be stopped, and an interrupted learner has to end
# within five.
_GRACE = 2.0


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


def run_actor(
    actor: int, setup: ActorSetup, module: nn.Module, weights: SharedWeights, signs: Signs, pipe: Connection
) -> None:
    """Collect a rollout for each request of the learner, in a process of its own.

    Args:
        actor: Index of this actor.
        setup: Its environments and seeds.
        module: The policy, on the CPU; this process acts with a copy.
        weights: Published by the learner.
        signs: Between learner and actors.
        pipe: Brings requests, True for each rollout and False at the end; takes rollouts to the learner.
    """
    live_with_parent()
    torch.set_num_threads(1)
    seed_everything(setup.seed_of(actor) % 2**32, verbose=False)  # for environments that use global generators
    if actor > 0:  # all would log the same
        rank_zero_only.rank = actor  # type: ignore[attr-defined]
    requests = iter(functools.partial(_next_request, pipe), False)
    results: queue.SimpleQueue[PackedRollout | Failure] = queue.SimpleQueue()
    # A thread sends, so that the next rollout begins even if the learner has no time to empty a full pipe.
    threading.Thread(target=_send_all, args=(results, pipe), daemon=True).start()
    try:
        policy, reader = cast(Policy, module), weights.reader(module.requires_grad_(False))
        with contextlib.closing(setup.start_sampler(module, setup.seed_of(actor))) as sampler:
            # A rollout may take long: it ends at the next step. Not a property of the class, which others share.
            vars(policy)["act"] = functools.partial(_act_unless_stopped, signs, policy.act)
            for _ in requests:
                signs.begin(actor)
                results.put(pack(sampler.collect(policy, reader.refresh()), actor))
                signs.rest(actor)
    except _Stopped:
        pass
    except Exception as error:
        results.put(Failure.of(actor, error))
        signs.rest(actor)
        for _ in requests:  # until the learner has received everything, and says so
            pass


def _next_request(pipe: Connection) -> bool:
    try:
        return bool(pipe.recv())
    except (EOFError, OSError):  # the learner is gone
        return False


def _send_all(results: queue.SimpleQueue[PackedRollout | Failure], pipe: Connection) -> None:
    with contextlib.suppress(OSError):  # the learner is gone
        while True:
            pipe.send(results.get())


class ProcessActors:
    """Processes that collect while the learner learns: a source of rollouts.

    Each has environments and a copy of the policy, and is asked for `rollouts_ahead` rollouts at a time; when one is
    taken, it is asked for another. What is ready first is taken first, and of several the one whose actor has waited
    longest. Each actor has a pipe of its own, so a process that is killed blocks no other.

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
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._turns = list(range(options.count))  # those whose rollouts were taken longest ago come first
        with signals_waiting(), none_left_on_failure():
            self._start(context, copy_to_cpu(policy))
            # Before multiprocessing asks them to end, which they do not hear, and waits.
            self._at_exit = functools.partial(kill, self._processes)
            atexit.register(self._at_exit)

    def _start(self, context: Any, policy: nn.Module) -> None:  # noqa: ANN401 - multiprocessing types no `Process` here
        for actor in range(self._options.count):
            own, theirs = context.Pipe()
            args = (actor, self._setup, policy, self._weights, self._signs, theirs)
            process = context.Process(target=run_actor, args=args, name=f"actor {actor}", daemon=True)
            try:
                process.start()
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                method = self._options.start_method or multiprocessing.get_start_method()
                raise ConfigurationError(
                    f"actors.start_method={method!r} cannot send the policy to another process ({error}): expected a "
                    "policy of classes and functions that can be imported, or 'fork' where the system has it"
                ) from error
            theirs.close()  # or the end of the process would not be the end of the pipe
            self._processes.append(process)
            self._pipes.append(own)
            for _ in range(self._options.rollouts_ahead):
                self._request(actor)

    def _request(self, actor: int, another: bool = True) -> None:
        """Ask an actor for another rollout, or to end."""
        with contextlib.suppress(OSError):  # it is gone, which `_check_actors` says
            self._pipes[actor].send(another)

    def publish(self, policy: nn.Module, version: int) -> None:
        """Make a policy the one to collect with; see `RolloutSource`."""
        try:
            self._weights.publish(policy, version, self._check_actors)
        except WeightsLocked as error:
            raise EnvironmentFailure(f"{error}: an actor holds the lock") from error

    def next_rollout(self, while_waiting: Callable[[], None]) -> Rollout:
        """Wait for a rollout; see `RolloutSource`."""
        while True:
            self._check_actors()
            got = self._receive()
            if isinstance(got, Failure):
                self.close()
                raise got.to_error()
            if got is not None:
                return unpack(got)
            while_waiting()

    def _receive(self) -> PackedRollout | Failure | None:
        """Wait a little for what an actor sends, and ask that actor for another rollout."""
        ready = wait([*self._pipes, *(process.sentinel for process in self._processes)], _LOOK_EVERY)
        for actor in self._turns:
            if self._pipes[actor] in ready:
                break
        else:
            return None
        try:
            got: PackedRollout | Failure = self._pipes[actor].recv()
        except Exception:
            self._processes[actor].join(_LOOK_EVERY)  # the end of a pipe is seen a little before that of its process
            self._check_actors()
            raise
        self._turns.remove(actor)
        self._turns.append(actor)
        self._request(actor)
        return got

    def close(self) -> None:
        """End the processes; those that do not hear, by force."""
        if not self._pipes:
            return
        self._signs.stop()
        for actor in range(len(self._pipes)):
            self._request(actor, False)
        deadline = time.monotonic() + _GRACE
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        kill(self._processes)
        for pipe in self._pipes:
            pipe.close()
        self._pipes.clear()
        atexit.unregister(self._at_exit)

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


def _ended(exit_code: int) -> str:
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    return f"was killed by {signal.Signals(-exit_code).name}"

"""Asynchronous actors in processes of this machine."""

from __future__ import annotations

import atexit
import contextlib
import functools
import pickle
import queue
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from typing import Any, cast

import torch
from lightning.pytorch import seed_everything
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
from lightning_rl.environments import EnvironmentFailure
from lightning_rl.environments.contract import EnvSettings, Failure, closed_on_failure
from lightning_rl.environments.workers import (
    kill,
    live_with_parent,
    pickle_shared,
    signals_waiting,
    start_context,
    to_shared_memory,
)
from lightning_rl.policies.actor_critic import copy_to_cpu
from lightning_rl.policies.interface import Policy
from lightning_rl.rollouts.rollout import Rollout
from lightning_rl.validation import ConfigurationError

# Seconds that all actors together get to end on their own; an interrupted learner has to end within five.
_GRACE = 2.0


class SharedWeights:
    """Parameters and buffers of a policy, and its version, in shared memory.

    A lock, held for one copy of the weights, prevents actors from reading half-written weights.
    """

    def __init__(self, policy: nn.Module, context: BaseContext) -> None:
        self._shared = [to_shared_memory(torch.zeros_like(x, device="cpu")) for x in weights_of(policy)]
        self._version = to_shared_memory(torch.full((1,), -1))
        self._lock = context.Lock()

    def publish(self, policy: nn.Module, version: int, while_locked: Callable[[], None] = lambda: None) -> None:
        """Make the weights of a policy, on any device, the ones that actors use from their next rollout on.

        While an actor holds the lock, `while_locked` is called twice a second, and its exceptions end the wait.
        """
        # Before the lock is taken: copies from another device wait for its queue.
        weights = [x.cpu() for x in weights_of(policy)]
        while not self._lock.acquire(timeout=POLL_SECONDS):
            while_locked()
        try:
            copy_weights(self._shared, weights)
            self._version.fill_(version)
        finally:
            self._lock.release()

    def read(self, policy: nn.Module) -> int:
        """Copy the newest weights into `policy`, on the CPU, and return their version."""
        with self._lock:
            copy_weights(weights_of(policy), self._shared)
            return int(self._version)


@contextlib.contextmanager
def exits_if(stopped: Tensor, _: str) -> Iterator[None]:
    """Do what is inside, a part of a step, unless the learner has set `stopped`: it needs no more rollouts."""
    if stopped:
        raise SystemExit
    yield


def run_actor(
    actor: int, setup: ActorSetup, module: nn.Module, weights: SharedWeights, stopped: Tensor, pipe: Connection
) -> None:
    """Collect a rollout for each `EnvSettings` in the `pipe`, and end with None; the main function of an actor."""
    live_with_parent()
    torch.set_num_threads(1)
    seed_everything(setup.seed_of(actor) % 2**32, verbose=False)  # for environments that use global generators
    requests = iter(functools.partial(_next_request, pipe), None)
    results: queue.SimpleQueue[Rollout | Failure] = queue.SimpleQueue()
    # A thread sends, so that the next rollout can begin while the pipe is full.
    threading.Thread(target=_send_all, args=(results, pipe), daemon=True).start()
    try:
        policy = cast(Policy, module.requires_grad_(False))
        with contextlib.closing(setup.start_sampler(module, actor)) as sampler:
            for settings in requests:
                sampler.set_env_settings(settings)
                rollout = sampler.collect(policy, weights.read(module), functools.partial(exits_if, stopped))
                results.put(pack(rollout, actor))
    except Exception as error:
        results.put(Failure.of(error))
        for _ in requests:  # until the learner has received the failure and ends the requests
            pass


def _next_request(pipe: Connection) -> EnvSettings | None:
    try:
        return cast(EnvSettings | None, pipe.recv())
    except (EOFError, OSError):  # the learner has ended
        return None


def _send_all(results: queue.SimpleQueue[Rollout | Failure], pipe: Connection) -> None:
    with contextlib.suppress(OSError):  # the learner has ended
        while True:
            result = results.get()
            try:
                message = pickle_shared(result)
            except ConfigurationError as error:
                message = pickle_shared(Failure.of(error))
            pipe.send_bytes(message)


class ProcessActors(Actors):
    """Processes that collect rollouts while the learner trains.

    Each process has environments and a copy of the policy, and `rollouts_ahead` requests for rollouts. If several
    rollouts are ready, the learner takes one from the actor that was served least recently. Each actor has a separate
    pipe, so a killed process does not block the others. A policy that cannot be sent raises a `ConfigurationError`.
    """

    def __init__(self, options: ActorConfig, setup: ActorSetup, policy: nn.Module, version: int) -> None:
        super().__init__(options, setup, version)
        context = start_context(options.start_method)
        self._weights = SharedWeights(policy, context)
        self._weights.publish(policy, version)
        # Shared memory: the learner needs no more rollouts.
        self._stopped = to_shared_memory(torch.zeros(1, dtype=torch.bool))
        self._checked = time.monotonic()
        self._since = [self._checked] * options.count  # the start or the latest result of each actor
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        # Settings in the requests of each actor that it has not answered, the oldest first.
        self._requested: list[deque[EnvSettings]] = [deque() for _ in range(options.count)]
        # Runs before multiprocessing's own exit handler, which sends a signal that actors ignore, and waits.
        self._at_exit = functools.partial(kill, self._processes)
        atexit.register(self._at_exit)
        with signals_waiting(), closed_on_failure(self):
            self._start(context, copy_to_cpu(policy))

    def _start(self, context: Any, policy: nn.Module) -> None:  # multiprocessing types no `Process` here
        for actor in range(self.options.count):
            own, theirs = context.Pipe()
            args = (actor, self.setup, policy, self._weights, self._stopped, theirs)
            process = context.Process(target=run_actor, args=args, name=f"actor {actor}", daemon=True)
            try:
                process.start()
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                method = context.get_start_method()
                raise ConfigurationError(
                    f"actors.start_method={method!r} cannot send the policy or env.kwargs to a process ({error}): "
                    "expected classes and functions that can be imported, or 'fork' where the system has it"
                ) from error
            theirs.close()  # so that the end of the process closes the pipe
            self._processes.append(process)
            self._pipes.append(own)
            for _ in range(self.options.rollouts_ahead):
                self._request(actor)

    def _request(self, actor: int, another: bool = True) -> None:
        settings = self.setup.sampler.settings
        self._requested[actor].append(settings)
        with contextlib.suppress(OSError):  # the process has ended; `_check_actors` raises
            self._pipes[actor].send(settings if another else None)

    def send_policy(self, policy: nn.Module, version: int) -> None:
        self._weights.publish(policy, version, self._check_actors)

    def receive(self) -> Rollout | None:
        self._check_actors()
        ready = wait([*self._pipes, *(process.sentinel for process in self._processes)], POLL_SECONDS)
        answered = [actor for actor, pipe in enumerate(self._pipes) if pipe in ready]
        if not answered:
            return None
        actor = min(answered, key=lambda actor: self._since[actor])
        try:
            received: Rollout | Failure = self._pipes[actor].recv()
        except Exception:
            self._processes[actor].join(POLL_SECONDS)  # the pipe closes a little before the process ends
            self._check_actors()
            raise
        rollout = unpack(received, actor)
        rollout.has_old_settings = self._requested[actor].popleft() is not self.setup.sampler.settings
        self._since[actor] = time.monotonic()
        self._request(actor)
        return rollout

    def close(self) -> None:
        """End the processes, those that do not end in time by force."""
        if not self._pipes:
            return
        self._stopped.fill_(True)
        for actor in range(len(self._pipes)):
            self._request(actor, False)
        kill(self._processes, grace=_GRACE)
        for pipe in self._pipes:
            pipe.close()
        self._pipes.clear()
        atexit.unregister(self._at_exit)

    def _check_actors(self) -> None:
        limit, now = self.options.timeout, time.monotonic()
        # Ctrl-Z or a scheduler may have stopped the run with its actors: at most a quarter of the limit counts.
        if (stopped := now - self._checked - max(1.0, limit / 4)) > 0:
            self._since = [min(since + stopped, now) for since in self._since]
        self._checked = now
        for index, process in enumerate(self._processes):
            if not process.is_alive():
                code = process.exitcode
                how = f"ended with exit code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
                problem = f"is gone: its process {process.pid} {how}"
            elif now - self._since[index] > limit and not self._pipes[index].poll():
                problem = (
                    f"gave no rollout within actors.timeout={limit:g} seconds: its process {process.pid} was ended"
                )
                kill([process])
            else:
                continue
            raise EnvironmentFailure(f"{self.setup.describe(index)} {problem}")

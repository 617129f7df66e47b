"""Environments in worker processes, with timeouts and replacement."""

from __future__ import annotations

import atexit
import contextlib
import functools
import inspect
import multiprocessing
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.vector.async_vector_env import AsyncState, _async_worker
from gymnasium.vector.utils import CloudpickleWrapper, clear_mpi_env_vars, concatenate, iterate

from lightning_rl.environments.contract import (
    FAILURE,
    LOST,
    MAX_RESTARTS_IN_A_ROW,
    EnvironmentFailure,
    WorkerFailure,
    give_up,
)
from lightning_rl.environments.seeding import EpisodeTracker

# Seconds that all workers together get to close their environments before they are ended by force.
_GRACE = 5.0
_LEFT_TO_PARENT = [
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2") if hasattr(signal, name)
]
Factory = Callable[[], gymnasium.Env[Any, Any]]


class LocalVectorEnv(SyncVectorEnv):
    """`SyncVectorEnv` that can call a method of every environment with arguments of its own."""

    def call_each(self, name: str, arguments: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
        """Call a method of every environment with arguments of its own."""
        return tuple(env.get_wrapper_attr(name)(*args) for env, args in zip(self.envs, arguments, strict=True))


class ProcessVectorEnv(AsyncVectorEnv):
    """`AsyncVectorEnv` with a time limit on every answer, and workers that are gone after any failure.

    Args:
        factories: One for each environment.
        autoreset_mode: As in `AsyncVectorEnv`.
        timeout: Seconds that the workers may take to make an environment, for a step or a reset.
        described: Has the spaces of each environment: none is made in this process.
        shared_memory: Pass observations through shared memory.
    """

    def __init__(
        self,
        factories: Sequence[Factory],
        autoreset_mode: AutoresetMode,
        timeout: float,
        described: gymnasium.Env[Any, Any],
        shared_memory: bool = True,
    ) -> None:
        self.timeout = timeout
        in_workers = [functools.partial(_make_in_worker, os.getpid(), described, factory) for factory in factories]
        with none_left_on_failure():
            super().__init__(in_workers, shared_memory, copy=False, autoreset_mode=autoreset_mode)
        # Before multiprocessing asks them to end, which they do not hear, and waits.
        self._at_exit = functools.partial(kill, self.processes)
        atexit.register(self._at_exit)

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:  # noqa: ANN401
        """Step every environment.

        Raises:
            WorkerFailure: A worker died, took longer than the limit, or raised outside its environment.
            EnvironmentFailure: An environment raised.
        """
        with self._guarded():
            self.step_async(actions)
            return self.step_wait(self.timeout)

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset every environment; raises as `step` does."""
        with self._guarded():
            self.reset_async(seed, options)
            return self.reset_wait(self.timeout)

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:  # noqa: ANN401
        """Call a method of every environment; raises as `step` does."""
        with self._guarded():
            self.call_async(name, *args, **kwargs)
            return tuple(self.call_wait(self.timeout))

    def call_each(self, name: str, arguments: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
        """Call a method of every environment with arguments of its own; raises as `step` does."""
        with self._guarded():
            for pipe, args in zip(self.parent_pipes, arguments, strict=True):
                pipe.send(("_call", (name, args, {})))
            self._state = AsyncState.WAITING_CALL
            return tuple(self.call_wait(self.timeout))

    def close_extras(self, timeout: float | None = None, terminate: bool = False) -> None:
        """End the workers, politely where they answer in time; may be called in any state."""
        if not terminate:
            for pipe in self.parent_pipes:
                with contextlib.suppress(OSError):
                    pipe.send(("close", None))
            deadline = time.monotonic() + (_GRACE if timeout is None else timeout)
            for process in self.processes:
                process.join(max(0.0, deadline - time.monotonic()))
        kill(self.processes)
        if hasattr(self, "_at_exit"):
            atexit.unregister(self._at_exit)
        for pipe in self.parent_pipes:
            pipe.close()

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Name the workers that do not answer; leave none behind."""
        try:
            yield
        except multiprocessing.TimeoutError as error:
            hung = [index for index, pipe in enumerate(self.parent_pipes) if not pipe.poll(0)]
            self.close(terminate=True)
            raise WorkerFailure(hung, f"gave no answer within env.step_timeout={self.timeout:g} seconds") from error
        except (EOFError, OSError) as error:
            for process in self.processes:  # the end of a pipe is seen a little before the end of its process
                process.join(0.1)
            dead = {index: p.exitcode for index, p in enumerate(self.processes) if not p.is_alive()}
            self.close(terminate=True)
            codes = ", ".join(map(str, dead.values()))
            raise WorkerFailure(list(dead), f"is gone: its worker process died with exit code {codes}") from error
        except BaseException:
            self.close(terminate=True)
            raise

    def _check_spaces(self) -> None:
        # Overrides a private method of Gymnasium, which waits for the workers without a time limit.
        expected = {"observation_space": self.single_observation_space, "action_space": self.single_action_space}
        with self._guarded():
            for name, space in expected.items():
                self.call_async(name)
                for index, other in enumerate(self.call_wait(self.timeout)):
                    if other != space:
                        raise RuntimeError(f"environment {index} has {name}={other}, expected {space} as environment 0")

    def _raise_if_errors(self, successes: Iterable[bool]) -> None:
        """Raise what the first worker to fail reported, with its traceback as a note instead of in the log."""
        if all(successes):
            return
        try:
            index, kind, value, trace = self.error_queue.get(timeout=self.timeout)
        except queue.Empty:
            raise EOFError from None  # it died before it could say why
        failure: Exception
        if issubclass(kind, EnvironmentFailure):
            failure = EnvironmentFailure(value)
        else:
            failure = WorkerFailure([index], f"raised in its worker process: {kind.__name__}: {value}")
        failure.add_note(f"In its worker process:\n{trace}")
        raise failure


def _make_in_worker(parent_pid: int, described: gymnasium.Env[Any, Any], factory: Factory) -> gymnasium.Env[Any, Any]:
    """Make an environment, in a worker process that lives as long as its parent; there return its description."""
    if os.getpid() == parent_pid:
        return described
    live_with_parent()
    return factory()


def live_with_parent() -> None:
    """In a worker process, see to it that it ends with its parent, and not before.

    A daemon process is ended by a parent that exits, not by one that is killed; and a worker that is busy, or whose
    pipe a sibling holds open, does not notice on its own.
    """
    if (parent := multiprocessing.parent_process()) is None:
        return
    # A terminal and a scheduler send these to every process of a run; the first one decides what becomes of it.
    for signum in _LEFT_TO_PARENT:
        signal.signal(signum, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _LEFT_TO_PARENT)
    threading.Thread(target=_exit_after, args=(parent,), daemon=True).start()


@contextlib.contextmanager
def none_left_on_failure() -> Iterator[None]:
    """Leave no process that was started within, if that fails.

    Of one that nobody knows of multiprocessing would wait for the end at exit: for ever, since it does not hear.
    """
    before = set(multiprocessing.active_children())
    try:
        yield
    except BaseException:
        kill(set(multiprocessing.active_children()) - before)
        raise


@contextlib.contextmanager
def signals_waiting() -> Iterator[None]:
    """Let the signals that are left to the parent wait, in this thread and in the processes that it starts within.

    A process begins with what is blocked in the one that starts it. It would be ended by a Ctrl-C otherwise, which a
    terminal sends to every process, until `live_with_parent`.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _LEFT_TO_PARENT)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def kill(processes: Iterable[Any]) -> None:
    """End processes by force, and wait for their end."""
    alive = [process for process in processes if process.is_alive()]
    for process in alive:
        process.kill()
    for process in alive:
        process.join(1.0)


def _exit_after(parent: Any) -> None:  # noqa: ANN401 - multiprocessing has no public name for it
    parent.join()
    os._exit(1)


Answer = Any
"""Of a worker: what its environment returned; None if the worker is lost."""


class RestartingProcesses(ProcessVectorEnv):
    """`ProcessVectorEnv` that puts a new worker in the place of one that died or hung, and leaves the others alone.

    The step that a worker was lost in has no outcome, as in `RestartingEpisodes`, of which all environments are. In
    `SAME_STEP` mode only. Observations come through the pipes: what is shared cannot be given to a new process.

    Args:
        factories: One for each environment.
        autoreset_mode: As in `AsyncVectorEnv`.
        timeout: Seconds that the workers may take to make an environment, for a step or a reset.
        described: Has the spaces of each environment.

    Attributes:
        tracker: Where every environment is: a lost process cannot say.
    """

    def __init__(
        self,
        factories: Sequence[Factory],
        autoreset_mode: AutoresetMode,
        timeout: float,
        described: gymnasium.Env[Any, Any],
    ) -> None:
        self.tracker = EpisodeTracker([], None)
        self._lost: dict[int, str] = {}
        self._losses_in_a_row = [0] * len(factories)
        super().__init__(factories, autoreset_mode, timeout, described, shared_memory=False)

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:  # noqa: ANN401
        """Step every environment, or begin an episode in a new process.

        Raises:
            EnvironmentFailure: An environment failed again and again.
        """
        with self._guarded():
            answers = self._ask([("step", action) for action in iterate(self.action_space, actions)])
            for index, answer in enumerate(answers):
                if answer is None:
                    observation, info = self.replace(index)
                    answers[index] = observation, 0.0, False, False, info | {LOST: True}
                elif LOST not in answer[4]:
                    self._losses_in_a_row[index] = 0
            rows, rewards, terminated, truncated, infos = zip(*answers, strict=True)
            flags = np.array(terminated, np.bool_), np.array(truncated, np.bool_)
            return self._join(rows), np.array(rewards, np.float64), *flags, self._join_infos(infos)

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset every environment; raises as `step` does."""
        seeds = seed if isinstance(seed, list) else [None if seed is None else seed + i for i in range(self.num_envs)]
        with self._guarded():
            answers = self._ask([("reset", {"seed": one, "options": options}) for one in seeds])
            answers = [self.replace(i) if answer is None else answer for i, answer in enumerate(answers)]
            rows, infos = zip(*answers, strict=True)
            return self._join(rows), self._join_infos(infos)

    def call_each(self, name: str, arguments: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
        """Call a method of every environment with arguments of its own; None comes from a lost one."""
        with self._guarded():
            return tuple(self._ask([("_call", (name, args, {})) for args in arguments]))

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:  # noqa: ANN401
        """Call a method of every environment; None comes from a lost one."""
        with self._guarded():
            return tuple(self._ask([("_call", (name, args, kwargs))] * self.num_envs))

    def replace(self, index: int) -> tuple[Any, dict[str, Any]]:
        """Start a process in the place of a lost one, and begin the next episode of its stream there.

        Returns:
            The first observation and the `info` of the reset.

        Raises:
            EnvironmentFailure: That failed too, again and again.
        """
        stream_seed, episode, step = self.tracker.where(index)
        failures: list[str] = []
        while True:
            failures.append(f"{self.tracker.label_at(index, episode, step)} {self._lost.pop(index)}")
            self._losses_in_a_row[index] += 1
            if self._losses_in_a_row[index] > MAX_RESTARTS_IN_A_ROW:
                give_up(EnvironmentFailure(failures[-1]))
            self._start(index)
            self._send(index, ("_call", ("go_on", (stream_seed, episode), {})))
            answer = self._receive(index, time.monotonic() + self.timeout)
            if answer is not None:
                observation, info = answer
                return observation, info | {FAILURE: failures + info.get(FAILURE, [])}
            episode, step = episode + 1, 0  # where it was lost this time

    def _start(self, index: int) -> None:
        """Start a worker as `AsyncVectorEnv` does."""
        context = multiprocessing.get_context(self.context)
        self.parent_pipes[index], child_pipe = context.Pipe()
        factory = CloudpickleWrapper(self.env_fns[index])
        pipes = child_pipe, self.parent_pipes[index]
        arguments: tuple[Any, ...] = (index, factory, *pipes, None, self.error_queue, self.autoreset_mode, None)
        # The last argument came with Gymnasium 1.4.
        arguments = arguments[: len(inspect.signature(_async_worker).parameters)]
        process = context.Process(  # type: ignore[attr-defined]
            target=_async_worker, args=arguments, name=f"Worker<{type(self).__name__}>-{index}", daemon=self.daemon
        )
        with clear_mpi_env_vars():
            process.start()
        child_pipe.close()
        self.processes[index] = process

    def _ask(self, messages: Sequence[tuple[str, Any]]) -> list[Answer]:
        """Send every worker a message, and wait for the answers."""
        for index, message in enumerate(messages):
            self._send(index, message)
        deadline = time.monotonic() + self.timeout
        return [self._receive(index, deadline) for index in range(self.num_envs)]

    def _send(self, index: int, message: tuple[str, Any]) -> None:
        if index not in self._lost:
            try:
                self.parent_pipes[index].send(message)
            except OSError:
                self._lose(index)

    def _receive(self, index: int, deadline: float) -> Answer:
        if index in self._lost:
            return None
        try:
            if not self.parent_pipes[index].poll(max(0.0, deadline - time.monotonic())):
                self._lose(index, f"gave no answer within env.step_timeout={self.timeout:g} seconds")
                return None
            answer, success = self.parent_pipes[index].recv()
        except (EOFError, OSError):
            self._lose(index)
            return None
        self._raise_if_errors([success])
        return answer

    def _lose(self, index: int, what: str | None = None) -> None:
        """Give a worker up that is dead, or that must never answer late."""
        process = self.processes[index]
        if what is None:
            process.join(1.0)  # the end of a pipe is seen a little before the end of its process
            what = f"is gone: its worker process died with exit code {process.exitcode}"
        process.kill()
        process.join(1.0)
        self.parent_pipes[index].close()
        self._lost[index] = what

    def _join(self, rows: Sequence[Any]) -> Any:  # noqa: ANN401
        self.observations = concatenate(self.single_observation_space, rows, self.observations)
        return self.observations

    def _join_infos(self, infos: Sequence[dict[str, Any]]) -> dict[str, Any]:
        joined: dict[str, Any] = {}
        for index, info in enumerate(infos):
            joined = self._add_info(joined, info, index)
        return joined

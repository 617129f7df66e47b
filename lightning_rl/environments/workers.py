"""Environments in worker processes, with timeouts and replacement."""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import gc
import multiprocessing
import os
import pickle
import reprlib
import signal
import tempfile
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from multiprocessing.reduction import ForkingPickler
from operator import itemgetter, setitem
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector.utils import CloudpickleWrapper, clear_mpi_env_vars, iterate
from torch import Tensor

from lightning_rl.environments.batch import ChooseAhead, EnvironmentPool, EnvironmentServer, Factory, Message, together
from lightning_rl.environments.contract import (
    FAILURE,
    LOST,
    MAX_RESTARTS_IN_A_ROW,
    Array,
    EnvironmentFailure,
    Failure,
    WorkerFailure,
    give_up,
    listed,
)
from lightning_rl.nested import Nested, first_leaf, map_leaves, map_space
from lightning_rl.validation import ConfigurationError

# Seconds that all workers together have to close their environments before they are killed.
_GRACE = 5.0
# Minimum seconds for the start of a process that is not forked: it imports PyTorch and the script of the user first.
_START = 120.0
# Attributes of an environment that its vector environment needs.
DESCRIBED = ("observation_space", "action_space", "metadata", "render_mode")
_LEFT_TO_PARENT = [
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2") if hasattr(signal, name)
]


class WorkerPool(EnvironmentPool):
    """A vector environment with one worker process per environment and a time limit on every answer.

    Observations live in shared memory: `step` and `reset` return the same arrays each time. A worker that dies, hangs
    or raises closes the pool. With `replaces_workers` a new process replaces a dead or hanging worker: the step has no
    outcome, and the next episode of the environment's stream begins. Replacement needs `RestartingEpisodes`.

    Args:
        factories: Make the environments, one per worker; this process makes no environment.
        timeout: Maximum seconds for each step, reset or call, and to make an environment in a forked process.

    Attributes:
        choose_ahead: Chooses the next actions of the first half of the environments while the second half still steps,
            in the next call of `step`; the call after that ignores the actions of the first half.
    """

    def __init__(self, factories: Sequence[Factory], timeout: float, replaces_workers: bool = False) -> None:
        self.num_envs = len(factories)
        self.timeout = timeout
        self._factories = factories
        self._replaces_workers = replaces_workers
        self._context = start_context()
        # Exit codes of lost workers; None if a worker hung.
        self._lost: dict[int, str | None] = {}
        self._losses_in_a_row = [0] * self.num_envs
        self._steps_per_answer = 1
        self.choose_ahead: ChooseAhead | None = None
        self.steps_ahead = self.num_envs > 1
        self._ahead = range(0)  # environments that already run the next step
        self.processes: list[Any] = []
        self.pipes: list[Any] = []
        # Runs before multiprocessing sends SIGTERM, which the workers ignore, and waits for them.
        self._at_exit = functools.partial(kill, self.processes)
        atexit.register(self._at_exit)
        with self._guarded():
            for index in range(self.num_envs):
                self._start(index)
            found = self._answers(range(self.num_envs), self._time_to_start())
            if self._lost:
                raise self._failure(self._lost)
            super().__init__([one.fn for one in found])
            self._memory = map_space(self._allocate, self.single_observation_space)
            self.observations = as_arrays(self._memory, self.single_observation_space)
            for index in range(self.num_envs):
                self._share(index)
        # Returned by steps in halves, whose first half already writes its next observations to shared memory.
        self._kept = map_leaves(np.array, self.observations)

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step every environment; raise an `EnvironmentFailure` if one raised or was lost too often in a row.

        A worker that raised outside its environment, or was lost and is not replaced, raises a `WorkerFailure`.
        """
        choose, self.choose_ahead = self.choose_ahead, None
        with self._guarded():
            stepping, self._ahead = self._ahead, range(0)
            taken = enumerate(iterate(self.action_space, actions))
            self._send({index: ("step", action) for index, action in taken if index not in stepping})
            if choose is None:
                observations, outcomes = self.observations, self._outcomes(range(self.num_envs))
            else:
                observations, outcomes = self._step_in_halves(choose)
            return observations, *together(outcomes)

    def ask(self, messages: Mapping[int, Message]) -> list[Any]:
        """Send messages to workers and return their answers in the same order; None for a lost worker."""
        with self._guarded():
            self._answers(self._ahead)  # discards steps of an interrupted rollout
            self._ahead = range(0)
            self._send(messages)
            return self._answers(list(messages))

    def restore(self, records: list[dict[str, Any]]) -> tuple[Array, Nested, dict[str, Any]]:
        # A replay takes a step for each action, after a reset.
        self._steps_per_answer += max(len(first_leaf(record.get("actions", np.zeros(0)))) for record in records)
        restored = super().restore(records)
        self._steps_per_answer = 1
        return restored

    def replace(self, index: int) -> tuple[Any, dict[str, Any]]:
        """Replace a lost worker and begin the next episode of its stream; return first observation and `info`.

        Too many losses in a row raise an `EnvironmentFailure`.
        """
        stream_seed, episode, step = self.tracker.where(index)
        failures: list[str] = []
        with self._guarded():
            while index in self._lost:
                lost = self._failure({index: self._lost.pop(index)})
                failures.append(f"{self.tracker.label_at(index, episode, step)} {lost.what}")
                self._losses_in_a_row[index] += 1
                if self._losses_in_a_row[index] > MAX_RESTARTS_IN_A_ROW:
                    give_up(EnvironmentFailure(failures[-1]))
                self._start(index)
                # The description, unless the new process is lost too.
                self._answers([index], self._time_to_start())
                self._share(index)
                arguments = {"stream_seed": stream_seed, "episode": episode, "settings": self.settings}
                self._send({index: ("next_episode", arguments)})
                (info,) = self._answers([index])
                episode, step = episode + 1, 0  # the episode in which the replacement may have been lost
        return map_leaves(itemgetter(index), self.observations), info | {FAILURE: failures + info.get(FAILURE, [])}

    def close_extras(self, terminate: bool = False) -> None:
        """End the workers, and kill those that do not end in time; may be called in any state."""
        deadline = time.monotonic() + _GRACE
        running = [] if terminate else [pipe for pipe in self.pipes if not pipe.closed]
        for pipe in running:
            with contextlib.suppress(OSError):
                send(pipe, None)
        # A worker cannot close its environment before a large answer, such as an info with an image, has been read.
        while running and (ready := wait(running, max(0.0, deadline - time.monotonic()))):
            for pipe in [pipe for pipe in running if pipe in ready]:
                try:
                    pipe.recv_bytes()
                except (EOFError, OSError):
                    running.remove(pipe)
        kill(self.processes, grace=0.0 if terminate else max(0.0, deadline - time.monotonic()))
        atexit.unregister(self._at_exit)
        for pipe in self.pipes:
            pipe.close()

    def __del__(self) -> None:
        if hasattr(self, "_at_exit"):
            self.close(terminate=True)

    def _step_in_halves(self, choose: ChooseAhead) -> tuple[Any, list[Any]]:
        count = self.num_envs // 2
        outcomes = self._outcomes(range(count))
        map_leaves(lambda kept, x: setitem(kept, slice(count), x[:count]), self._kept, self.observations)
        if (actions := choose(count, self._kept)) is not None:
            self._ahead = range(count)
            taken = zip(self._ahead, iterate(self.action_space, actions), strict=False)
            self._send({index: ("step", action) for index, action in taken})
        outcomes += self._outcomes(range(count, self.num_envs))
        map_leaves(lambda kept, x: setitem(kept, slice(count, None), x[count:]), self._kept, self.observations)
        return self._kept, outcomes

    def _outcomes(self, indices: range) -> list[Any]:
        """Return (reward, terminated, truncated, `info`) of some environments, and replace lost workers."""
        outcomes = self._answers(indices)
        if self._replaces_workers:
            for place, index in enumerate(indices):
                if outcomes[place] is None:
                    outcomes[place] = 0.0, False, False, self.replace(index)[1] | {LOST: True}
                elif LOST not in outcomes[place][3]:
                    self._losses_in_a_row[index] = 0
        return outcomes

    def _start(self, index: int) -> None:
        pipe, child_pipe = multiprocessing.Pipe()
        self.pipes[index : index + 1] = [pipe]  # appends the first one
        args = index, CloudpickleWrapper(self._factories[index]), child_pipe
        process = self._context.Process(target=_work, args=args, name=f"Worker-{index}", daemon=True)
        with signals_waiting(), clear_mpi_env_vars():
            process.start()
            self.processes[index : index + 1] = [process]
        child_pipe.close()

    def _allocate(self, space: gymnasium.Space[Any]) -> Tensor:
        """Return shared memory for the observations `[B, ...]` of a leaf, in bytes."""
        size = np.zeros(space.shape or (), space.dtype).nbytes
        return to_shared_memory(torch.zeros(self.num_envs, size, dtype=torch.uint8))

    def _share(self, index: int) -> None:
        memory = pickle_shared(self._memory)
        with contextlib.suppress(OSError):  # the next message finds that the worker has ended
            self.pipes[index].send_bytes(memory)

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        if self.closed:
            raise gymnasium.error.ClosedEnvironmentError(f"{self} is closed")
        try:
            yield
        except BaseException as error:
            self.close(terminate=not isinstance(error, Exception))  # not at once: environments end their programs
            raise

    def _send(self, messages: Mapping[int, Message]) -> None:
        for index, message in messages.items():
            if index not in self._lost:
                try:
                    send(self.pipes[index], message)
                except OSError:
                    self._lose(index)

    def _time_to_start(self) -> float:
        return self.timeout if self._context.get_start_method() == "fork" else max(self.timeout, _START)

    def _answers(self, indices: Sequence[int], timeout: float | None = None) -> list[Any]:
        limit = self.timeout * self._steps_per_answer if timeout is None else timeout
        limit = min(limit, 1e6)  # `poll` takes milliseconds in 32 bits
        deadline = time.monotonic() + limit
        answers = [self._receive(index, deadline, limit) for index in indices]
        if self._lost and not self._replaces_workers:
            raise self._failure(self._lost)
        return answers

    def _receive(self, index: int, deadline: float, limit: float) -> Any:  # any answer
        if index in self._lost:
            return None
        try:
            while not self.pipes[index].poll(max(0.0, deadline - time.monotonic())):
                if time.monotonic() < deadline + 1.0:
                    return self._lose(index, hangs=True)
                deadline = time.monotonic() + limit  # the run was stopped, by Ctrl-Z or a scheduler, and continued
            answer = pickle.loads(self.pipes[index].recv_bytes())
        except (EOFError, OSError):
            return self._lose(index)
        if isinstance(answer, Failure):
            name = "its worker process"
            raise answer.to_error(name, lambda text: WorkerFailure([index], f"raised in {name}: {text}"))
        return answer

    def _lose(self, index: int, hangs: bool = False) -> None:
        """Mark a worker as lost, and kill it, so that a late answer cannot arrive."""
        process = self.processes[index]
        if not hangs:
            process.join(1.0)  # a pipe closes a little before its process ends
        self._lost[index] = None if hangs else str(process.exitcode)
        kill([process])
        self.pipes[index].close()

    def _failure(self, lost: Mapping[int, str | None]) -> WorkerFailure:
        dead = {index: code for index, code in lost.items() if code is not None}
        if dead:
            codes = listed(dead.values())
            return WorkerFailure(list(dead), f"is gone: its worker process died with exit code {codes}")
        return WorkerFailure(list(lost), f"gave no answer within env.step_timeout={self.timeout:g} seconds")


def to_shared_memory(x: Tensor) -> Tensor:
    """Move a tensor to shared memory, in place; a `ConfigurationError` says that there is too little of it."""
    try:
        return x.share_memory_()  # type: ignore[no-untyped-call, no-any-return]
    except RuntimeError as error:
        if os.strerror(errno.ENOSPC) not in str(error):
            raise
        size = f"{x.nbytes:,} bytes of shared memory are needed, and /dev/shm is full"
        raise ConfigurationError(f"{size}: free or enlarge it, in Docker with --shm-size=1g (default: 64m)") from error


def send(pipe: Any, message: Any) -> None:  # a connection, and any message
    """Pickle and send a message in half the time of `pipe.send`, with tensors by value."""
    pipe.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))


def pickle_shared(message: Any) -> Any:  # bytes
    """Pickle a message with tensors in shared memory; a `ConfigurationError` says why they cannot be sent."""
    try:
        return ForkingPickler.dumps(message)
    except OSError as error:
        raise ConfigurationError(
            f"shared memory cannot be sent to another process ({error}): this needs a file descriptor and a socket in "
            f"TMPDIR={tempfile.gettempdir()!r}, expected to be a folder that can be written, with a path of at most 75 "
            "characters"
        ) from error


def as_arrays(memory: Nested, space: gymnasium.Space[Any]) -> Nested:
    """Return the arrays `[B, ...]` of a space in shared memory."""

    def view(leaf: gymnasium.Space[Any], bytes_: Tensor) -> Any:  # an array
        return bytes_.numpy().view(np.zeros(0, leaf.dtype).dtype).reshape(len(bytes_), *(leaf.shape or ()))

    return map_leaves(view, map_space(lambda leaf: leaf, space), memory)


def _work(index: int, make: Factory, pipe: Any) -> None:  # a connection
    """Describe an environment, receive the memory for observations, and serve it until a message None or a failure."""
    live_with_parent()
    torch.set_num_threads(1)  # an environment may act with a policy; a forked process hangs in threads of its parent
    env = None
    try:
        env = make()
        described: Any = SimpleNamespace(**{part: getattr(env, part) for part in DESCRIBED})
        send(pipe, CloudpickleWrapper(described))  # spaces may have lambdas
        memory = pickle.loads(pipe.recv_bytes())
        server = EnvironmentServer(env, index, as_arrays(memory, env.observation_space))
        while (message := pickle.loads(pipe.recv_bytes())) is not None:
            answer = server.answer(*message)
            try:
                send(pipe, answer)
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                problem = f"cannot send {reprlib.repr(answer)} to another process ({error})"
                raise TypeError(f"{problem}: expected an info of values that can be pickled") from error
    except BaseException as error:
        with contextlib.suppress(OSError):
            send(pipe, Failure.of(error))
    finally:
        if env is not None:
            env.close()


def start_context(method: str | None = None) -> Any:  # multiprocessing types no `Process` of a context
    """Return the context of a start method, by default of Python's default, but `spawn` in place of `forkserver`."""
    # The processes of a fork server do not inherit the signals that this process blocks.
    method = method or multiprocessing.get_start_method()
    if method != "fork" and hasattr(signal, "pthread_sigmask"):
        resource_tracker.ensure_running()  # its start unblocks signals
    return multiprocessing.get_context("spawn" if method == "forkserver" else method)


def live_with_parent() -> None:
    """In a worker process: ignore signals that are meant for the parent, keep its objects, and exit when it ends.

    Python does not end daemon processes of a killed parent, and a busy worker does not notice a closed pipe.
    """
    if (parent := multiprocessing.parent_process()) is None:
        return
    gc.freeze()  # unused objects of the parent may refer to threads, which a forked process does not have
    # Terminals and schedulers send these signals to every process of a run; the parent decides how the run ends.
    for signum in _LEFT_TO_PARENT:
        signal.signal(signum, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _LEFT_TO_PARENT)
    threading.Thread(target=_exit_after, args=(parent,), daemon=True).start()


def _exit_after(parent: Any) -> None:  # multiprocessing has no public type for it
    parent.join()
    os._exit(1)


@contextlib.contextmanager
def signals_waiting() -> Iterator[None]:
    """Block the signals of `live_with_parent` in this thread, and in the processes that the block starts.

    A new process inherits the blocked signals; otherwise Ctrl-C could end it before it calls `live_with_parent`.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _LEFT_TO_PARENT)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def kill(processes: Collection[Any], grace: float = 0.0) -> None:
    """Kill the processes that do not end by themselves within `grace` seconds, and wait until they have ended."""
    deadline = time.monotonic() + grace
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    alive = [process for process in processes if process.is_alive()]
    for process in alive:
        process.kill()
    for process in alive:
        process.join(1.0)

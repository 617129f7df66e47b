"""Environments in worker processes, with timeouts and replacement."""

from __future__ import annotations

import atexit
import contextlib
import functools
import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter, setitem
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import (
    CloudpickleWrapper,
    clear_mpi_env_vars,
    create_shared_memory,
    iterate,
    read_from_shared_memory,
)

from lightning_rl.environments.batch import ChooseAhead, EnvironmentPool, EnvironmentServer, Factory, Message, together
from lightning_rl.environments.contract import (
    FAILURE,
    LOST,
    MAX_RESTARTS_IN_A_ROW,
    EnvironmentFailure,
    Failure,
    WorkerFailure,
    give_up,
)
from lightning_rl.nested import map_leaves

# Seconds that all workers together have to close their environments before they are killed.
_GRACE = 5.0
_LEFT_TO_PARENT = [
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2") if hasattr(signal, name)
]


class Description(NamedTuple):
    """The attributes of an environment in another process that its vector environment needs."""

    observation_space: gymnasium.Space[Any]
    action_space: gymnasium.Space[Any]
    metadata: dict[str, Any]
    render_mode: str | None


class WorkerPool(EnvironmentPool):
    """A vector environment with one worker process per environment and a time limit on every answer.

    Observations live in shared memory: `step` and `reset` return the same arrays each time. A worker that dies, hangs
    or raises closes the pool. With `replaces_workers` a new process replaces a dead or hanging worker: the step has no
    outcome, and the next episode of the environment's stream begins. Replacement needs `RestartingEpisodes` and
    `SAME_STEP` mode.

    Args:
        factories: Make the environments, one per worker.
        autoreset_mode: When the workers reset their environments.
        timeout: Maximum seconds to make an environment, and for each step, reset or call.
        described: The spaces of each environment; this process makes no environment.

    Attributes:
        choose_ahead: Chooses the next actions of the first half of the environments while the second half still steps,
            in the next call of `step`; the call after that ignores the actions of the first half.
    """

    def __init__(
        self,
        factories: Sequence[Factory],
        autoreset_mode: AutoresetMode,
        timeout: float,
        described: Description,
        replaces_workers: bool = False,
    ) -> None:
        super().__init__(described, len(factories), autoreset_mode)
        self.timeout = timeout
        self._factories = factories
        self._mode = autoreset_mode
        self._replaces_workers = replaces_workers
        # Exit codes of lost workers; None if a worker hung.
        self._lost: dict[int, str | None] = {}
        self._losses_in_a_row = [0] * self.num_envs
        self._shared = create_shared_memory(self.single_observation_space, self.num_envs)
        self.observations = read_from_shared_memory(self.single_observation_space, self._shared, self.num_envs)
        # Returned by steps in halves, whose first half already writes its next observations to shared memory.
        self._kept = map_leaves(np.array, self.observations)
        self.choose_ahead: ChooseAhead | None = None
        self.steps_ahead = autoreset_mode is AutoresetMode.SAME_STEP and self.num_envs > 1
        self._ahead = range(0)  # environments that already run the next step
        self.processes: list[Any] = [None] * self.num_envs
        self.pipes: list[Any] = [None] * self.num_envs
        with none_left_on_failure():
            for index in range(self.num_envs):
                self._start(index)
            found = self._ask(dict.fromkeys(range(self.num_envs), ("describe",)))
            if self._lost:
                raise self._failure(self._lost)
            self.check_spaces(one.fn for one in found)
        # Runs before multiprocessing sends SIGTERM, which the workers ignore, and waits for them.
        self._at_exit = functools.partial(kill, self.processes)
        atexit.register(self._at_exit)

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:  # noqa: ANN401
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
            return self._ask(messages)

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
                arguments = {"stream_seed": stream_seed, "episode": episode, "settings": self.settings}
                self._send({index: ("next_episode", arguments)})
                (info,) = self._answers([index])
                episode, step = episode + 1, 0  # the episode in which the replacement may have been lost
        return map_leaves(itemgetter(index), self.observations), info | {FAILURE: failures + info.get(FAILURE, [])}

    def close_extras(self, terminate: bool = False) -> None:
        """End the workers, and kill those that do not end in time; may be called in any state."""
        if not terminate:
            for pipe in self.pipes:
                with contextlib.suppress(OSError):
                    send(pipe, ("close",))
            deadline = time.monotonic() + _GRACE
            for process in self.processes:
                process.join(max(0.0, deadline - time.monotonic()))
        kill(self.processes)
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
        shared = self._shared, self.num_envs
        self.pipes[index], self.processes[index] = start(index, self._factories[index], self._mode, shared)

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        if self.closed:
            raise gymnasium.error.ClosedEnvironmentError(f"{self} is closed")
        try:
            yield
        except BaseException:
            self.close(terminate=True)
            raise

    def _ask(self, messages: Mapping[int, Message]) -> list[Any]:
        self._answers(self._ahead)  # discards steps of an interrupted rollout
        self._ahead = range(0)
        self._send(messages)
        return self._answers(list(messages))

    def _send(self, messages: Mapping[int, Message]) -> None:
        for index, message in messages.items():
            if index not in self._lost:
                try:
                    send(self.pipes[index], message)
                except OSError:
                    self._lose(index)

    def _answers(self, indices: Sequence[int]) -> list[Any]:
        deadline = time.monotonic() + self.timeout
        answers = [self._receive(index, deadline) for index in indices]
        if self._lost and not self._replaces_workers:
            raise self._failure(self._lost)
        return answers

    def _receive(self, index: int, deadline: float) -> Any:  # noqa: ANN401 - any answer
        if index in self._lost:
            return None
        try:
            answer = receive(self.pipes[index], deadline - time.monotonic())
        except TimeoutError:
            return self._lose(index, hangs=True)
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
            codes = ", ".join(dead.values())
            return WorkerFailure(list(dead), f"is gone: its worker process died with exit code {codes}")
        return WorkerFailure(list(lost), f"gave no answer within env.step_timeout={self.timeout:g} seconds")


def send(pipe: Any, message: Any) -> None:  # noqa: ANN401 - a connection, and any message
    """Pickle and send a message in half the time of `pipe.send`, with tensors by value."""
    pipe.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))


def receive(pipe: Any, seconds: float) -> Any:  # noqa: ANN401
    """Return an answer or `Failure`; raise a `TimeoutError` after `seconds`, other errors if the process has ended."""
    if not pipe.poll(max(0.0, seconds)):
        raise TimeoutError
    return pickle.loads(pipe.recv_bytes())


def start(index: int, make: Factory, mode: AutoresetMode, shared: Any = None) -> tuple[Any, Any]:  # noqa: ANN401
    """Start a process for one environment; return the pipe to it, and the process."""
    pipe, child_pipe = multiprocessing.Pipe()
    args = index, CloudpickleWrapper(make), mode, shared, child_pipe
    process = multiprocessing.Process(target=_work, args=args, name=f"Worker-{index}", daemon=True)
    with signals_waiting(), clear_mpi_env_vars():
        process.start()
    child_pipe.close()
    return pipe, process


def _work(index: int, make: Factory, mode: AutoresetMode, shared: Any, pipe: Any) -> None:  # noqa: ANN401
    """Answer the messages of `EnvironmentServer`, and `("describe",)`, until `("close",)` or a failure.

    `shared` is the memory for observations and the number of environments.
    """
    live_with_parent()
    env, name = None, ""
    try:
        env = make()
        observations = None if shared is None else read_from_shared_memory(env.observation_space, *shared)
        server = EnvironmentServer(env, index, mode, observations)
        while name != "close":
            name, *arguments = pickle.loads(pipe.recv_bytes())
            answer: Any = None
            if name == "close":
                env.close()
            elif name == "describe":
                spaces = env.observation_space, env.action_space
                described: Any = Description(*spaces, dict(env.metadata), env.render_mode)
                answer = CloudpickleWrapper(described)  # spaces may have lambdas
            else:
                answer = server.answer(name, *arguments)
            send(pipe, answer)
    except BaseException as error:
        with contextlib.suppress(OSError):
            send(pipe, Failure.of(error))
        if env is not None and name != "close":
            env.close()


def live_with_parent() -> None:
    """In a worker process: ignore signals that are meant for the parent, and exit when the parent ends.

    Python does not end daemon processes of a killed parent, and a busy worker does not notice a closed pipe.
    """
    if (parent := multiprocessing.parent_process()) is None:
        return
    # Terminals and schedulers send these signals to every process of a run; the parent decides how the run ends.
    for signum in _LEFT_TO_PARENT:
        signal.signal(signum, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _LEFT_TO_PARENT)
    threading.Thread(target=_exit_after, args=(parent,), daemon=True).start()


def _exit_after(parent: Any) -> None:  # noqa: ANN401 - multiprocessing has no public type for it
    parent.join()
    os._exit(1)


@contextlib.contextmanager
def none_left_on_failure() -> Iterator[None]:
    """Kill the processes that the block started if it raises: they ignore SIGTERM, and Python would wait at exit."""
    before = set(multiprocessing.active_children())
    try:
        yield
    except BaseException:
        kill(set(multiprocessing.active_children()) - before)
        raise


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


def kill(processes: Iterable[Any]) -> None:
    """Kill processes, and wait until they have ended."""
    alive = [process for process in processes if process.is_alive()]
    for process in alive:
        process.kill()
    for process in alive:
        process.join(1.0)


class DescribedVector(VectorEnv[Any, Any, Any]):
    """A vector environment that has only spaces; vector wrappers show how they change them."""

    def __init__(self, described: Description) -> None:
        self.num_envs = 1
        self.metadata = described.metadata | {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.single_observation_space, self.single_action_space = described.observation_space, described.action_space


def describe(make: Factory, who: str, timeout: float) -> Description:
    """Make an environment in a new process, read its description and close it.

    The environment has `timeout` seconds to be made, and to be closed; messages call it `who`. An invalid option raises
    a `ConfigurationError`, an environment that raises, hangs or dies an `EnvironmentFailure`.
    """
    pipe, process = start(0, make, AutoresetMode.SAME_STEP)

    def ask(name: str, hung: str, raised: str) -> Any:  # noqa: ANN401
        try:
            send(pipe, (name,))
            answer = receive(pipe, timeout)
        except TimeoutError:
            raise EnvironmentFailure(f"{who} {hung} within env.step_timeout={timeout:g} seconds") from None
        except (EOFError, OSError) as gone:
            process.join(1.0)  # a pipe closes a little before its process ends
            raise EnvironmentFailure(f"{who} is gone: its process died with exit code {process.exitcode}") from gone
        if isinstance(answer, Failure):
            raise answer.to_error("its process", lambda text: EnvironmentFailure(f"{who} raised {raised}: {text}"))
        return answer

    try:
        described: Description = ask("describe", "was not made", "when it was made").fn
        ask("close", "did not close", "in close")
        process.join(1.0)
    finally:
        kill([process])
        pipe.close()
    return described

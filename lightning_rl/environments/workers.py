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
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import setitem
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import (
    CloudpickleWrapper,
    batch_space,
    clear_mpi_env_vars,
    create_shared_memory,
    iterate,
    read_from_shared_memory,
    write_to_shared_memory,
)

from lightning_rl.environments.contract import (
    FAILURE,
    LOST,
    MAX_RESTARTS_IN_A_ROW,
    EnvironmentFailure,
    EnvSettings,
    EpisodeTracker,
    WorkerFailure,
    batch_infos,
    give_up,
    summary,
)
from lightning_rl.nested import Nested, map_leaves
from lightning_rl.validation import ConfigurationError

# Seconds that all workers together have to close their environments before they are killed.
_GRACE = 5.0
_LEFT_TO_PARENT = [
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2") if hasattr(signal, name)
]
Factory = Callable[[], gymnasium.Env[Any, Any]]
ChooseAhead = Callable[[int, Nested], Any]
"""A function of a count and observations `[B, ...]`, of which the first `count` rows are new. It returns actions
`[B, ...]`, or None if no environment may step ahead."""
Message = tuple[Any, ...]
"""A message to a worker, see `_serve`."""


class Description(NamedTuple):
    """The attributes of an environment in another process that its vector environment needs."""

    observation_space: gymnasium.Space[Any]
    action_space: gymnasium.Space[Any]
    metadata: dict[str, Any]
    render_mode: str | None


class LocalVectorEnv(SyncVectorEnv):
    """`SyncVectorEnv` with `call_each`; infos that differ in type or shape become arrays of objects."""

    def _add_info(self, vector_infos: dict[str, Any], env_info: dict[str, Any], env_num: int) -> dict[str, Any]:
        for key, value in env_info.items():
            try:
                super()._add_info(vector_infos, {key: value}, env_num)
            except (AttributeError, IndexError, TypeError, ValueError):
                mixed = np.empty(self.num_envs, object)
                for index, other in enumerate(vector_infos[key]):
                    mixed[index] = value if index == env_num else other
                vector_infos[key] = mixed
                vector_infos[f"_{key}"][env_num] = True
        return vector_infos

    def call_each(self, name: str, arguments: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
        return tuple(env.get_wrapper_attr(name)(*args) for env, args in zip(self.envs, arguments, strict=True))


class WorkerPool(VectorEnv[Any, Any, Any]):
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
        tracker: Tracks the episode and step of every environment, also of lost workers.
        settings: Settings of environments that replace lost ones.
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
        self.num_envs = len(factories)
        self.metadata = {**described.metadata, "autoreset_mode": autoreset_mode}
        self.render_mode = described.render_mode
        self.single_observation_space, self.single_action_space = described.observation_space, described.action_space
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.timeout = timeout
        self.tracker = EpisodeTracker([], None)
        self.settings: EnvSettings = {}, {}
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
        self._ahead = range(0)  # environments that already run the next step
        self.processes: list[Any] = [None] * self.num_envs
        self.pipes: list[Any] = [None] * self.num_envs
        with none_left_on_failure():
            for index in range(self.num_envs):
                self._start(index)
            self._check_spaces_of_workers()
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
            rewards, terminated, truncated, infos = zip(*outcomes, strict=True)
            ends = np.array(terminated, np.bool_), np.array(truncated, np.bool_)
            return observations, np.array(rewards, np.float64), *ends, batch_infos(infos)

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        seeds = seed if isinstance(seed, list) else [None if seed is None else seed + i for i in range(self.num_envs)]
        chosen = np.ones(self.num_envs, bool)
        if options is not None and "reset_mask" in options:
            chosen = options["reset_mask"]
            options = {key: value for key, value in options.items() if key != "reset_mask"}
        with self._guarded():
            messages = {i: ("reset", {"seed": seeds[i], "options": options}) for i in np.flatnonzero(chosen).tolist()}
            infos: list[dict[str, Any]] = [{}] * self.num_envs
            for index, info in zip(messages, self._ask(messages), strict=True):
                infos[index] = self.replace(index)[1] if info is None else info
            return self.observations, batch_infos(infos)

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:  # noqa: ANN401
        """Call a method of every environment, or get an attribute; None for a lost worker; raises as `step`."""
        with self._guarded():
            return tuple(self._ask(dict.fromkeys(range(self.num_envs), ("call", name, args, kwargs))))

    def call_each(self, name: str, arguments: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
        with self._guarded():
            return tuple(self._ask({i: ("call", name, args, {}) for i, args in enumerate(arguments)}))

    def get_attr(self, name: str) -> tuple[Any, ...]:
        return self.call(name)

    def set_attr(self, name: str, values: Any) -> None:  # noqa: ANN401
        each = values if isinstance(values, list | tuple) else [values] * self.num_envs
        self.call_each("set_wrapper_attr", [(name, value) for _, value in zip(self.pipes, each, strict=True)])

    def render(self) -> tuple[Any, ...]:
        return self.call("render")

    def replace(self, index: int) -> tuple[Any, dict[str, Any]]:
        """Replace a lost worker and begin the next episode of its stream; return first observation and `info`.

        Too many losses in a row raise an `EnvironmentFailure`.
        """
        stream_seed, episode, step = self.tracker.where(index)
        failures: list[str] = []
        while True:
            lost = self._failure({index: self._lost.pop(index)})
            failures.append(f"{self.tracker.label_at(index, episode, step)} {lost.what}")
            self._losses_in_a_row[index] += 1
            if self._losses_in_a_row[index] > MAX_RESTARTS_IN_A_ROW:
                give_up(EnvironmentFailure(failures[-1]))
            self._start(index)
            arguments = {"stream_seed": stream_seed, "episode": episode, "settings": self.settings}
            self._send({index: ("next_episode", arguments)})
            (info,) = self._answers([index])
            if info is not None:
                row = list(iterate(self.observation_space, self.observations))[index]
                return row, info | {FAILURE: failures + info.get(FAILURE, [])}
            episode, step = episode + 1, 0  # the episode in which the replacement was lost

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
        self.pipes[index], child_pipe = multiprocessing.Pipe()
        factory = CloudpickleWrapper(self._factories[index])
        process = multiprocessing.Process(
            target=_work,
            args=(index, factory, child_pipe, self._shared, self._mode),
            name=f"Worker-{index}",
            daemon=True,
        )
        self.processes[index] = process
        with signals_waiting(), clear_mpi_env_vars():
            process.start()
        child_pipe.close()

    def _check_spaces_of_workers(self) -> None:
        expected = {"observation_space": self.single_observation_space, "action_space": self.single_action_space}
        for name, space in expected.items():
            found = self._ask(dict.fromkeys(range(self.num_envs), ("call", name, (), {})))
            if self._lost:
                raise self._failure(self._lost)
            for index, other in enumerate(found):
                if other != space:
                    raise RuntimeError(f"environment {index} has {name}={other}, expected {space} as environment 0")

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
        """Send messages to workers and return their answers in the same order; None for a lost worker."""
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
            if not self.pipes[index].poll(max(0.0, deadline - time.monotonic())):
                return self._lose(index, hangs=True)
            answer, error = pickle.loads(self.pipes[index].recv_bytes())
        except (EOFError, OSError):
            return self._lose(index)
        if error is None:
            return answer
        of_environment, what, trace = error
        failure: Exception = EnvironmentFailure(what) if of_environment else WorkerFailure([index], what)
        failure.add_note(f"In its worker process:\n{trace}")
        raise failure

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


def _work(index: int, make: Factory, pipe: Any, shared: Any, mode: AutoresetMode) -> None:  # noqa: ANN401
    """Run an environment with observations in `shared` memory until the parent closes it; send (answer, error)."""
    live_with_parent()
    env = None
    try:
        env = make()
        _serve(env, index, pipe, shared, mode)
    except BaseException as error:
        of_environment = isinstance(error, EnvironmentFailure)
        what = str(error) if of_environment else f"raised in its worker process: {type(error).__name__}: {error}"
        with contextlib.suppress(OSError):
            send(pipe, (None, (of_environment, what, traceback.format_exc())))
    finally:
        if env is not None:
            env.close()


def _serve(env: gymnasium.Env[Any, Any], index: int, pipe: Any, shared: Any, mode: AutoresetMode) -> None:  # noqa: ANN401
    """Answer the parent's messages until it sends `("close",)`.

    The other messages are `("step", action)`, `("reset" or "next_episode", keyword arguments)` and `("call", name,
    arguments, keyword arguments)`.
    """
    space = env.observation_space
    resets_next = False
    while (message := pickle.loads(pipe.recv_bytes()))[0] != "close":
        name, *arguments = message
        answer: Any
        if name == "call":
            attribute = env.get_wrapper_attr(arguments[0])
            answer = attribute(*arguments[1], **arguments[2]) if callable(attribute) else attribute
        else:
            ended = False
            if name != "step":
                observation, answer = env.get_wrapper_attr(name)(**arguments[0])
            elif resets_next:
                observation, info = env.reset()
                answer = 0.0, False, False, info
            else:
                observation, reward, terminated, truncated, info = env.step(*arguments)
                ended = terminated or truncated
                if ended and mode is AutoresetMode.SAME_STEP:
                    final = {"final_info": info, "final_obs": observation}
                    observation, info = env.reset()
                    info = final | info
                answer = reward, terminated, truncated, info
            resets_next = ended and mode is AutoresetMode.NEXT_STEP
            write_to_shared_memory(space, index, observation, shared)
        send(pipe, (answer, None))


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


# Seconds until a new process runs this file; it may have to import everything first.
_START = 120.0


class DescribedVector(VectorEnv[Any, Any, Any]):
    """A vector environment that has only spaces; vector wrappers show how they change them."""

    def __init__(self, described: Description) -> None:
        self.num_envs = 1
        self.metadata = described.metadata | {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.single_observation_space, self.single_action_space = described.observation_space, described.action_space


def describe(make: Callable[[], gymnasium.Env[Any, Any]], who: str, timeout: float) -> Description:
    """Make an environment in a new process, read its description and close it.

    The environment has `timeout` seconds to be made, and to be closed; messages call it `who`. An invalid option raises
    a `ConfigurationError`, an environment that raises, hangs or dies an `EnvironmentFailure`.
    """
    context = multiprocessing.get_context()
    pipe, child_pipe = context.Pipe()
    process = context.Process(target=_answer, args=(child_pipe, CloudpickleWrapper(make), who), daemon=True)
    try:
        with signals_waiting():
            process.start()
        child_pipe.close()
        _wait_for(pipe, process, who, "was not started", _START)
        described: Description = _wait_for(pipe, process, who, "was not made", timeout)()
        _wait_for(pipe, process, who, "did not close", timeout)
        process.join(1.0)
    finally:
        kill([process] if process.pid is not None else [])
        pipe.close()
    return described


def _wait_for(pipe: Any, process: Any, who: str, what: str, timeout: float) -> Any:  # noqa: ANN401 - any answer
    """Return the next answer of the process; raise if it has none in time, has died, or sends an error."""
    try:
        if not pipe.poll(timeout):
            raise EnvironmentFailure(f"{who} {what} within env.step_timeout={timeout:g} seconds")
        answer, error = pipe.recv()
    except (EOFError, OSError) as gone:
        process.join(1.0)  # a pipe closes a little before its process ends
        raise EnvironmentFailure(f"{who} is gone: its process died with exit code {process.exitcode}") from gone
    if error is not None:
        kind, message, trace = error
        failure: Exception = kind(message)
        failure.add_note(f"In the process that reads its spaces:\n{trace}")
        raise failure
    return answer


def _answer(pipe: Any, make: CloudpickleWrapper, who: str) -> None:  # noqa: ANN401 - a connection
    live_with_parent()
    doing = "when it was made"
    try:
        pipe.send((None, None))
        env = make()
        found: Any = Description(env.observation_space, env.action_space, dict(env.metadata), env.render_mode)
        pipe.send((CloudpickleWrapper(lambda: found), None))
        doing = "in close"
        env.close()
        pipe.send((None, None))
    except BaseException as error:
        trace = "".join(traceback.format_exception(error))
        kind = ConfigurationError if isinstance(error, ConfigurationError) else EnvironmentFailure
        message = str(error) if isinstance(error, kind) else f"{who} raised {doing}: {summary(error)}"
        with contextlib.suppress(OSError):
            pipe.send((None, (kind, message, trace)))

"""Worker processes that are replaced when they die or hang."""

from __future__ import annotations

import inspect
import multiprocessing
import time
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.async_vector_env import _async_worker
from gymnasium.vector.utils import CloudpickleWrapper, clear_mpi_env_vars, concatenate, iterate

from lightning_rl.environments.errors import EnvironmentFailure
from lightning_rl.environments.places import Places
from lightning_rl.environments.restarting import FAILURE, LOST, MAX_RESTARTS_IN_A_ROW, give_up
from lightning_rl.environments.workers import Factory, ProcessVectorEnv

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
        places: Where every environment is: a lost process cannot say.
    """

    places: Places

    def __init__(
        self,
        factories: Sequence[Factory],
        autoreset_mode: AutoresetMode,
        timeout: float,
        described: gymnasium.Env[Any, Any],
    ) -> None:
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
        stream_seed, episode, step = self.places.where(index)
        failures: list[str] = []
        while True:
            failures.append(f"{self.places.label_at(index, episode, step)} {self._lost.pop(index)}")
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
                self._lose(index, f"gave no answer within step_timeout={self.timeout:g} seconds")
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

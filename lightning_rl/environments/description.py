"""Reads the spaces of an environment in another process, which is killed where the environment hangs."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import traceback
from collections.abc import Callable
from typing import Any

import gymnasium
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import CloudpickleWrapper

from lightning_rl.environments.contract import EnvironmentFailure, summary
from lightning_rl.environments.workers import kill, live_with_parent, signals_waiting
from lightning_rl.validation import ConfigurationError

# Seconds until a new process runs this file; it may have to import everything first.
_START = 120.0


class Described(gymnasium.Env[Any, Any]):
    """Has the spaces of an environment that is in another process, and nothing else.

    Args:
        observation_space: Of the environment.
        action_space: Of the environment.
        metadata: Of the environment.
        render_mode: Of the environment.
    """

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        metadata: dict[str, Any] | None = None,
        render_mode: str | None = None,
    ) -> None:
        self.observation_space, self.action_space = observation_space, action_space
        self.metadata, self.render_mode = metadata or {}, render_mode


class DescribedVector(VectorEnv[Any, Any, Any]):
    """A vector environment that has the spaces of one environment, and nothing else: vector wrappers may change them.

    Args:
        described: Has the spaces.
    """

    def __init__(self, described: Described) -> None:
        self.num_envs = 1
        self.metadata = described.metadata | {"autoreset_mode": AutoresetMode.SAME_STEP}
        self.single_observation_space, self.single_action_space = described.observation_space, described.action_space


def describe(make: Callable[[], gymnasium.Env[Any, Any]], who: str, timeout: float) -> Described:
    """Make an environment in a new process, read its spaces and close it.

    Args:
        make: Makes the environment.
        who: What messages call it.
        timeout: Seconds that it may take to be made, and to be closed.

    Raises:
        ConfigurationError: An option does not fit.
        EnvironmentFailure: It raised, hung or died, when it was made or closed.
    """
    context = multiprocessing.get_context()
    pipe, child_pipe = context.Pipe()
    process = context.Process(target=_answer, args=(child_pipe, CloudpickleWrapper(make), who), daemon=True)
    try:
        with signals_waiting():
            process.start()
        child_pipe.close()
        _wait_for(pipe, process, who, "was not started", _START)
        described: Described = _wait_for(pipe, process, who, "was not made", timeout)()
        _wait_for(pipe, process, who, "did not close", timeout)
        process.join(1.0)
    finally:
        kill([process] if process.pid is not None else [])
        pipe.close()
    return described


def _wait_for(pipe: Any, process: Any, who: str, what: str, timeout: float) -> Any:  # noqa: ANN401 - any answer
    """Return the next answer of the process.

    Raises:
        EnvironmentFailure: There is none in time, or the environment raised.
    """
    try:
        if not pipe.poll(timeout):
            raise EnvironmentFailure(f"{who} {what} within env.step_timeout={timeout:g} seconds")
        answer, error = pipe.recv()
    except (EOFError, OSError) as gone:
        process.join(1.0)  # the end of a pipe is seen a little before the end of its process
        raise EnvironmentFailure(f"{who} is gone: its process died with exit code {process.exitcode}") from gone
    if error is not None:
        kind, message, trace = error
        failure: Exception = kind(message)
        failure.add_note(f"In the process that reads its spaces:\n{trace}")
        raise failure
    return answer


def _answer(pipe: Any, make: CloudpickleWrapper, who: str) -> None:  # noqa: ANN401 - a connection
    """Make an environment, send its description and close it, in the process that was started for it."""
    live_with_parent()
    doing = "when it was made"
    try:
        pipe.send((None, None))
        env = make()
        found = env.observation_space, env.action_space, dict(env.metadata), env.render_mode
        pipe.send((CloudpickleWrapper(functools.partial(Described, *found)), None))
        doing = "in close"
        env.close()
        pipe.send((None, None))
    except BaseException as error:
        trace = "".join(traceback.format_exception(error))
        kind = ConfigurationError if isinstance(error, ConfigurationError) else EnvironmentFailure
        message = str(error) if isinstance(error, kind) else f"{who} raised {doing}: {summary(error)}"
        with contextlib.suppress(OSError):
            pipe.send((None, (kind, message, trace)))

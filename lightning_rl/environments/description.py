"""Reads the spaces of an environment in another process, with a time limit."""

from __future__ import annotations

import contextlib
import multiprocessing
import traceback
from collections.abc import Callable
from typing import Any

import gymnasium
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import CloudpickleWrapper

from lightning_rl.environments.contract import EnvironmentFailure, summary
from lightning_rl.environments.workers import Description, kill, live_with_parent, signals_waiting
from lightning_rl.validation import ConfigurationError

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

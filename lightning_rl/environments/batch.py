"""One contract over the three autoreset modes of Gymnasium's vector environments."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, VectorEnv

from lightning_rl.environments.errors import EnvironmentFailure
from lightning_rl.validation import ConfigurationError

Array = np.ndarray[Any, Any]


class Step(NamedTuple):
    """What one step of `B` environments gave.

    Attributes:
        observations: Where the next action is chosen, `[B, ...]`; overwritten by the next step.
        rewards: `[B]`.
        terminated: `[B]`.
        truncated: `[B]`.
        valid: False where the environment was only being reset and ignored the action, `[B]`; None if nowhere.
        final_observations: (environment, the observation it really reached) for each episode that this step ended.
        infos: Gymnasium's vector info.
    """

    observations: Array
    rewards: Array
    terminated: Array
    truncated: Array
    valid: Array | None
    final_observations: list[tuple[int, Array]]
    infos: dict[str, Any]


class EnvironmentBatch:
    """A vector environment whose steps mean the same in every autoreset mode.

    * `SAME_STEP`: the step that ends an episode returns the next one's first observation; the final one is in `info`.
    * `NEXT_STEP` (and EnvPool): it returns the final observation, and the step after it only resets: not `valid`.
    * `DISABLED`: it returns the final observation, and this class resets.

    Args:
        env: A `gymnasium.vector.VectorEnv`, or EnvPool's.
        seeds: Seed of each environment's stream of episodes; one for all where only that is supported.
        step_timeout: Seconds that worker processes may take for a step or reset.

    Raises:
        ConfigurationError: The environment does not say in `metadata["autoreset_mode"]` how it resets.
    """

    def __init__(
        self, env: VectorEnv[Any, Any, Any], seeds: list[int] | int | None, step_timeout: float | None = None
    ) -> None:
        self.env = env
        self.num_envs = env.num_envs
        # EnvPool keeps the spaces of one environment where Gymnasium keeps those of the batch.
        self.single_observation_space = getattr(env, "single_observation_space", env.observation_space)
        self.single_action_space = getattr(env, "single_action_space", env.action_space)
        self._seeds = seeds
        self._timeout = step_timeout
        mode = (env.metadata or {}).get("autoreset_mode")
        try:
            self.mode = mode if isinstance(mode, AutoresetMode) else AutoresetMode(mode)
        except ValueError:
            raise ConfigurationError(
                f"env_id: {env} has metadata['autoreset_mode']={mode!r}: expected one of "
                f"{[mode.value for mode in AutoresetMode]}, so that episode ends can be told apart from resets"
            ) from None
        self._was_reset = np.ones(self.num_envs, bool)

    def reset(self) -> Array:
        """Begin every environment's stream of episodes again, and return the first observations."""
        self._was_reset = np.zeros(self.num_envs, bool)
        if isinstance(self.env, AsyncVectorEnv):
            with self._guarded(self.env):
                self.env.reset_async(seed=self._seeds)  # type: ignore[arg-type]
                observations, _ = self.env.reset_wait(self._timeout)
        elif self._seeds is None:
            observations, _ = self.env.reset()
        else:
            observations, _ = self.env.reset(seed=self._seeds)  # type: ignore[arg-type]
        return observations

    def step(self, actions: Array) -> Step:
        """Step every environment once.

        Raises:
            EnvironmentFailure: An environment raised, or a worker process died or took longer than the limit.
        """
        if isinstance(self.env, AsyncVectorEnv):
            with self._guarded(self.env):
                self.env.step_async(actions)
                observations, rewards, terminated, truncated, infos = self.env.step_wait(self._timeout)
        else:
            observations, rewards, terminated, truncated, infos = self.env.step(actions)
        valid: Array | None = None
        ended = terminated | truncated
        finals: list[tuple[int, Array]] = []
        if self.mode is AutoresetMode.NEXT_STEP:
            if self._was_reset.any():
                valid = ~self._was_reset
            self._was_reset = ended
        if ended.any():
            source = infos["final_obs"] if self.mode is AutoresetMode.SAME_STEP else observations.copy()
            finals = [(int(i), source[i]) for i in np.flatnonzero(ended)]
            if self.mode is AutoresetMode.DISABLED:
                # The flags may be the environment's own arrays, which its reset clears.
                terminated, truncated = terminated.copy(), truncated.copy()
                observations, _ = self.env.reset(options={"reset_mask": ended.copy()})
        return Step(observations, rewards, terminated, truncated, valid, finals, infos)

    def label(self, index: int) -> str:
        """Describe one environment for an error message, with episode and seed where they are known."""
        try:
            return str(self.env.get_attr("label")[index])  # type: ignore[attr-defined]
        except Exception:
            return f"environment {index}"

    def close(self) -> None:
        """Close the environments and end worker processes; may be called twice."""
        self.env.close()

    def _guarded(self, env: AsyncVectorEnv) -> _WorkerGuard:
        return _WorkerGuard(env, self._timeout)


class _WorkerGuard:
    """Turns what a dead or hung worker process raises into an `EnvironmentFailure`, and ends the others."""

    def __init__(self, env: AsyncVectorEnv, timeout: float | None) -> None:
        self.env = env
        self.timeout = timeout

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if error is None or not isinstance(error, Exception):
            return
        message = str(error)
        if isinstance(error, multiprocessing.TimeoutError):
            hung = [i for i, pipe in enumerate(self.env.parent_pipes) if pipe is not None and not pipe.poll(0)]
            message = f"environment {_join(hung)} gave no answer within step_timeout={self.timeout} seconds"
        elif isinstance(error, EOFError | OSError):
            for process in self.env.processes:
                process.join(0.1)
            dead = [(i, p.exitcode) for i, p in enumerate(self.env.processes) if not p.is_alive()]
            codes = ", ".join(str(code) for _, code in dead)
            message = f"the worker process of environment {_join(i for i, _ in dead)} died with exit code {codes}"
        self.env.close(terminate=True)
        raise EnvironmentFailure(message) from error


def _join(indices: Iterable[int]) -> str:
    return ", ".join(map(str, indices)) or "(unknown)"


def info_values(step: Step, key: str) -> list[float]:
    """Return every scalar that environments reported under `info[key]` in this step.

    Gymnasium puts the info of a step that ends an episode under `final_info` in `SAME_STEP` mode.
    """
    found: list[float] = []
    for infos in (step.infos, step.infos.get("final_info", {})):
        if not isinstance(infos, dict) or key not in infos:
            continue
        values = np.asarray(infos[key])
        present = np.asarray(infos.get(f"_{key}", np.ones(len(values), bool)), bool)
        if step.valid is not None:
            present = present & step.valid
        found += [float(value) for value in values[present]]
    return found

"""Environments that are made anew where they fail, so that one crash does not end a long run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import gymnasium
import numpy as np

from lightning_rl.environments.errors import EnvironmentFailure, is_failure
from lightning_rl.environments.finite import complaint
from lightning_rl.environments.seeding import SeededEpisodes
from lightning_rl.nested import map_leaves

MAX_RESTARTS_IN_A_ROW = 3
"""An environment that fails once more without having completed a step in between will not recover."""

FAILURE, LOST, EPISODE = "lightning_rl/failure", "lightning_rl/lost", "lightning_rl/episode"
"""Keys of the `info` of a new environment: what happened to those before it (a list, an entry for each restart),
whether that was in a step, which has no outcome then, and which episode of the stream has begun."""


class RestartingEpisodes(SeededEpisodes):
    """Seeded episodes of an environment that is replaced when it fails; the stream goes on with its next episode.

    To raise, and to return NaN, infinity or anything that `SeededEpisodes` complains of, is to fail. A step that failed
    returns the first observation of the new episode, a reward of 0 and no end of an episode; `info` says what happened.
    The next episode has another seed, so a failure that the seed brings about does not come again.

    Args:
        make: Makes the environment.
        index: Its place among the environments of this process, for error messages.
        first_options: Options of the reset that begins a stream, where a plain one would go on with what went before.
        evaluation: Whether it is one of evaluation, for error messages.

    Raises:
        EnvironmentFailure: In `reset` and `step`: it failed again after `MAX_RESTARTS_IN_A_ROW` restarts between which
            no step was completed.
    """

    def __init__(
        self,
        make: Callable[[], gymnasium.Env[Any, Any]],
        index: int = 0,
        first_options: dict[str, Any] | None = None,
        evaluation: bool = False,
    ) -> None:
        super().__init__(make(), index, first_options, evaluation)
        self._make = make
        self._restarts_in_a_row = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin the stream `seed`, or its next episode, or the one after it where that fails."""
        try:
            return self._checked_reset(seed, options)
        except EnvironmentFailure as failure:
            return self._restart(failure)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:  # noqa: ANN401
        """Step, or begin the next episode of a new environment."""
        try:
            observation, reward, terminated, truncated, info = super().step(action)
            self._check_observation(observation)
            self._check_finite("reward", reward)
        except EnvironmentFailure as failure:
            observation, info = self._restart(failure)
            return observation, 0.0, False, False, info | {LOST: True}
        self._restarts_in_a_row = 0
        return observation, reward, terminated, truncated, info

    def go_on(self, stream_seed: int, episode: int) -> tuple[Any, dict[str, Any]]:
        """Begin the episode after `episode` of a stream that another process is lost with."""
        self.stream_seed, self.episode = stream_seed, episode
        observation, info = self.reset(options=self.first_options)
        return observation, info | {EPISODE: self.episode}

    def _checked_reset(self, seed: int | None, options: dict[str, Any] | None) -> tuple[Any, dict[str, Any]]:
        observation, info = super().reset(seed=seed, options=options)
        self._check_observation(observation)
        return observation, info

    def _restart(self, failure: EnvironmentFailure) -> tuple[Any, dict[str, Any]]:
        """Replace the environment until one can be reset."""
        failures: list[str] = []
        while True:
            failures.append(str(failure))
            self._restarts_in_a_row += 1
            if self._restarts_in_a_row > MAX_RESTARTS_IN_A_ROW:
                give_up(failure)
            self._close_failed()
            try:
                self.env = self._make()
                observation, info = self._checked_reset(None, self.first_options)
            except EnvironmentFailure as error:
                failure = error
            except BaseException as error:
                if not is_failure(error):
                    raise
                failure = self._failure("the making of a new environment", error)
            else:
                return observation, info | {FAILURE: failures, EPISODE: self.episode}

    def _close_failed(self) -> None:
        """Close an environment that failed; a failure in its `close` says nothing new."""
        try:
            self.env.close()
        except BaseException as error:
            if not is_failure(error):
                raise

    def _check_observation(self, observation: Any) -> None:  # noqa: ANN401
        check = self._check_finite
        map_leaves(lambda path, x: check(f"observation {path}".rstrip(), x), self._paths, observation)

    def _check_finite(self, what: str, value: Any) -> None:  # noqa: ANN401
        row = np.asarray(value)
        if row.dtype.kind == "f" and (trouble := complaint(what, row)) is not None:
            raise self._complain(trouble)


def give_up(failure: EnvironmentFailure) -> NoReturn:
    """Raise the failure of an environment that restarts do not help."""
    raise EnvironmentFailure(
        f"{failure}; {MAX_RESTARTS_IN_A_ROW} restarts in a row, without a completed step in between, did not help"
    ) from failure

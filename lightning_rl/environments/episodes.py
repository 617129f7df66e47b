"""Seeded episodes of one environment, which can be replayed, checked and restarted."""

from __future__ import annotations

import contextlib
import copy
import re
import reprlib
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit
from lightning.pytorch.utilities.rank_zero import rank_zero_warn  # type: ignore[attr-defined]

from lightning_rl.environments.adapters import remembers_episodes
from lightning_rl.environments.contract import (
    EPISODE,
    FAILURE,
    LOST,
    MAX_RESTARTS_IN_A_ROW,
    OWN_STATE,
    EnvironmentFailure,
    complaint,
    give_up,
    is_failure,
    summary,
)
from lightning_rl.environments.seeding import derive_seed, describe
from lightning_rl.environments.wrappers.action_mask import ReadMasks
from lightning_rl.nested import Nested, first_leaf, leaves, map_leaves, map_stacked, nested_paths, space_leaves

Array = np.ndarray[Any, Any]
_EXPECTED = {
    "reset": "reset(*, seed=None, options=None) that returns two values, (observation, info)",
    "step": "step(action) that returns five values, (observation, reward, terminated, truncated, info)",
}
_UNPACKED = re.compile(r"values to unpack|cannot unpack")
_NO_KEYWORD = re.compile(r"reset\(\) got an unexpected keyword argument '(seed|options)'")
# Those who take apart what an environment returns.
_CALLERS = tuple(Path(file).parent for file in (__file__, gymnasium.__file__))


class Unexpected(Exception):
    """What an environment returned is not what its interface, or its space, says; the message says what it is."""


def older_interface(method: str, name: str, why: object) -> str:
    """Say that an environment does not have the interface that is expected of it.

    Args:
        method: `reset` or `step`.
        name: Of the environment.
        why: How that was found out.
    """
    return (
        f"does not have the interface of Gymnasium 0.26 and later ({why}): expected of {name} a {_EXPECTED[method]}; "
        "the package shimmy wraps environments of older versions"
    )


def is_older_interface_error(error: BaseException) -> bool:
    """Whether an error comes from calling an environment, or from taking apart what it returned, as of today."""
    if isinstance(error, TypeError) and _NO_KEYWORD.search(str(error)):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    return (
        isinstance(error, TypeError | ValueError)
        and bool(_UNPACKED.search(str(error)))
        and any(Path(frames[-1].filename).is_relative_to(folder) for folder in _CALLERS)
    )


def to_number(reward: Any) -> float:  # noqa: ANN401 - whatever an environment returns
    """Return a reward as a Python number.

    Raises:
        Unexpected: It is none, or more than one.
    """
    with contextlib.suppress(TypeError, ValueError):
        if not isinstance(reward, str | bytes) and np.ndim(reward) == 0:
            return float(reward)
    several = "; rewards of several objectives need a wrapper like mo_gymnasium.wrappers.LinearReward"
    raise Unexpected(f"returned reward {reward!r}: expected a number{several if np.ndim(reward) else ''}")


def to_flag(name: str, flag: Any) -> bool:  # noqa: ANN401
    """Return `terminated` or `truncated` as Python's boolean.

    Raises:
        Unexpected: It is no boolean, and no number 0 or 1, nor an array or tensor of such a one.
    """
    with contextlib.suppress(TypeError, ValueError, RuntimeError):
        plain = np.asarray(flag)
        if plain.size == 1 and plain.item() in (0, 1):
            return bool(plain.item())
    raise Unexpected(f"returned {name} {reprlib.repr(flag)}: expected True or False")


def check_info(info: Any) -> None:  # noqa: ANN401
    """Raise `Unexpected` if `info` is no dict."""
    if not isinstance(info, dict):
        raise Unexpected(f"returned info {reprlib.repr(info)}: expected a dict")


class ObservationForm:
    """The structure, shapes and types that observations of a space have.

    Args:
        space: Of one environment.

    Attributes:
        paths: Of the leaves, nested as observations are.
        leaves: Their spaces by path.
    """

    def __init__(self, space: spaces.Space[Any]) -> None:
        self.paths = nested_paths(space)
        self.leaves = space_leaves(space)
        self._space = space

    def fit(self, observation: Any) -> Nested:  # noqa: ANN401
        """Return an observation in this form.

        Args:
            observation: Whatever an environment returned.

        Returns:
            Its leaves; those of a type that not every backend would take are converted to the type of their space.
            Floating-point numbers of another width, which all take, are left as they are.

        Raises:
            Unexpected: The structure, or the shape of a leaf, is another; or a leaf has no numbers, or such as lose by
                becoming what their space has.
        """
        try:
            return map_leaves(self._fit_leaf, self.paths, observation)
        except (LookupError, TypeError, ValueError) as error:
            raise Unexpected(
                f"returned an observation of another structure than its space has ({type(error).__name__}: {error}): "
                f"expected one in {self._space}"
            ) from None

    def _fit_leaf(self, path: str, x: Any) -> Any:  # noqa: ANN401
        name, space = f"an observation {path}".rstrip(), self.leaves[path]
        try:
            given = np.asarray(x)
        except ValueError:  # rows of different lengths
            raise Unexpected(f"returned {name} of shape unknown: expected {space.shape}") from None
        except (TypeError, RuntimeError) as error:  # a tensor of a GPU, or one with a gradient
            raise Unexpected(f"returned {name} that is no array ({type(error).__name__}: {error})") from None
        if given.shape != space.shape:
            raise Unexpected(f"returned {name} of shape {given.shape}: expected {space.shape}")
        wanted: Any = space.dtype
        if given.dtype == wanted or (given.dtype.kind == "f" and wanted.kind == "f"):
            return x
        try:
            return stored(given, wanted)
        except Unexpected as error:
            helps = (
                "; the wrapper gymnasium.wrappers.DtypeObservation changes the dtype of observations and their space"
            )
            raise Unexpected(f"returned {name} {error}{helps}") from None


def stored(given: Array, dtype: np.dtype[Any]) -> Array:
    """Return numbers as those of another type.

    Raises:
        Unexpected: They are no numbers, or are integers or bits of `dtype` only with a loss. What floating-point
            numbers round is none.
    """
    no_numbers = Unexpected(f"of {given.dtype}: expected {dtype}")
    if given.dtype.kind not in "biufO":
        raise no_numbers
    try:
        with np.errstate(invalid="ignore"):  # NaN, which is none of the integers
            result: Array = given.astype(dtype)
    except (TypeError, ValueError, OverflowError):  # of objects
        raise no_numbers from None
    if dtype.kind in "biu" and not np.array_equal(result, given):
        raise Unexpected(f"of {given.dtype}, which loses by becoming {dtype}: expected {dtype}")
    return result


def misfit(space: spaces.Space[Any], x: Any) -> tuple[str, bool] | None:  # noqa: ANN401 - whatever was observed
    """Say which number of an observation is outside of the bounds of its leaf's space, None if none is.

    Returns:
        What is wrong, and whether that cannot be learned from. Numbers outside of a `Box` can.
    """
    low, high = _bounds(space)
    if low is None:
        return None
    rounded = np.asarray(x).astype(space.dtype)
    outside = np.argwhere((rounded < low) | (rounded > high))
    if not len(outside):
        return None
    place = tuple(int(i) for i in outside[0])
    entry = f" (entry {', '.join(map(str, place))})" if place else ""
    bounds = [np.broadcast_to(bound, rounded.shape)[place] for bound in (low, high)]
    return f"{entry} {rounded[place]}: expected {bounds[0]} to {bounds[1]}".strip(), not isinstance(space, spaces.Box)


def _bounds(space: spaces.Space[Any]) -> tuple[Any, Any]:
    """Return the least and the largest that each entry can be; None of other spaces."""
    if isinstance(space, spaces.Box):
        return space.low, space.high
    if isinstance(space, spaces.Discrete):
        return space.start, space.start + space.n - 1
    if isinstance(space, spaces.MultiDiscrete):
        return space.start, space.start + space.nvec - 1
    return (0, 1) if isinstance(space, spaces.MultiBinary) else (None, None)


T = TypeVar("T")
MAX_LOGGED_ACTIONS = 1_000_000
"""An episode that is longer cannot be played again: its actions would fill the memory, and take minutes."""
_STATELESS = (OrderEnforcing, PassiveEnvChecker, ReadMasks)
_NUMBERS = frozenset((int, np.int64, np.int32))
_FLAGS = frozenset((bool, np.bool_))
_RESET = None
"""In a log of actions: a reset that went on with what was before (a game between two lives)."""


def _wrappers(env: gymnasium.Env[Any, Any]) -> Iterator[gymnasium.Wrapper[Any, Any, Any, Any]]:
    """Yield what is around an environment, the outermost first."""
    while isinstance(env, gymnasium.Wrapper):
        yield env
        env = env.env


class SeededEpisodes(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Give each episode its own seed, say where it was when the environment raises, and log it to play it again.

    `reset(seed=s)` begins the stream of episodes that `s` names; each `reset()` after it goes on to the stream's next
    episode. What an environment does therefore depends on (seed, number of the episode, actions) and not on how many
    other environments there are.

    The actions since the last true reset are logged, up to `MAX_LOGGED_ACTIONS`, so that another process can go to the
    same place (`recorded`, `restore`); that they give the same rewards again is checked, since a wrapper may remember
    earlier episodes, which are not played again. An environment that has `state_dict()` and `load_state_dict(state)` is
    asked for its state instead, if no wrapper but a time limit, or that of masks, is around it; what it returns must be
    tensors and plain Python values.

    Args:
        env: The environment.
        index: Its place among the environments of this process, for error messages.
        evaluation: Whether it is one of evaluation, for error messages.

    Raises:
        EnvironmentFailure: In `reset` and `step`: the environment raised, has the interface of before Gymnasium 0.26,
            returned an observation of another shape than its space has, or one that loses by becoming of the type of
            its space, a reward that is not a number, a `terminated` or `truncated` that is no boolean, or an `info`
            that is no dict; in the first `reset` also an observation outside of a discrete space. Numbers outside of a
            `Box` are warned of there.
    """

    def __init__(
        self,
        env: gymnasium.Env[Any, Any],
        index: int = 0,
        evaluation: bool = False,
    ) -> None:
        super().__init__(env)
        self.index = index
        self.evaluation = evaluation
        self.stream_seed = 0
        self.episode = 0
        self.step_count = 0
        self._form = ObservationForm(env.observation_space)
        self._paths = self._form.paths
        # Arrays of this shape and type are what every backend takes. None where observations are nested.
        self._shape, self._dtype = env.observation_space.shape, env.observation_space.dtype
        self._is_checked = False
        self._first_episode = 0
        self._observation: Any = None
        self._begin_log()
        self._may_go_on = env.has_wrapper_attr("went_on")
        # Of the reset that begins a stream, where a plain one would go on with what went before.
        self.first_options = env.get_wrapper_attr("first_options") if self._may_go_on else None
        self._has_own_state = self._owns_all_state(env)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin the stream `seed`, or its next episode."""
        if seed is None:
            self.episode += 1
        else:
            self.stream_seed, self.episode = seed, 0
            options = options if self.first_options is None else {**self.first_options, **(options or {})}
        self.step_count = 0
        try:
            result = self.env.reset(seed=derive_seed(self.stream_seed, self.episode), options=options)
        except BaseException as error:
            if not is_failure(error):
                raise
            raise self._failure("reset", error) from error
        if type(result) is not tuple or len(result) != 2:
            raise self._complain(older_interface("reset", self._name, f"reset returned {type(result).__name__}"))
        observation, info = result
        self._held_to(check_info, info)
        self._observation = observation = self._fit(observation)
        if not self._is_checked:
            self._is_checked = True
            map_leaves(self._check_bounds, self._paths, observation)
        if self._may_go_on and self.env.get_wrapper_attr("went_on"):
            self._log.append(_RESET)
        else:
            self._begin_log()
        return observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:  # noqa: ANN401
        """Step; an exception is raised again with index, episode, seed and step."""
        # What the environment does to an action of its own must not be done to the record.
        kept: Any = action if type(action) in _NUMBERS else map_leaves(np.copy, action)
        result = self.step_unrecorded(action)
        self._observation, reward, terminated, truncated, _ = result
        self._log.append(kept)
        self._reward_sum += reward
        if terminated or truncated:
            self._ends.append([len(self._log), bool(terminated), bool(truncated)])
        return result

    def step_unrecorded(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:  # noqa: ANN401
        """Step as `step` does, but for the record: this is no longer where `recorded` says."""
        self.step_count += 1
        try:
            observation, reward, terminated, truncated, info = self.env.step(action)
        except BaseException as error:
            if not is_failure(error):
                raise
            raise self._failure("step", error) from error
        if type(reward) is not float:
            reward = self._held_to(to_number, reward)
        if type(terminated) not in _FLAGS or type(truncated) not in _FLAGS:
            terminated = self._held_to(to_flag, "terminated", terminated)
            truncated = self._held_to(to_flag, "truncated", truncated)
        if type(info) is not dict:
            self._held_to(check_info, info)
        if (
            type(observation) is not np.ndarray
            or observation.dtype is not self._dtype
            or observation.shape != self._shape
        ):
            observation = self._fit(observation)
        if terminated or truncated:
            # The reset that follows must not write over it, even if the environment always returns the same array.
            observation = observation.copy() if isinstance(observation, np.ndarray) else copy.deepcopy(observation)
        return observation, reward, terminated, truncated, info

    def recorded(self) -> dict[str, Any]:
        """Return where the environment is, as arrays and plain values."""
        own: Any = self.env.unwrapped
        if len(self._log) == self._log.maxlen and not self._has_own_state:  # the first actions may be forgotten
            return {"stream_seed": self.stream_seed, "episode": self.episode}
        actions = [action for action in self._log if action is not _RESET]
        return {
            "stream_seed": self.stream_seed,
            "first_episode": self._first_episode,
            "episode": self.episode,
            "step_count": self.step_count,
            "resets": [place for place, action in enumerate(self._log) if action is _RESET],
            "actions": map_stacked(np.stack, actions) if actions else np.zeros(0),
            "observation": map_leaves(lambda _, x: np.array(x), self._paths, self._observation),
            "reward_sum": self._reward_sum,
            "ends": [list(end) for end in self._ends],
            OWN_STATE: own.state_dict() if self._has_own_state else None,
        }

    def restore(self, record: dict[str, Any]) -> tuple[bool, Any]:
        """Go to where an environment was.

        Args:
            record: What `recorded` returned there; one of `stream_seed` and `episode` alone leads to a new episode.

        Returns:
            Whether that led to the very observation, rewards and ends that were recorded, and the observation where the
            environment now is: if it did not, the stream's next episode has begun.
        """
        self.stream_seed, self.episode = record["stream_seed"], record["episode"]
        if record.get(OWN_STATE) is not None and self._has_own_state:
            own: Any = self.env.unwrapped
            self.env.reset(seed=derive_seed(self.stream_seed, self.episode), options=self.first_options)
            own.load_state_dict(record[OWN_STATE])
            for limit in self._time_limits:  # all of them count the same steps: nothing in between repeats actions
                limit._elapsed_steps = record["step_count"]  # private to Gymnasium, which sets it only to 0
            self._begin_log()
            self._observation, self.step_count = record["observation"], record["step_count"]
            return True, self._observation
        exact = "actions" in record and not self._depends_on_the_past(record) and self._replay(record)
        if not exact:
            self.episode = record["episode"]
            self.reset(options=self.first_options)
        return exact, self._observation

    def _depends_on_the_past(self, record: dict[str, Any]) -> bool:
        """Whether episodes before the recorded one may matter, although the same actions give the same observations."""
        return remembers_episodes(self.env) and record["first_episode"] > 0

    def _replay(self, record: dict[str, Any]) -> bool:
        """Play an episode again, and return whether it went as it did."""
        self.episode = record["first_episode"] - 1  # the reset goes on to the one that was recorded
        self.reset(options=self.first_options)
        resets, actions = set(record["resets"]), record["actions"]
        taken = 0
        for place in range(len(first_leaf(actions)) + len(resets)):
            if place in resets:
                self.reset()
            else:
                self.step(map_leaves(lambda x, t=taken: x[t], actions))
                taken += 1
        same = map_leaves(lambda x, now: np.array_equal(np.asarray(now), x), record["observation"], self._observation)
        return (
            all(leaves(same))
            # Bit for bit: not even NaN can be in a reward that was learned from.
            and self._reward_sum == record["reward_sum"]
            and self._ends == record["ends"]
        )

    @property
    def _time_limits(self) -> list[Any]:
        """Those around the environment as it is now: a subclass may put a new one in the place of one that failed."""
        return [wrapper for wrapper in _wrappers(self.env) if isinstance(wrapper, TimeLimit)]

    @staticmethod
    def _owns_all_state(env: gymnasium.Env[Any, Any]) -> bool:
        """Whether the environment gives its state, and no wrapper around it but time limits has any besides."""
        own: Any = env.unwrapped
        gives_it = hasattr(own, "state_dict") and hasattr(own, "load_state_dict")
        return gives_it and all(isinstance(one, TimeLimit) or type(one) in _STATELESS for one in _wrappers(env))

    def _begin_log(self) -> None:
        self._log: deque[Any] = deque(maxlen=MAX_LOGGED_ACTIONS)
        self._first_episode = self.episode
        self._reward_sum = 0.0
        self._ends: list[list[Any]] = []  # of lives: place in the log, terminated, truncated

    def _held_to(self, check: Callable[..., T], *returned: Any) -> T:  # noqa: ANN401
        """Return what `check` makes of what the environment returned; complain of what is not expected."""
        try:
            return check(*returned)
        except Unexpected as error:
            raise self._complain(str(error)) from None

    def _fit(self, observation: Any) -> Nested:  # noqa: ANN401
        observation = self._held_to(self._form.fit, observation)
        if type(observation) is np.ndarray:
            # Floats of another width are as good as those of the space, and need not be looked at again.
            self._dtype = observation.dtype
        return observation

    def _check_bounds(self, path: str, x: Any) -> None:  # noqa: ANN401
        """Complain of an observation that is none of a discrete space; warn of one outside of the bounds of a `Box`."""
        if (found := misfit(self._form.leaves[path], x)) is None:
            return
        what, is_fatal = found
        name = f"observation {path}".rstrip()
        if is_fatal:
            raise self._complain(f"returned an {name} {what}")
        if self.index == 0:  # the others say the same
            rank_zero_warn(f"{self._name} returned an {name} outside of its space: {what}")

    @property
    def _name(self) -> str:
        return self.spec.id if self.spec is not None else type(self.unwrapped).__name__

    def _failure(self, where: str, error: BaseException) -> EnvironmentFailure:
        if is_older_interface_error(error):
            return self._complain(older_interface(where, self._name, error))
        return self._complain(f"raised in {where}: {summary(error)}")

    def _complain(self, what: str) -> EnvironmentFailure:
        seed = derive_seed(self.stream_seed, self.episode)
        label = describe(self.index, self.episode, seed, self.step_count, self.evaluation)
        return EnvironmentFailure(f"{label} {what}")


class RestartingEpisodes(SeededEpisodes):
    """Seeded episodes of an environment that is replaced when it fails; the stream goes on with its next episode.

    To raise, and to return NaN, infinity or anything that `SeededEpisodes` complains of, is to fail. A step that failed
    returns the first observation of the new episode, a reward of 0 and no end of an episode; `info` says what happened.
    The next episode has another seed, so a failure that the seed brings about does not come again.

    Args:
        make: Makes the environment.
        index: Its place among the environments of this process, for error messages.
        evaluation: Whether it is one of evaluation, for error messages.

    Raises:
        EnvironmentFailure: In `reset` and `step`: it failed again after `MAX_RESTARTS_IN_A_ROW` restarts between which
            no step was completed.
    """

    def __init__(
        self,
        make: Callable[[], gymnasium.Env[Any, Any]],
        index: int = 0,
        evaluation: bool = False,
    ) -> None:
        super().__init__(make(), index, evaluation)
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

"""Seeded episodes of one environment, which can be checked, replayed and restarted."""

from __future__ import annotations

import contextlib
import copy
import reprlib
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit
from lightning.pytorch.utilities.rank_zero import rank_zero_warn  # type: ignore[attr-defined]

from lightning_rl.environments.contract import (
    FAILURE,
    LOST,
    MAX_RESTARTS_IN_A_ROW,
    EnvironmentFailure,
    EnvSettings,
    Unexpected,
    derive_seed,
    describe,
    find_not_finite,
    give_up,
    is_failure,
    summary,
    to_number,
)
from lightning_rl.environments.wrappers.action_mask import ReadMasks
from lightning_rl.nested import Nested, first_leaf, leaves, map_leaves, map_space, map_stacked, nested_paths
from lightning_rl.validation import check


def to_flag(name: str, flag: Any) -> bool:
    """Return `terminated` or `truncated` as a boolean; raise `Unexpected` unless it is a single True, False, 1 or 0."""
    with contextlib.suppress(TypeError, ValueError, RuntimeError):
        plain = np.asarray(flag)
        if plain.size == 1 and plain.item() in (0, 1):
            return bool(plain.item())
    raise Unexpected(f"returned {name} {reprlib.repr(flag)}: expected True or False")


def check_info(info: Any) -> None:
    """Raise `Unexpected` unless `info` is a dict."""
    if not isinstance(info, dict):
        raise Unexpected(f"returned info {reprlib.repr(info)}: expected a dict")


def fit_leaf(path: str, space: spaces.Space[Any], x: Any) -> Any:
    """Return a leaf of an observation in a type that every backend can store.

    Numbers are converted to the type of the space, but floating-point numbers of another width stay as they are. A leaf
    of another shape, not of numbers, or changed by the conversion raises `Unexpected`.
    """
    name = f"an observation {path}".rstrip()
    try:
        given = np.asarray(x)
    except (TypeError, ValueError, RuntimeError) as error:  # such as a tensor on a GPU
        raise Unexpected(f"returned {name} that is not an array ({summary(error)})") from None
    if given.shape != space.shape:
        raise Unexpected(f"returned {name} of shape {given.shape}: expected {space.shape}")
    dtype: Any = space.dtype
    if given.dtype == dtype or (given.dtype.kind == "f" and dtype.kind == "f"):
        return x
    problem = ""
    if given.dtype.kind in "biufO":
        with contextlib.suppress(TypeError, ValueError, OverflowError), np.errstate(invalid="ignore"):
            converted = given.astype(dtype)
            if dtype.kind not in "biu" or np.array_equal(converted, given):
                return converted
            problem = f", which changes as {dtype}"
    raise Unexpected(
        f"returned {name} of {given.dtype}{problem}: expected {dtype}; the wrapper "
        "gymnasium.wrappers.DtypeObservation changes the dtype of observations and their space"
    )


def fit(space: spaces.Space[Any], paths: Nested, leaf_spaces: Nested, observation: Any) -> Nested:
    """Apply `fit_leaf` to all leaves of an observation; one of another structure than its space raises too."""
    try:
        return map_leaves(fit_leaf, paths, leaf_spaces, observation)
    except (LookupError, TypeError, ValueError) as error:
        raise Unexpected(
            f"returned an observation of another structure than its space has ({summary(error)}): expected an "
            f"element of {space}"
        ) from None


MAX_LOGGED_ACTIONS = 1_000_000
"""A longer episode cannot be replayed: its actions would fill the memory, and the replay would take minutes."""
_BLOCK = 1000
"""Logged actions are stacked in blocks: a million arrays would take 200 MB, and a second in each checkpoint."""
_STATELESS = (OrderEnforcing, PassiveEnvChecker, ReadMasks)
_NUMBERS = frozenset((int, np.int64, np.int32))
_FLAGS = frozenset((bool, np.bool_))


def _wrappers(env: gymnasium.Env[Any, Any]) -> Iterator[gymnasium.Wrapper[Any, Any, Any, Any]]:
    while isinstance(env, gymnasium.Wrapper):
        yield env
        env = env.env


class SeededEpisodes(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Seeds every episode, checks the returned values, and logs the actions so that the episode can be replayed.

    `reset(seed=s)` begins the stream of episodes of seed `s`, each `reset()` the next episode of the stream. An episode
    depends on the stream, its number and the actions, not on the number of environments.

    Up to `MAX_LOGGED_ACTIONS` actions since the last true reset are logged. `restore` replays them and compares
    observation, rewards and ends, since a wrapper may keep state from earlier episodes. An environment with
    `state_dict()` and `load_state_dict(state)` is restored through these instead, if its only wrappers are time limits
    and masks; its state must consist of tensors, NumPy values and plain Python values.

    `index` and `evaluation` only identify the environment in messages.

    Raises:
        EnvironmentFailure: In `reset` and `step`, with index, episode, seed and step: the environment raised, or
            returned an observation, reward, flag or `info` of a wrong type or shape. Numbers of the first observation
            outside of a `Box` cause a warning.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], index: int = 0, evaluation: bool = False) -> None:
        super().__init__(env)
        self.index = index
        self.evaluation = evaluation
        self.stream_seed = self.episode = self.step_count = 0
        for name in ("observation_space", "action_space"):
            found = getattr(env, name, None)
            check(isinstance(found, spaces.Space), name, found, "a space of Gymnasium, an attribute of the environment")
        space = env.observation_space
        self._paths = nested_paths(space)
        self._leaf_spaces = map_space(lambda leaf: leaf, space)
        # Arrays of this shape and type need no conversion. Nested spaces have none.
        self._shape, self._dtype = space.shape, space.dtype
        self._bounds_checked = False
        self._observation: Any = None
        self._settings: EnvSettings = {}, {}
        self._originals: dict[str, Any] = {}  # attributes before their first change
        self._begin_log()
        # The reset options that begin a stream with a new game, if a reset may continue one.
        has_games = env.has_wrapper_attr("continued_game")
        self.first_options = env.get_wrapper_attr("first_options") if has_games else None
        own = env.unwrapped
        self._has_own_state = (
            hasattr(own, "state_dict")
            and hasattr(own, "load_state_dict")
            and all(isinstance(one, TimeLimit) or type(one) in _STATELESS for one in _wrappers(env))
        )

    def set_env_settings(self, settings: EnvSettings) -> list[str]:
        """Set attributes and reset options from the next episode on; return the attributes that do not exist."""
        self._settings = settings
        return [name for name in settings[0] if not self.env.has_wrapper_attr(name)]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is None:
            self.episode += 1
        else:
            self.stream_seed, self.episode = seed, 0
            options = options if self.first_options is None else {**self.first_options, **(options or {})}
        self.step_count = 0
        try:
            observation, info = self._reset_env(options)
            check_info(info)
            self._observation = observation = self._fit(observation)
        except BaseException as error:
            self._raise_named("reset", error)
        if not self._bounds_checked:
            self._bounds_checked = True
            map_leaves(self._warn_outside, self._paths, self._leaf_spaces, observation)
        if self.first_options is not None and self.env.get_wrapper_attr("continued_game"):
            self._resets.append(self._num_logged)
            self._num_logged += 1
        else:
            self._begin_log()
        return observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        # A copy, since the environment may write into its action.
        logged: Any = action if type(action) in _NUMBERS else map_leaves(np.copy, action)
        self.step_count += 1
        try:
            observation, reward, terminated, truncated, info = self.env.step(action)
            if type(reward) is not float:
                reward = to_number(reward)
            if type(terminated) not in _FLAGS or type(truncated) not in _FLAGS:
                terminated, truncated = to_flag("terminated", terminated), to_flag("truncated", truncated)
            if type(info) is not dict:
                check_info(info)
            if (
                type(observation) is not np.ndarray
                or observation.dtype is not self._dtype
                or observation.shape != self._shape
            ):
                observation = self._fit(observation)
        except BaseException as error:
            self._raise_named("step", error)
        self._log.append(logged)
        self._num_logged += 1
        if len(self._log) == _BLOCK:
            self._stack_log()
        self._reward_sum += reward
        if terminated or truncated:
            # The next reset must not overwrite the final observation of an environment that reuses its array.
            observation = observation.copy() if isinstance(observation, np.ndarray) else copy.deepcopy(observation)
            self._ends.append([self._num_logged, bool(terminated), bool(truncated)])
        self._observation = observation
        return observation, reward, terminated, truncated, info

    def recorded(self) -> dict[str, Any]:
        """Return the state of the episode for `restore`, as arrays and plain values."""
        own: Any = self.env.unwrapped if self._has_own_state else None
        if self._num_logged >= MAX_LOGGED_ACTIONS and own is None:  # the first actions may be lost
            return {"stream_seed": self.stream_seed, "episode": self.episode}
        blocks = [*self._blocks, *([map_stacked(np.array, self._log)] if self._log and own is None else [])]
        return {
            "stream_seed": self.stream_seed,
            "first_episode": self._first_episode,
            "episode": self.episode,
            "step_count": self.step_count,
            "resets": [*self._resets],
            "actions": map_stacked(np.concatenate, blocks) if blocks else np.zeros(0),
            "observation": map_leaves(lambda _, x: np.array(x), self._paths, self._observation),
            "settings": self._begun_with,
            "reward_sum": self._reward_sum,
            "ends": [list(end) for end in self._ends],
            "own": None if own is None else own.state_dict(),
        }

    def restore(self, record: dict[str, Any]) -> tuple[bool, Any, dict[str, Any]]:
        """Restore an episode from a value of `recorded`, or begin one from a `stream_seed` and `episode`.

        Return whether observation, rewards and ends equal the recorded ones, and the current observation. Unless they
        are equal, the next episode of the stream has begun, with the returned `info`.
        """
        self.stream_seed, self.episode = record["stream_seed"], record["episode"]
        settings, self._settings = self._settings, record.get("settings", self._settings)
        exact = self._restore_episode(record)
        self._settings = settings
        info: dict[str, Any] = {}
        if not exact:
            self.episode = record["episode"]
            _, info = self.reset(options=self.first_options)
        return exact, self._observation, info

    def _restore_episode(self, record: dict[str, Any]) -> bool:
        """Restore the state of an episode with its own settings, and return whether it equals the recorded one."""
        if record.get("own") is not None and self._has_own_state:
            own: Any = self.env.unwrapped
            self._reset_env(self.first_options)
            own.load_state_dict(record["own"])
            for limit in _wrappers(self.env):
                if isinstance(limit, TimeLimit):
                    limit._elapsed_steps = record["step_count"]  # private; Gymnasium 1.4 can only set it to 0
            self._begin_log()
            self._observation, self.step_count = record["observation"], record["step_count"]
            return True
        if "actions" not in record:
            return False
        # The solver of Box2D keeps contacts over a reset, which a replay does not show.
        depends_on_past = type(self.unwrapped).__name__ == "BipedalWalker" and record["first_episode"] > 0
        with contextlib.suppress(EnvironmentFailure):  # an episode with another course may refuse the recorded actions
            return not depends_on_past and self._replay(record)
        return False

    def _reset_env(self, options: dict[str, Any] | None) -> Any:  # unchecked
        # Copies, since an environment may write into a value, which other environments and episodes share.
        attributes, reset_options = copy.deepcopy(self._settings)
        for name, value in (self._originals | attributes).items():
            self._originals.setdefault(name, self.env.get_wrapper_attr(name))
            self.env.set_wrapper_attr(name, value)
        if reset_options:
            options = {**reset_options, **(options or {})}
        return self.env.reset(seed=derive_seed(self.stream_seed, self.episode), options=options)

    def _replay(self, record: dict[str, Any]) -> bool:
        self.episode = record["first_episode"] - 1  # the reset increments it
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
        return all(leaves(same)) and self._reward_sum == record["reward_sum"] and self._ends == record["ends"]

    def _begin_log(self) -> None:
        self._log: list[Any] = []  # the actions after those in `_blocks`
        self._blocks: list[Nested] = []
        self._resets: list[int] = []  # places among the actions of resets that continued a game after a lost life
        self._num_logged = 0  # actions and such resets
        self._first_episode, self._begun_with = self.episode, self._settings
        self._reward_sum = 0.0
        self._ends: list[list[Any]] = []  # of lives: length of the log, terminated, truncated

    def _stack_log(self) -> None:
        if self._num_logged < MAX_LOGGED_ACTIONS and not self._has_own_state:
            self._blocks.append(map_stacked(np.array, self._log))
        else:
            self._blocks = []
        self._log = []

    def _fit(self, observation: Any) -> Nested:
        observation = fit(self.env.observation_space, self._paths, self._leaf_spaces, observation)
        if type(observation) is np.ndarray:
            self._dtype = observation.dtype  # floats of another width need no second check
        return observation

    def _warn_outside(self, path: str, space: spaces.Space[Any], x: Any) -> None:
        if not isinstance(space, spaces.Box):  # `EnvironmentBatch` checks each observation
            return
        name = f"observation {path}".rstrip()
        rounded = np.asarray(x).astype(space.dtype)
        outside = np.argwhere((rounded < space.low) | (rounded > space.high))
        if len(outside) and self.index == 0:  # the other environments have the same space
            place = tuple(outside[0].tolist())
            entry = f"(entry {', '.join(map(str, place))}) " if place else ""
            who = self.spec.id if self.spec is not None else type(self.unwrapped).__name__
            rank_zero_warn(
                f"{who} returned an {name} outside of its space: {entry}{rounded[place]}: expected "
                f"{space.low[place]} to {space.high[place]}"
            )

    def _raise_named(self, where: str, error: BaseException) -> NoReturn:
        if not is_failure(error):
            raise error
        if isinstance(error, Unexpected):
            raise self._failure(str(error)) from None
        is_old = isinstance(error, ValueError) and "values to unpack (expected" in str(error)
        hint = "; since Gym 0.26, reset returns (observation, info) and step returns five values" if is_old else ""
        raise self._failure(f"raised in {where}: {summary(error)}{hint}") from error

    def _failure(self, what: str) -> EnvironmentFailure:
        seed = derive_seed(self.stream_seed, self.episode)
        label = describe(self.index, self.episode, seed, self.step_count, self.evaluation)
        return EnvironmentFailure(f"{label} {what}")


class RestartingEpisodes(SeededEpisodes):
    """Seeded episodes of an environment that is replaced when it fails; its stream continues with the next episode.

    NaN, infinity and every failure of `SeededEpisodes` count. A failed step returns the first observation of the new
    episode, a reward of 0 and no end of an episode; its `info` has `FAILURE` and `LOST`. An `EnvironmentFailure` is
    raised after `MAX_RESTARTS_IN_A_ROW` restarts without a completed step in between.
    """

    def __init__(self, make: Callable[[], gymnasium.Env[Any, Any]], index: int = 0, evaluation: bool = False) -> None:
        super().__init__(make(), index, evaluation)
        self._make = make
        self._restarts_in_a_row = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        try:
            observation, info = super().reset(seed=seed, options=options)
            map_leaves(self._check_finite, self._paths, observation)
        except EnvironmentFailure as failure:
            return self._restart(failure)
        return observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        try:
            observation, reward, terminated, truncated, info = super().step(action)
            map_leaves(self._check_finite, self._paths, observation)
            self._check_finite("", reward, "reward")
        except EnvironmentFailure as failure:
            observation, info = self._restart(failure)
            return observation, 0.0, False, False, info | {LOST: True}
        self._restarts_in_a_row = 0
        return observation, reward, terminated, truncated, info

    def next_episode(self, stream_seed: int, episode: int, settings: EnvSettings) -> tuple[Any, dict[str, Any]]:
        """Begin the episode after `episode` of the stream of a lost worker process."""
        self.stream_seed, self.episode, self._settings = stream_seed, episode, settings
        return self.reset(options=self.first_options)

    def _restart(self, failure: EnvironmentFailure) -> tuple[Any, dict[str, Any]]:
        self._restarts_in_a_row += 1
        if self._restarts_in_a_row > MAX_RESTARTS_IN_A_ROW:
            give_up(failure)
        with contextlib.suppress(Exception, SystemExit):  # the first failure is the one to report
            self.env.close()
        try:
            self.env = self._make()
        except BaseException as error:
            if not is_failure(error):
                raise
            again = self._failure(f"raised in the making of a new environment: {summary(error)}")
            self.episode += 1  # as after a reset that fails
            observation, info = self._restart(again)
        else:
            observation, info = self.reset(options=self.first_options)
        return observation, info | {FAILURE: [str(failure), *info.get(FAILURE, ())]}

    def _check_finite(self, path: str, x: Any, name: str = "observation") -> None:
        rows = np.asarray(x)[None]
        if rows.dtype.kind == "f" and (found := find_not_finite(f"{name} {path}".rstrip(), rows)) is not None:
            raise self._failure(found[1])

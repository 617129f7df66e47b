"""Seeds as a tree, run → role → rank → environment → episode, and episodes that can be played again from them.

Simulators cannot be copied in general, but the same seed and the same actions lead to the same state. Whether they did
is seen by comparing the last observation, the sum of the rewards and the ends of episodes.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import gymnasium
import numpy as np
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit
from lightning.pytorch.utilities.rank_zero import rank_zero_warn  # type: ignore[attr-defined]

from lightning_rl.environments.errors import EnvironmentFailure, is_failure, summary
from lightning_rl.environments.interface import (
    ObservationForm,
    Unexpected,
    check_info,
    misfit,
    older_interface,
    tells_of_older_interface,
    to_flag,
    to_number,
)
from lightning_rl.environments.masks import MaskedEnvironment
from lightning_rl.nested import Nested, first_leaf, leaves, map_leaves, map_stacked

T = TypeVar("T")

TRAINING, EVALUATION, SAMPLING, MINIBATCHES, TESTING, ACTORS, FILMING = range(7)
"""Roles, the first branch of the tree."""

MAX_LOGGED_ACTIONS = 1_000_000
"""An episode that is longer cannot be played again: its actions would fill the memory, and take minutes."""

OWN_STATE = "own"
"""Where a record has what the environment itself returned as its state, which is left as it is."""

_WORLD_SURVIVES = ("BipedalWalker",)  # Box2D's solver remembers contacts of earlier episodes
_STATELESS = (OrderEnforcing, PassiveEnvChecker, MaskedEnvironment)
_NUMBERS = frozenset((int, np.int64, np.int32))
_FLAGS = frozenset((bool, np.bool_))
_RESET = None
"""In a log of actions: a reset that went on with what was before (a game between two lives)."""


def derive_seed(*path: int) -> int:
    """Return the seed at a node of the tree: independent of every other node's, below 2^31."""
    return int(np.random.SeedSequence(path[0], spawn_key=path[1:]).generate_state(1)[0] >> 1)


def role_prefix(evaluation: bool) -> str:
    """Return what messages tell environments of evaluation by: those of training have the same indices."""
    return "evaluation " if evaluation else ""


def describe(index: int, episode: int, seed: int, step: int, evaluation: bool = False) -> str:
    """Say where an environment is, so that `reset(seed=seed)` and `step` actions lead there again."""
    return f"{role_prefix(evaluation)}environment {index} (episode {episode}, seed {seed}, step {step})"


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
        first_options: Options of the reset that begins a stream, where a plain one would go on with what went before.
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
        first_options: dict[str, Any] | None = None,
        evaluation: bool = False,
    ) -> None:
        super().__init__(env)
        self.index = index
        self.first_options = first_options
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
            "elapsed": [limit._elapsed_steps for limit in self._time_limits],
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
            for limit, elapsed in zip(self._time_limits, record["elapsed"], strict=True):
                limit._elapsed_steps = elapsed
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
        return type(self.env.unwrapped).__name__ in _WORLD_SURVIVES and record["first_episode"] > 0

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
        if tells_of_older_interface(error):
            return self._complain(older_interface(where, self._name, error))
        return self._complain(f"raised in {where}: {summary(error)}")

    def _complain(self, what: str) -> EnvironmentFailure:
        seed = derive_seed(self.stream_seed, self.episode)
        label = describe(self.index, self.episode, seed, self.step_count, self.evaluation)
        return EnvironmentFailure(f"{label} {what}")

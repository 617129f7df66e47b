"""Vector environments of single environments, and `EnvironmentBatch`, one interface to every backend."""

from __future__ import annotations

import contextlib
import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import is_, itemgetter, setitem
from typing import Any, NamedTuple, NoReturn

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper
from gymnasium.vector.utils import batch_space, create_empty_array, iterate

from lightning_rl.environments.contract import (
    FAILURE,
    IDLE,
    LOST,
    NUM_AGENTS,
    Array,
    EnvironmentFailure,
    EnvSettings,
    EpisodeTracker,
    Find,
    Unexpected,
    WorkerFailure,
    autoreset_mode,
    batch_infos,
    find_bad,
    find_not_finite,
    is_failure,
    listed,
    role_prefix,
    summary,
    surely_finite,
    to_arrays,
    to_tensors,
)
from lightning_rl.environments.episodes import check_info, fit
from lightning_rl.environments.wrappers.history import History
from lightning_rl.environments.wrappers.transforms import RewardTransform
from lightning_rl.nested import Nested, leaves, map_leaves, map_paths, map_space, nested_paths
from lightning_rl.validation import ConfigurationError, check

Factory = Callable[[], gymnasium.Env[Any, Any]]
ChooseAhead = Callable[[int, Nested], Any]
"""A function of a count and observations `[B, ...]`, of which the first `count` rows are new. It returns actions
`[B, ...]`, or None if no environment may step ahead."""
Message = tuple[Any, ...]
"""A message to an environment, see `EnvironmentServer`."""


# No type arguments: VectorWrapper takes none before Gymnasium 1.4.
class NativeCartPole(VectorWrapper):
    """Adds `state_dict` and `load_state_dict` to Gymnasium's own vectorized CartPole."""

    _ARRAYS = ("state", "steps", "prev_done")

    def state_dict(self) -> dict[str, Any]:
        env: Any = self.env
        arrays = {name: np.asarray(getattr(env, name)) for name in self._ARRAYS}
        return arrays | {"random": env.np_random.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        env: Any = self.env
        env.np_random.bit_generator.state = state["random"]
        for name in self._ARRAYS:
            setattr(env, name, state[name].copy())


def check_values(env: Any, observations: Nested, infos: Any, **rows: Any) -> bool:
    """Raise `Unexpected` unless values of a vectorized environment are in arrays `[B, ...]` that fit its space.

    Return whether no observation needs a conversion to the dtype of its space, which later values might not fit.
    """
    check_info(infos)
    space = batch_space(env.single_observation_space, env.num_envs)
    fitting = fit(space, nested_paths(space), map_space(lambda leaf: leaf, space), observations)
    for name, x in rows.items():
        if (array := np.asarray(x)).shape != (env.num_envs,) or array.dtype.kind not in "biuf":
            what = f"{name} of shape {array.shape} and dtype {array.dtype}"
            raise Unexpected(f"returned {what}: expected one number for each of the {env.num_envs} environments")
    return all(leaves(map_leaves(is_, fitting, observations)))


class EnvironmentServer:
    """Answers the messages of an `EnvironmentPool` to one of its environments, in the environment's process.

    The step that ends an episode also resets the environment. The messages are `("step", action)`, `("reset" or
    "next_episode", keyword arguments)` and `("call", name, arguments, keyword arguments)`. Observations are written
    into row `index` of `observations`, `[B, ...]`.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], index: int, observations: Nested) -> None:
        self.env, self.index, self.observations = env, index, observations

    def answer(self, name: str, *arguments: Any) -> Any:  # any answer
        env, answer = self.env, None
        if name == "call":
            attribute = env.get_wrapper_attr(arguments[0])
            return attribute(*arguments[1], **arguments[2]) if callable(attribute) else attribute
        if name != "step":
            observation, answer = env.get_wrapper_attr(name)(**arguments[0])
        else:
            observation, reward, terminated, truncated, info = env.step(*arguments)
            if terminated or truncated:
                # A copy, since the reset may write into the same dict.
                final = {"final_info": dict(info), "final_obs": observation}
                observation, info = env.reset()
                info = info | final  # an environment may use these keys too
            answer = reward, terminated, truncated, info
        if type(self.observations) is np.ndarray:  # `map_leaves` takes three times as long
            self.observations[self.index] = observation
        else:
            map_leaves(lambda rows, x: setitem(rows, self.index, x), self.observations, observation)
        return answer


class EnvironmentPool(VectorEnv[Any, Any, Any], ABC):
    """A vector environment of single environments, each behind an `EnvironmentServer`.

    `step` and `reset` return the same arrays of observations each time. `each` has the environments, or objects
    with their attributes; if their spaces differ, a `RuntimeError` is raised.

    Attributes:
        observations: Arrays `[B, ...]`.
        steps_ahead: Whether `WorkerPool.choose_ahead` can be set.
        tracker: Tracks the episode and step of every environment, also of lost workers.
        settings: Settings of environments that replace lost ones.
    """

    observations: Nested
    steps_ahead = False

    def __init__(self, each: Sequence[Any]) -> None:
        like, self.num_envs = each[0], len(each)
        for index, one in enumerate(each):
            for name in ("observation_space", "action_space"):
                if (other := getattr(one, name)) != (expected := getattr(like, name)):
                    raise RuntimeError(f"environment {index} has {name}={other}, expected {expected} as environment 0")
        self.metadata = {**like.metadata, "autoreset_mode": AutoresetMode.SAME_STEP}
        self.render_mode = like.render_mode
        self.single_observation_space, self.single_action_space = like.observation_space, like.action_space
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.tracker = EpisodeTracker([], None)
        self.settings: EnvSettings = {}, {}

    @abstractmethod
    def ask(self, messages: Mapping[int, Message]) -> list[Any]:
        """Send messages to environments by index, and return their answers; None for a lost worker."""

    def replace(self, index: int) -> tuple[Any, dict[str, Any]]:
        """Replace a lost worker; return the first observation and `info` of the next episode."""
        raise NotImplementedError

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        taken = enumerate(iterate(self.action_space, actions))
        outcomes = self.ask({index: ("step", action) for index, action in taken})
        return self.observations, *together(outcomes)

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        seeds = seed if isinstance(seed, list) else [None if seed is None else seed + i for i in range(self.num_envs)]
        answers = self.ask({index: ("reset", {"seed": seed, "options": options}) for index, seed in enumerate(seeds)})
        infos = [self.replace(index)[1] if info is None else info for index, info in enumerate(answers)]
        return self.observations, batch_infos(infos)

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of every environment, or get an attribute; None for a lost worker; raises as `step`."""
        return tuple(self.ask(dict.fromkeys(range(self.num_envs), ("call", name, args, kwargs))))

    def call_each(self, name: str, arguments: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
        """Call a method of every environment with its own arguments."""
        return tuple(self.ask({i: ("call", name, args, {}) for i, args in enumerate(arguments)}))

    def get_attr(self, name: str) -> tuple[Any, ...]:
        return self.call(name)

    def set_attr(self, name: str, values: Any) -> None:
        each = values if isinstance(values, list | tuple) else [values] * self.num_envs
        self.call_each("set_wrapper_attr", [(name, value) for _, value in zip(range(self.num_envs), each, strict=True)])

    def render(self) -> tuple[Any, ...]:
        return self.call("render")

    def recorded(self) -> list[dict[str, Any]]:
        """Return `SeededEpisodes.recorded` of every environment."""
        records = []
        for index, record in enumerate(self.call("recorded")):
            # The next step replaces a worker that was lost since the last one.
            lost = {"stream_seed": self.tracker.streams[index], "episode": int(self.tracker.episodes[index])}
            records.append(lost if record is None else record)
        return records

    def restore(self, records: list[dict[str, Any]]) -> tuple[Array, Nested, dict[str, Any]]:
        """Restore environments from their records; return which are exact, `[B]`, and the observations, `[B, ...]`.

        Environments that are not exact have begun new episodes, with the returned `info`.
        """
        self.tracker.restore(records)
        answers = self.call_each("restore", [(record,) for record in records])
        # None comes from a worker that was lost during the replay.
        results = [(False, *self.replace(i)) if answer is None else answer for i, answer in enumerate(answers)]
        exact, rows, infos = zip(*results, strict=True)
        # Environments may return keys in any order, and lists instead of tuples.
        like = nested_paths(self.single_observation_space)
        return np.array(exact), map_leaves(lambda _, *parts: np.stack(parts), like, *rows), batch_infos(infos)


def together(outcomes: Sequence[Any]) -> tuple[Any, Any, Any, dict[str, Any]]:
    """Return the rewards, ends and `info` of all environments in arrays `[B]`."""
    rewards, terminated, truncated, infos = zip(*outcomes, strict=True)
    return np.array(rewards, np.float64), np.array(terminated, bool), np.array(truncated, bool), batch_infos(infos)


class LocalVectorEnv(EnvironmentPool):
    """Steps environments one after another in this process."""

    def __init__(self, factories: Sequence[Factory]) -> None:
        self.envs = []  # Gymnasium before 1.3 closes them in any case
        with contextlib.ExitStack() as made:  # closes the environments that were made if the next one fails
            envs = [made.enter_context(make()) for make in factories]
            super().__init__(envs)
            made.pop_all()
        self.envs = envs
        self.observations = create_empty_array(self.single_observation_space, self.num_envs)
        self._servers = [EnvironmentServer(env, index, self.observations) for index, env in enumerate(self.envs)]

    def ask(self, messages: Mapping[int, Message]) -> list[Any]:
        return [self._servers[index].answer(*message) for index, message in messages.items()]

    def close_extras(self, **kwargs: Any) -> None:
        with contextlib.ExitStack() as stack:  # one that fails does not keep the others open
            for env in self.envs:
                stack.enter_context(env)


def for_seeds(records: list[dict[str, Any]], seeds: list[int]) -> list[dict[str, Any]]:
    """Return the records of `len(seeds)` environments; additional environments begin new streams."""
    # Episode -1 comes before the first episode of the new stream.
    beginning = [{"stream_seed": seed, "episode": -1} for seed in seeds[len(records) :]]
    return [*records[: len(seeds)], *beginning]


def to_array(x: Any) -> np.ndarray[Any, Any]:
    """Return a tensor's values as an array."""
    if not isinstance(x, torch.Tensor):
        return np.asarray(x)
    return (x.float() if x.dtype == torch.bfloat16 else x).detach().cpu().numpy()  # NumPy has no bfloat16


def set_vector_attributes(env: VectorEnv[Any, Any, Any], settings: EnvSettings, originals: dict[str, Any]) -> None:
    """Set attributes of the outermost wrapper that has them, or of the environment; restore and keep `originals`."""
    attributes, reset_options = settings
    check(not reset_options, "reset_options", reset_options, "none with backend native or torch")
    for name, value in (originals | attributes).items():
        owner: Any = env
        while isinstance(owner, VectorWrapper) and not hasattr(owner, name):
            owner = owner.env
        check(hasattr(owner, name), "attributes", [name], f"attributes of the environments in {env}")
        originals.setdefault(name, getattr(owner, name))
        setattr(owner, name, value)


class Step(NamedTuple):
    """The result of one step of `B` environments, in arrays, or in tensors on the device of the environments.

    Attributes:
        observations: Observations for the next action, `[B, ...]`; the next step may overwrite them.
        rewards: `[B]`, like `terminated`, `truncated` and `valid`; 0 where not `valid`.
        valid: False where the environment ignored the action, because it was reset or idle; None if all are.
        final_observations: Pairs (environment, final observation), one for each episode that this step ended. Training
            with `backend: torch` has only truncated episodes, with None for an observation that is not returned.
        infos: Gymnasium's vector `info`.
        failed: Environments that failed and were replaced in this step. The step is not `valid` for them: their episode
            ended one step earlier, and `observations` has the first observation of the next episode.
        frames: Number of simulation steps; None if actions are not repeated.
        repeats: Number of times that each environment took its action, `[B]`; None unless the policy chooses it.
    """

    observations: Nested
    rewards: Any
    terminated: Any
    truncated: Any
    valid: Any
    final_observations: list[tuple[int, Nested | None]]
    infos: dict[str, Any]
    failed: Sequence[int] = ()
    frames: int | None = None
    repeats: Array | None = None


class EnvironmentBatch:
    """A vector environment with the same results in every autoreset mode, and only finite numbers.

    In the step that ends an episode, environments return

    * with `SAME_STEP` the first observation of the next episode, and the final observation in `info`;
    * with `NEXT_STEP` (and EnvPool) the final observation; the next step resets and is not `valid`;
    * with `DISABLED` the final observation; `EnvironmentBatch` then resets the environment.

    Values of vectorized environments are checked in the first step; observations with another dtype in every step.

    Attributes:
        can_step_ahead: Whether half of the environments can step while the policy acts on the other half.
        observations: The last observations of `env`; None before the first reset.

    Args:
        env: The environments; without `metadata["autoreset_mode"]` a `ConfigurationError` is raised.
        seeds: Seed of each environment's stream of episodes.
        reset_seed: Seed for `env.reset`: the list of all seeds for environments with `SeededEpisodes`, an array or a
            number for native environments, None for EnvPool, which gets its seeds in the constructor.
        histories: Parts that are added to the observations of `env`, in this order.
        read_repeats: Returns simulation steps and action repeats, see `action_repeat.read_repeats`; None: no repeats.
        transform: Scales and clips the rewards, `[B]`.
        evaluation: Whether these are evaluation environments.
        is_wrapped: Whether the user wrapped `env`. The state of wrappers is unknown: a resumed run begins new episodes.
    """

    _own_kind = "arrays"

    def __init__(
        self,
        env: VectorEnv[Any, Any, Any],
        seeds: list[int],
        reset_seed: list[int] | Array | int | None,
        histories: Sequence[History] = (),
        read_repeats: Callable[[dict[str, Any], Array], tuple[int, Array | None]] | None = None,
        transform: RewardTransform | None = None,
        evaluation: bool = False,
        is_wrapped: bool = False,
    ) -> None:
        self.env = env
        self.observations: Nested = None
        self._is_checked = False
        self._read_repeats, self._transform = read_repeats, transform
        self.num_envs = env.num_envs
        self.num_agents: int = (env.metadata or {}).get(NUM_AGENTS, 1)
        self._histories = histories
        self.single_observation_space = histories[-1].space if histories else env.single_observation_space
        self.single_action_space = env.single_action_space
        self._tracker = EpisodeTracker(seeds, reset_seed, evaluation)
        self._role = role_prefix(evaluation)
        self._reset_seed = reset_seed
        self.mode = autoreset_mode(env)
        # Functions of the rows of each leaf; None for integers of a `Box`.
        self._find_bad = map_paths(find_bad, env.single_observation_space)
        self._failures: list[str] = []
        self._originals: dict[str, Any] = {}  # attributes before their first change
        self._pool: Any = env.unwrapped if isinstance(env.unwrapped, EnvironmentPool) else None
        if self._pool is not None:
            self._pool.tracker = self._tracker
        # The policy acts on the observations of the workers, before any wrapper or history changes them.
        self.can_step_ahead = isinstance(env, EnvironmentPool) and not histories and env.steps_ahead
        has_state = not is_wrapped and (hasattr(env, "load_state_dict") or hasattr(env, "recorded"))
        kind = self._own_kind if self._pool is None else "episodes"
        self._kind_of_state = kind if has_state else None
        # Which environments the next step resets; None: no environment.
        self._resets_next: Any = None

    def reset(self) -> Nested:
        """Start every environment's stream of episodes again, and return the first observations; raises as `step`."""
        self._tracker.reset()
        self._resets_next = None
        observations, infos = self._reset(**({} if self._reset_seed is None else {"seed": self._reset_seed}))
        self._check_observations(observations)
        return self._begin_histories(np.ones(self.num_envs, bool), observations, infos)

    def choose_ahead(self, choose: ChooseAhead) -> None:
        """Let `choose` choose actions in the next step, see `WorkerPool.choose_ahead`; requires `can_step_ahead`."""
        self._pool.choose_ahead = choose

    def step(self, actions: Any) -> Step:  # nested
        """Step every environment once.

        An environment that raises, returns a number that is not finite in float32, or whose worker process dies or
        exceeds the time limit raises an `EnvironmentFailure`.
        """
        self._tracker.clock += 1
        try:
            # Copies, since an environment may write into its action.
            observations, rewards, terminated, truncated, infos = self.env.step(map_leaves(np.copy, actions))
            if self._pool is None:
                observations, rewards, terminated, truncated = self._checked(
                    observations, rewards, terminated, truncated, infos
                )
        except BaseException as error:  # not `_named`, which costs a microsecond
            self._raise_named(error, "step")
        self.observations = observations
        failed = self._note_failures(infos) if FAILURE in infos else ()
        if rewards.dtype.kind == "f" and not surely_finite(rewards):
            self._check_rows(partial(find_not_finite, "reward"), rewards)
        if self._transform is not None:  # after the check, since infinity can be clipped
            rewards = self._transform(rewards)
        ended = terminated | truncated
        valid: Array | None = None
        if failed:
            valid = np.ones(self.num_envs, bool)
            valid[failed] = False
        if IDLE in infos:
            valid = ~infos[IDLE]
        any_ended = np.count_nonzero(ended) > 0  # faster than `any` for few environments
        if self.mode is AutoresetMode.NEXT_STEP:
            if self._resets_next is not None:
                valid = ~self._resets_next
                rewards = np.where(valid, rewards, 0)
            self._resets_next = ended if any_ended else None
        repeats: tuple[int | None, Array | None] = (None, None)
        if self._read_repeats is not None:
            repeats = self._read_repeats(infos, np.ones(self.num_envs, bool) if valid is None else valid)
        # A reset, the last idle step and a replaced environment begin an episode.
        begins = None if valid is None else ~valid
        at_ends = np.flatnonzero(ended).tolist() if any_ended else []
        reached, first_infos = observations, infos
        if any_ended and self.mode is AutoresetMode.SAME_STEP:
            reached = self._with_finals(observations, map_leaves(np.asarray, infos["final_obs"]), at_ends)
        self._check_observations(reached)
        shown = self._advance_histories(reached, actions, rewards, ended, infos) if self._histories else reached
        # Copies, since the next step may overwrite the observations.
        finals = [(index, map_leaves(lambda x, i=index: np.array(x[i]), shown)) for index in at_ends]
        if any_ended:
            # In NEXT_STEP mode the next step is step 0 of the new episode.
            self._tracker.start(ended, in_steps=int(self.mode is AutoresetMode.NEXT_STEP))
            if self.mode is AutoresetMode.DISABLED:
                # These may be the environment's own arrays, which its reset clears.
                rewards, terminated, truncated = np.copy(rewards), terminated.copy(), truncated.copy()
                infos = {key: x.copy() if isinstance(x, np.ndarray) else x for key, x in infos.items()}
                observations, first_infos = self._reset(options={"reset_mask": ended})
            if self.mode is not AutoresetMode.NEXT_STEP:
                self._check_observations(observations)
                begins = ended if begins is None else begins | ended
        if begins is not None:
            shown = self._begin_histories(begins, observations, first_infos) if self._histories else observations
        return Step(shown, rewards, terminated, truncated, valid, finals, infos, failed, *repeats)

    def set_env_settings(self, settings: EnvSettings) -> None:
        """Change attributes and reset options; see `RolloutDataModule.set_env_settings`."""
        with self._named("set_env_settings"):
            if self._pool is None:
                set_vector_attributes(self.env, settings, self._originals)
                return
            to_tensors(settings, "env_settings")  # raises for values that checkpoints cannot hold
            # A copy, since a caller may write into a value, such as a list of opponents, during an episode.
            self._pool.settings = settings = copy.deepcopy(settings)
            for missing in self._pool.call("set_env_settings", settings):
                check(not missing, "attributes", missing, f"attributes of the environments in {self.env}")

    def pop_failures(self) -> list[str]:
        """Return a message for each environment that was replaced since the last call."""
        failures, self._failures = self._failures, []
        return failures

    def info_values(self, step: Step, key: str) -> torch.Tensor:
        """Return the numbers under `info[key]`, `[B]`; NaN in rows that have no number or are not valid.

        A single number applies to all rows; other values raise a `ConfigurationError`. In `SAME_STEP` mode the `info`
        of a final step is in `final_info`, beside the `info` of the reset; without `final_info`, the only one counts.
        """
        valid = np.ones(self.num_envs, bool) if step.valid is None else to_array(step.valid)
        sources = [(step.infos, valid)]
        if self.mode is AutoresetMode.SAME_STEP and "final_info" in step.infos:
            ended = to_array(step.terminated | step.truncated)
            sources = [(step.infos, valid & ~ended), (step.infos["final_info"], ended)]
        numbers = np.full(self.num_envs, np.nan)
        for infos, rows in sources:
            given = to_array(infos.get(key, np.nan)).ravel()
            expected = f"one number or {self.num_envs} in info[{key!r}], got {len(given)}"
            check(len(given) in (1, self.num_envs), "info_keys", key, expected)
            present = rows & to_array(infos.get(f"_{key}", True)).astype(bool)
            found = np.broadcast_to(given, self.num_envs)[present]
            try:
                numbers[present] = found
            except (TypeError, ValueError):
                wrong = next(x for x in found if not isinstance(x, int | float | np.number | np.bool_ | None))
                raise ConfigurationError(
                    f"info_keys={key!r} is not valid: info[{key!r}] is {wrong!r}, expected a number"
                ) from None
        return torch.from_numpy(numbers)

    def check_finite(self) -> None:
        """Do nothing: `step` checks every value."""

    def label(self, index: int) -> str:
        return self._tracker.labels([index])

    def state_dict(self) -> dict[str, Any] | None:
        """Return the state of all environments as tensors and plain values; None if the backend has no known state.

        The state of `sync` and `async` environments is their seeds and actions; a native environment has its own state.
        """
        if self._kind_of_state is None:
            return None
        own: Any = self.env
        with self._named("recorded"):
            if hasattr(own, "recorded"):
                environments = own.recorded()
            else:
                environments = {"own": own.state_dict(), "observations": self.observations}
        return {
            "kind": self._kind_of_state,
            "num_envs": self.num_envs,
            "environments": to_tensors(environments, "environment"),
            "histories": to_tensors([history.memory for history in self._histories], "history"),
            "resets_next": to_tensors(self._resets_next, "resets_next"),
        }

    def load_state_dict(self, state: dict[str, Any]) -> tuple[Array, Nested] | None:
        """Restore a state; return the mask `[B]` of exact environments and observations, or None if it does not fit."""
        if state["kind"] != self._kind_of_state or len(state["histories"]) != len(self._histories):
            return None
        environments = to_arrays(state["environments"])
        if state["kind"] == "episodes":
            environments = for_seeds(environments, self._tracker.streams)
        elif state["num_envs"] != self.num_envs:
            return None
        own: Any = self.env
        with self._named("restore"):
            if hasattr(own, "recorded"):
                exact, self.observations, infos = own.restore(environments)
            else:
                self.reset()
                own.load_state_dict(environments["own"])
                exact, self.observations, infos = np.ones(self.num_envs, bool), environments["observations"], {}
        self._resets_next = to_arrays(state["resets_next"])
        if not exact.all():
            self._tracker.start(~exact)
        for history, memory in zip(self._histories, state["histories"], strict=True):
            history.load(to_arrays(memory))
        return exact, self._begin_histories(~exact, self.observations, infos)

    def close(self) -> None:
        with self._named("close"):
            try:
                self.env.close()
            finally:
                self.env.closed = True  # or the destructor of the environment would close it again

    def _note_failures(self, infos: dict[str, Any]) -> list[int]:
        """Note which environments were replaced, and return the environments whose step has no outcome."""
        for index in np.flatnonzero(infos[f"_{FAILURE}"]).tolist():
            self._failures += infos[FAILURE][index]
            self._tracker.restart(index, len(infos[FAILURE][index]))
        return np.flatnonzero(infos[f"_{LOST}"]).tolist() if LOST in infos else []

    def _reset(self, **kwargs: Any) -> tuple[Nested, dict[str, Any]]:  # the arguments of `VectorEnv.reset`
        with self._named("reset"):
            observations, infos = self.env.reset(**kwargs)
            if self._pool is None and not self._is_checked:
                check_values(self.env, observations, infos)
        self.observations = observations = map_leaves(np.asarray, observations)
        if FAILURE in infos:
            self._note_failures(infos)
        return observations, infos

    def _checked(
        self, observations: Nested, rewards: Any, terminated: Any, truncated: Any, infos: dict[str, Any]
    ) -> tuple[Nested, Array, Array, Array]:
        """Check a step of vectorized environments; return observations, rewards and boolean flags in NumPy arrays."""
        if not self._is_checked:
            rows = {"rewards": rewards, "terminated": terminated, "truncated": truncated}
            self._is_checked = check_values(self.env, observations, infos, **rows)
        terminated, truncated = np.asarray(terminated, bool), np.asarray(truncated, bool)
        if self.mode is AutoresetMode.SAME_STEP and (terminated | truncated).any():
            if "final_obs" not in infos:
                what = "returned no info['final_obs'] at the end of an episode"
                raise Unexpected(f"{what}: expected it in SAME_STEP mode")
            if (counts := {len(leaf) for leaf in leaves(infos["final_obs"])}) != {self.num_envs}:
                raise Unexpected(f"returned info['final_obs'] of {min(counts)} rows: expected one for each environment")
        return map_leaves(np.asarray, observations), np.asarray(rewards), terminated, truncated

    def _with_finals(self, observations: Nested, finals: Nested, indices: list[int]) -> Nested:
        """Return observations with the final observations of the episodes that ended, at their `indices`."""
        reached = map_leaves(lambda _, x: np.copy(x), self._find_bad, observations)
        for index in indices:
            final = map_leaves(itemgetter(index), finals)  # of arrays, or of an array of objects
            map_leaves(lambda _, rows, x, i=index: setitem(rows, i, x), self._find_bad, reached, final)
        return reached

    def _advance_histories(self, observations: Nested, *outcome: Any) -> Nested:  # other arguments of `advance`
        """Add a step to the histories, and return the observations with them."""
        with self._named("step"):
            for history in self._histories:
                history.advance(observations, *outcome)
                observations = history.show(observations)
        return observations

    def _begin_histories(self, which: Array, observations: Nested, infos: dict[str, Any]) -> Nested:
        """Start new histories for the environments in the mask `which`, and return the observations with them."""
        with self._named("reset"):
            for history in self._histories:
                history.start_episodes(which, observations, infos)
                observations = history.show(observations)
        return observations

    @contextlib.contextmanager
    def _named(self, where: str) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._raise_named(error, where)

    def _raise_named(self, error: BaseException, where: str) -> NoReturn:
        if isinstance(error, EnvironmentFailure | ConfigurationError) or not is_failure(error):
            raise error
        if not isinstance(error, WorkerFailure):
            what = str(error) if isinstance(error, Unexpected) else f"raised in {where}: {summary(error)}"
            at = f"(step {self._tracker.clock}, seeds {listed(self._tracker.streams, 4)})"
            raise EnvironmentFailure(f"the {self._role}environments {what} {at}") from error
        failure = EnvironmentFailure(f"{self._tracker.labels(error.indices)} {error.what}")
        for note in getattr(error, "__notes__", ()):  # the traceback in a worker process
            failure.add_note(note)
        raise failure from error

    def _check_observations(self, observations: Nested) -> None:
        map_leaves(self._check_rows, self._find_bad, observations)

    def _check_rows(self, find: Find | None, rows: Array) -> None:
        if find is not None and (found := find(rows)) is not None:
            raise EnvironmentFailure(f"{self.label(found[0])} {found[1]}")

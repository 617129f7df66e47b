"""A batch of environments behind one contract, and its state in checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper
from gymnasium.wrappers.vector import TransformReward

from lightning_rl.environments.adapters import VectorState
from lightning_rl.environments.contract import (
    EPISODE,
    FAILURE,
    IDLE,
    LOST,
    OWN_STATE,
    EnvironmentFailure,
    WorkerFailure,
    autoreset_mode,
    complaint,
    first_not_finite,
    is_failure,
    summary,
    surely_finite,
)
from lightning_rl.environments.seeding import EpisodeTracker, role_prefix
from lightning_rl.environments.workers import ChooseAhead
from lightning_rl.environments.wrappers.action_repeat import RepeatCounter
from lightning_rl.environments.wrappers.vector_history import VectorHistory
from lightning_rl.nested import Nested, map_leaves, map_space, nested_paths
from lightning_rl.validation import ConfigurationError

Array = np.ndarray[Any, Any]


def recorded(env: Any, tracker: EpisodeTracker) -> list[dict[str, Any]]:  # noqa: ANN401 - a vector environment of single ones
    """Return the record of every environment (see `SeededEpisodes.recorded`)."""
    records = []
    for index, record in enumerate(env.call("recorded")):
        # A worker that was lost since the last step is only replaced in the next one.
        failed = {"stream_seed": tracker.streams[index], "episode": int(tracker.episodes[index])}
        records.append(failed if record is None else to_tensors(record))
    return records


def restore(env: Any, tracker: EpisodeTracker, states: list[dict[str, Any]]) -> tuple[Array, Nested]:  # noqa: ANN401
    """Give every environment its own record.

    Returns:
        Which environments are where they were, `[B]`, and the observations, `[B, ...]`; the others have begun new
        episodes.
    """
    records = [to_arrays(state) for state in states]
    tracker.streams = [record["stream_seed"] for record in records]
    answers: Any = env.call_each("restore", [(record,) for record in records])
    # None comes from a worker that was lost while it played the episode again.
    answers = [(False, env.replace(i)[0]) if answer is None else answer for i, answer in enumerate(answers)]
    exact, rows = zip(*answers, strict=True)
    tracker.start(~np.array(exact))
    # Environments may give keys in any order, and lists for tuples.
    like = nested_paths(env.single_observation_space)
    return np.array(exact), map_leaves(lambda _, *parts: np.stack(parts), like, *rows)


def stateful_parts(env: Any) -> tuple[list[VectorHistory], Any]:  # noqa: ANN401 - a vector environment
    """Return the wrappers with a history, the innermost first, and the vector environment within them.

    The latter is None where a wrapper of another kind may have a state too.
    """
    histories: list[VectorHistory] = []
    is_known = True
    while isinstance(env, VectorWrapper) and not isinstance(env, VectorState):
        if isinstance(env, VectorHistory):
            histories.insert(0, env)
        else:
            is_known = is_known and isinstance(env, TransformReward)
        env = env.env
    return histories, env if is_known else None


def for_seeds(state: dict[str, Any], seeds: list[int]) -> dict[str, Any]:
    """Return the state of a batch as one of `len(seeds)` environments: the first ones stay, further ones begin anew."""
    kept, added = state["environments"][: len(seeds)], seeds[len(state["environments"]) :]
    # Before the first episode of the stream that is the new environment's own.
    beginning = [{"stream_seed": seed, "episode": -1} for seed in added]
    counts = {
        name: torch.cat([state[name][: len(seeds)], torch.full((len(added),), value, dtype=state[name].dtype)])
        for name, value in (("began", 0), ("episodes", -1), ("resets_next", False))
    }
    return {**state, **counts, "environments": [*kept, *beginning]}


def to_tensors(values: dict[str, Any]) -> dict[str, Any]:
    """Copy arrays to tensors, nested ones too."""

    def convert(x: Any) -> Any:  # noqa: ANN401
        return torch.from_numpy(x.copy()) if isinstance(x, np.ndarray) else x

    return {key: x if key == OWN_STATE else map_leaves(convert, x) for key, x in values.items()}


def to_arrays(values: dict[str, Any]) -> dict[str, Any]:
    """View tensors as arrays, nested ones too."""

    def convert(x: Any) -> Any:  # noqa: ANN401
        return x.numpy() if isinstance(x, torch.Tensor) else x

    return {key: x if key == OWN_STATE else map_leaves(convert, x) for key, x in values.items()}


class Step(NamedTuple):
    """What one step of `B` environments gave, as arrays, or as tensors on the environments' device.

    Attributes:
        observations: Where the next action is chosen, `[B, ...]`, nested as the space is; may be overwritten by the
            next step.
        rewards: `[B]`; 0 where not `valid`.
        terminated: `[B]`.
        truncated: `[B]`.
        valid: False where the environment was only being reset, or waited for others, and ignored the action, `[B]`;
            None if nowhere.
        final_observations: (environment, the observation it really reached) for each episode that this step ended; of
            tensors, for each that it truncated, with None where the environments do not say what was reached.
        infos: Gymnasium's vector info.
        failed: Environments that failed in this step and were replaced: the episode ended with the step before it, and
            `observations` has the first one of the next. Not `valid`.
        frames: Steps of the simulation, where actions are repeated; None: one for each that is `valid`.
        repeats: How often each environment took its action, where the policy chooses that, `[B]`; None elsewhere.
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
    """A vector environment whose steps mean the same in every autoreset mode, and never give NaN or infinity.

    * `SAME_STEP`: the step that ends an episode returns the next one's first observation; the final one is in `info`.
    * `NEXT_STEP` (and EnvPool): it returns the final observation, and the step after it only resets: not `valid`.
    * `DISABLED`: it returns the final observation, and this class resets.

    Args:
        env: A `gymnasium.vector.VectorEnv`.
        seeds: Seed of each environment's stream of episodes.
        reset_seed: What `env.reset` is given: the list of all seeds where each environment makes its own episodes of
            them (`SeededEpisodes`); an array or a number for environments that come vectorised; None for EnvPool,
            which was given its seeds when it was made.
        repeats: Reads how often actions are taken; None if each is taken once.
        evaluation: Whether these are environments of evaluation, for error messages.

    Attributes:
        can_step_ahead: Whether half of the environments can step while the policy acts on the other half.

    Raises:
        ConfigurationError: The environment does not say in `metadata["autoreset_mode"]` how it resets.
    """

    def __init__(
        self,
        env: VectorEnv[Any, Any, Any],
        seeds: list[int],
        reset_seed: list[int] | Array | int | None,
        repeats: RepeatCounter | None = None,
        evaluation: bool = False,
    ) -> None:
        self.env = env
        self._repeats = repeats
        self.num_envs = env.num_envs
        self.single_observation_space = env.single_observation_space
        self.single_action_space = env.single_action_space
        self._tracker = EpisodeTracker(seeds, reset_seed, evaluation)
        self._role = role_prefix(evaluation)
        self._reset_seed = reset_seed
        self.mode = autoreset_mode(env)
        space = self.single_observation_space
        self._is_float = map_space(
            lambda leaf: isinstance(leaf, spaces.Box) and np.issubdtype(leaf.dtype, np.floating), space
        )
        # What a leaf is called in errors.
        self._names = map_leaves(lambda path: f"observation {path}".rstrip(), nested_paths(space))
        self._failures: list[str] = []
        base = getattr(env, "unwrapped", env)
        if hasattr(base, "tracker"):
            base.tracker = self._tracker
        self._histories, self._base = stateful_parts(env)
        self._kind_of_state: str | None = "arrays" if isinstance(self._base, VectorState) else None
        if isinstance(reset_seed, list) and self._base is not None:
            self._kind_of_state = "episodes"
        # The policy acts ahead on the observations of the workers: no wrapper may change observations.
        self.can_step_ahead = (
            hasattr(self._base, "choose_ahead")
            and not self._histories
            and self.mode is AutoresetMode.SAME_STEP
            and self.num_envs > 1
        )
        # Which environments the next step only resets; None: none of them.
        self._resets_next: Array | None = None

    def reset(self) -> Nested:
        """Begin every environment's stream of episodes again, and return the first observations.

        Raises:
            EnvironmentFailure: As `step`.
        """
        self._tracker.forget()
        self._resets_next = None
        observations = self._reset(**({} if self._reset_seed is None else {"seed": self._reset_seed}))
        self._check_observations(observations)
        return observations

    def step(self, actions: Array, choose_ahead: ChooseAhead | None = None) -> Step:
        """Step every environment once.

        Args:
            actions: `[B, ...]`.
            choose_ahead: See `WorkerPool`; requires `can_step_ahead`.

        Raises:
            EnvironmentFailure: An environment raised, returned something not finite (or too large for float32), or its
                worker process died or took longer than the limit.
        """
        self._tracker.clock += 1
        if choose_ahead is not None:
            self._base.choose_ahead = choose_ahead
        try:
            observations, rewards, terminated, truncated, infos = self.env.step(actions)
        except BaseException as error:  # not `_named`, which would cost every step a microsecond
            self._raise_named(error, "step")
        failed = self._note_failures(infos, terminated | truncated) if FAILURE in infos else ()
        if rewards.dtype.kind == "f" and not surely_finite(rewards):
            self._check_rows("reward", rewards)
        ended = terminated | truncated
        valid: Array | None = None
        if failed:
            valid = np.ones(self.num_envs, bool)
            valid[failed] = False
        if IDLE in infos:
            valid = ~infos[IDLE]
        finals: list[tuple[int, Nested]] = []
        any_ended = np.count_nonzero(ended) > 0  # quicker than `any` for a few
        if self.mode is AutoresetMode.NEXT_STEP:
            if self._resets_next is not None:
                valid = ~self._resets_next
                rewards = np.where(valid, rewards, 0)
            self._resets_next = ended if any_ended else None
        repeats: tuple[int | None, Array | None] = (None, None)
        if self._repeats is not None:
            repeats = self._repeats.read(infos, np.ones(self.num_envs, bool) if valid is None else valid)
        if not any_ended:
            self._check_observations(observations)
            return Step(observations, rewards, terminated, truncated, valid, finals, infos, failed, *repeats)
        at_ends = np.flatnonzero(ended).tolist()
        if self.mode is AutoresetMode.SAME_STEP:
            finals += [(index, self._row(infos["final_obs"], index)) for index in at_ends]
            for index, final in finals:
                self._check_observations(map_leaves(lambda x: x[None], final), index)
        else:
            self._check_observations(observations)
            finals += [(index, self._row(observations, index)) for index in at_ends]
        # In NEXT_STEP mode the step to come is the new episode's step 0.
        self._tracker.start(ended, in_steps=int(self.mode is AutoresetMode.NEXT_STEP))
        if self.mode is AutoresetMode.DISABLED:
            # They may be the environment's own arrays, which its reset clears.
            rewards, terminated, truncated = np.copy(rewards), terminated.copy(), truncated.copy()
            observations = self._reset(options={"reset_mask": ended})
        if self.mode is not AutoresetMode.NEXT_STEP:
            self._check_observations(observations)
        return Step(observations, rewards, terminated, truncated, valid, finals, infos, failed, *repeats)

    def pop_failures(self) -> list[str]:
        """Return what happened to the environments that were replaced since the last call, one entry each."""
        failures, self._failures = self._failures, []
        return failures

    def info_values(self, step: Step, key: str) -> list[float]:
        """Return every number that a real step, not a reset, reported under `info[key]`.

        In `SAME_STEP` mode the info of a step that ended an episode is in `final_info`, and in its place is that of the
        reset.

        Raises:
            ConfigurationError: What is there is no number.
        """
        present = np.ones(self.num_envs, bool) if step.valid is None else step.valid
        sources = [(step.infos, present)]
        if self.mode is AutoresetMode.SAME_STEP and step.final_observations:
            ended = step.terminated | step.truncated
            sources = [(step.infos, present & ~ended), (step.infos.get("final_info", {}), ended)]
        found: list[float] = []
        for infos, mask in sources:
            if key in infos:
                values = np.asarray(infos[key])
                for value in values[mask & np.asarray(infos.get(f"_{key}", True), bool)]:
                    try:
                        found.append(float(value))
                    except (TypeError, ValueError):
                        raise ConfigurationError(
                            f"info_keys={key!r} is not valid: info[{key!r}] is {value!r}, expected a number"
                        ) from None
        return found

    def check_finite(self) -> None:
        """Do nothing: each step was checked."""

    def label(self, index: int) -> str:
        """Say where an environment is: episode, seed and step."""
        return self._tracker.label(index)

    def _note_failures(self, infos: dict[str, Any], ended: Array) -> list[int]:
        """Note which environments were replaced, and return those whose step had no outcome."""
        for index in np.flatnonzero(infos[f"_{FAILURE}"]).tolist():
            self._failures += infos[FAILURE][index]
            # That of a step that did have one is counted with the ends of episodes.
            self._tracker.start_at(index, int(infos[EPISODE][index]) - int(ended[index]))
        return np.flatnonzero(infos[f"_{LOST}"]).tolist() if LOST in infos else []

    def state_dict(self) -> dict[str, Any] | None:
        """Return where every environment is, as tensors and plain values; None where that cannot be known.

        Environments of one episode each give their seeds and actions, those that come vectorised a state of their own.
        """
        if self._kind_of_state is None:
            return None
        with self._named("recorded"):
            if self._kind_of_state == "episodes":
                environments: Any = recorded(self._base, self._tracker)
            else:
                environments = to_tensors(self._base.state_dict())
        resets_next = torch.zeros(self.num_envs, dtype=torch.bool)
        if self._resets_next is not None:
            resets_next.numpy()[:] = self._resets_next
        return {
            "kind": self._kind_of_state,
            "environments": environments,
            "wrappers": [wrapper.state_dict() for wrapper in self._histories],
            "resets_next": resets_next,
            **self._tracker.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> tuple[Array, Nested] | None:
        """Go to where the environments were.

        Returns:
            Which environments are there, `[B]`, and the observations, `[B, ...]`; the others have begun new episodes.
            None if the state is that of another backend; then nothing has been changed.
        """
        if state["kind"] != self._kind_of_state:
            return None
        if state["kind"] == "episodes":
            state = for_seeds(state, self._tracker.streams)
        elif len(state["episodes"]) != self.num_envs:
            return None
        self._tracker.load_state_dict(state)
        resets_next = state["resets_next"].numpy().copy()
        self._resets_next = resets_next if resets_next.any() else None
        with self._named("restore"):
            if self._kind_of_state == "episodes":
                exact, observations = restore(self._base, self._tracker, state["environments"])
            else:
                exact = np.ones(self.num_envs, bool)
                observations = self._base.load_state_dict(to_arrays(state["environments"]))
            for wrapper, kept in zip(self._histories, state["wrappers"], strict=True):
                observations = wrapper.load_state_dict(kept, exact, observations)
        return exact, observations

    def close(self) -> None:
        """Close the environments and end worker processes; may be called twice.

        Raises:
            EnvironmentFailure: An environment raised.
        """
        with self._named("close"):
            try:
                self.env.close()
            finally:
                self.env.closed = True  # or Gymnasium would try again when it is collected

    def _reset(self, **kwargs: Any) -> Nested:  # noqa: ANN401 - those of `VectorEnv.reset`
        with self._named("reset"):
            observations, infos = self.env.reset(**kwargs)
        if FAILURE in infos:
            self._note_failures(infos, np.zeros(self.num_envs, bool))
        return observations

    @contextlib.contextmanager
    def _named(self, where: str) -> Iterator[None]:
        """Make an error that says which environment failed of whatever is raised."""
        try:
            yield
        except BaseException as error:
            self._raise_named(error, where)

    def _raise_named(self, error: BaseException, where: str) -> NoReturn:
        if isinstance(error, EnvironmentFailure | ConfigurationError) or not is_failure(error):
            raise error
        if not isinstance(error, WorkerFailure):
            what = f"{summary(error)} ({self._tracker.together()})"
            raise EnvironmentFailure(f"the {self._role}environments raised in {where}: {what}") from error
        failure = EnvironmentFailure(f"{self._tracker.labels(error.indices)} {error.what}")
        for note in getattr(error, "__notes__", ()):  # the traceback in a worker process
            failure.add_note(note)
        raise failure from error

    def _row(self, batch: Nested, index: int) -> Nested:
        """Return a copy of the observation of one environment; `batch` may be an array of one object for each.

        A copy, since environments may write over what they gave, before the rollout is over that needs it.
        """
        if isinstance(batch, np.ndarray):
            if batch.dtype != object and batch.ndim > 1:  # a flat space, as in most environments
                return batch[index].copy()
            return map_leaves(lambda _, x: np.array(x), self._names, batch[index])
        return map_leaves(lambda _, x: np.array(x[index]), self._names, batch)

    def _check_observations(self, observations: Nested, first: int = 0) -> None:
        def check_leaf(is_float: bool, name: str, rows: Array) -> None:
            if is_float and not surely_finite(rows):
                self._check_rows(name, rows, first)

        if isinstance(self._is_float, bool):  # a flat space, at no more cost than that of the check
            check_leaf(self._is_float, self._names, observations)
        else:
            map_leaves(check_leaf, self._is_float, self._names, observations)

    def _check_rows(self, what: str, rows: Array, first: int = 0) -> None:
        """Raise if a row, that of environment `first` and those after it, has an entry that cannot be learned from."""
        if (bad := first_not_finite(rows)) is not None:
            raise EnvironmentFailure(f"{self.label(first + bad[0])} {complaint(what, np.asarray(rows[bad[0]]))}")

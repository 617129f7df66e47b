"""Makes vectorized environments from their description."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper
from gymnasium.vector.utils import batch_space

from lightning_rl.environments.adapters import with_state
from lightning_rl.environments.atari import AtariPreprocessing, NativeLives, VectorGameScore, sign
from lightning_rl.environments.batch import EnvironmentBatch
from lightning_rl.environments.contract import EnvironmentFailure, WorkerFailure, is_failure, place, summary
from lightning_rl.environments.description import Described, DescribedVector, describe
from lightning_rl.environments.episodes import RestartingEpisodes, SeededEpisodes
from lightning_rl.environments.registry import (
    check_envpool,
    find_spec,
    import_modules,
    is_atari,
    missing_package,
    unknown_id,
    working_versions,
)
from lightning_rl.environments.rendering import Camera, check_renders, prepare_rendering, steps_per_second
from lightning_rl.environments.seeding import role_prefix
from lightning_rl.environments.spec import WRAPPERS, EnvironmentSpec
from lightning_rl.environments.tensor_batch import AsArrays, TensorEnvironments
from lightning_rl.environments.workers import Factory, LocalVectorEnv, ProcessVectorEnv, RestartingProcesses
from lightning_rl.environments.wrappers.action_repeat import (
    ActionRepeat,
    LearnedActionRepeat,
    RepeatCounter,
    learned_repeat,
)
from lightning_rl.environments.wrappers.rewards import RewardTransform
from lightning_rl.validation import ClassSpec, ConfigurationError, check, import_class, instantiate


def make_native(
    spec: EnvironmentSpec, gym_spec: EnvSpec, atari: AtariPreprocessing | None, num_envs: int, seeds: list[int]
) -> tuple[VectorEnv[Any, Any, Any], np.ndarray[Any, Any] | int]:
    """Return the environment's own vectorised version, and what to seed it with."""
    if gym_spec.vector_entry_point is None:
        raise ConfigurationError(
            f"backend={spec.backend!r} is not valid: {spec.env_id} registers no vector_entry_point; expected sync, "
            "async or envpool"
        )
    limit = spec.env.max_episode_steps
    kwargs = limited(limit)
    if atari is not None:
        atari = atari.for_evaluation() if spec.evaluation else atari
        # SAME_STEP wastes no step on resets; the other native environments choose for themselves.
        kwargs = atari.native_kwargs(limit) | {"autoreset_mode": AutoresetMode.SAME_STEP}
    kwargs |= spec.env.kwargs
    if atari is not None:
        clips_rewards, kwargs["reward_clipping"] = kwargs["reward_clipping"], False  # scores need the raw ones
    with explained(spec, gym_spec):
        env = gymnasium.make_vec(gym_spec, num_envs, vectorization_mode="vector_entry_point", **kwargs)
    env = with_state(env)
    if atari is not None:
        env = VectorGameScore(env, clips_rewards)
        env = NativeLives(env) if atari.episodic_life else env
    return env, seeds[0] if atari is None else np.asarray(seeds)


def make_envpool(
    spec: EnvironmentSpec, num_envs: int, seeds: list[int]
) -> tuple[VectorEnv[Any, Any, Any], AtariPreprocessing | None]:
    """Return EnvPool's environments, and the preprocessing of an Atari game.

    Raises:
        ConfigurationError: The task is unknown or needs something that is not installed, or an option does not fit.
    """
    import envpool

    task = spec.env_id.removeprefix("ALE/")
    known = envpool.list_all_envs()
    if task not in known:
        raise unknown_id(spec.env_id, known)
    with explained(spec):
        options = envpool.make_spec(task).config._fields
    atari = spec.atari_options("reward_clip" in options)
    limit = spec.env.max_episode_steps
    expected = "None for Procgen games, whose own limit EnvPool leaves as it is"
    check(limit is None or "num_levels" not in options, "env.max_episode_steps", limit, expected)
    kwargs: dict[str, Any] = {"num_envs": num_envs, "env_seed": seeds} | limited(limit)
    if atari is not None:
        kwargs |= (atari.for_evaluation() if spec.evaluation else atari).envpool_kwargs()
        if task != spec.env_id:  # an ALE id: keep its stickiness, which EnvPool does not
            kwargs.setdefault("repeat_action_probability", 0.25)
    with explained(spec), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*Box (low|high)'s precision")  # EnvPool's own declarations
        env: Any = envpool.make(task, env_type="gymnasium", **(kwargs | spec.env.kwargs))
        env = _BatchedSpaces(env)
    return env if atari is None else VectorGameScore(env, clips_rewards=False), atari


# No type arguments: VectorWrapper takes none before Gymnasium 1.4.
class _BatchedSpaces(VectorWrapper):
    """Gives the spaces of the batch, as vector wrappers expect, where EnvPool gives those of one environment."""

    def __init__(self, env: Any) -> None:  # noqa: ANN401
        super().__init__(env)
        self.observation_space = batch_space(env.single_observation_space, env.num_envs)
        self.action_space = batch_space(env.single_action_space, env.num_envs)


def limited(max_episode_steps: int | None) -> dict[str, Any]:
    """Return a time limit as an argument of `gymnasium.make` and its like."""
    return {} if max_episode_steps is None else {"max_episode_steps": max_episode_steps}


@contextlib.contextmanager
def explained(spec: EnvironmentSpec, gym_spec: EnvSpec | None = None) -> Iterator[None]:
    """Turn whatever the making of an environment raises into an error that says what to change."""
    try:
        yield
    except ConfigurationError:
        raise
    except (gymnasium.error.DependencyNotInstalled, ImportError) as error:
        if gym_spec is None:
            raise ConfigurationError(
                f"env_id={spec.env_id!r} needs something that is not installed: {error}"
            ) from error
        raise missing_package(gym_spec, error) from error
    except BaseException as error:
        if not is_failure(error):
            raise
        raise ConfigurationError(
            f"env_id={spec.env_id!r} cannot be made with env.kwargs={spec.env.kwargs!r}: "
            f"{summary(error)}{place(error)}{working_versions(error)}"
        ) from error


# Far longer than any step should take; long enough for an environment that loads a world in its first reset.
DEFAULT_STEP_TIMEOUT = 120.0
Spaces = tuple[spaces.Space[Any], spaces.Space[Any]]
"""Observation and action space of one environment."""


def make_environments(
    spec: EnvironmentSpec,
    num_envs: int,
    seeds: list[int],
    autoreset_mode: AutoresetMode = AutoresetMode.SAME_STEP,
    space_pair: Spaces | None = None,
) -> EnvironmentBatch | TensorEnvironments:
    """Make `num_envs` environments.

    Those of the backend `torch` speak tensors; for evaluation they are made to speak arrays.

    Args:
        spec: What to make.
        num_envs: How many.
        seeds: A seed for each: of its stream of episodes, whatever the others are. Environments that come vectorised
            with one random generator for all (`native` other than Atari, `torch`) are seeded by the first.
        autoreset_mode: For the backends `sync` and `async`; failures restart environments in `SAME_STEP` mode only.
        space_pair: What `spaces_of` returned, if it is known: `async` reads the spaces again without it.

    Raises:
        ConfigurationError: The id is unknown, a package is missing, or an option does not fit the backend.
        EnvironmentFailure: A worker process did not get so far as to make its environment, or it failed where its
            spaces are read.
    """
    import_modules(spec.env.imports)
    if spec.backend == "envpool":
        check_envpool()
        return _vectorised(spec, *make_envpool(spec, num_envs, seeds), seeds, None)
    gym_spec = find_spec(spec.env_id)
    atari = spec.atari_options(is_atari(gym_spec, spec.env.kwargs.get("obs_type")))
    if spec.backend in ("native", "torch"):
        env, reset_seed = make_native(spec, gym_spec, atari, num_envs, seeds)
        return _vectorised(spec, env, atari, seeds, reset_seed)
    assert spec.env.on_failure == "raise" or autoreset_mode is AutoresetMode.SAME_STEP
    _check_single(spec, gym_spec)
    if spec.filmed:
        prepare_rendering()
    env_wrappers, vector_wrappers = _split_wrappers(spec)
    factories = [functools.partial(make_single, spec, gym_spec, env_wrappers, index) for index in range(num_envs)]
    if spec.backend == "sync":
        env = LocalVectorEnv(factories, copy=False, autoreset_mode=autoreset_mode)
    else:
        kind = RestartingProcesses if spec.env.on_failure == "restart" else ProcessVectorEnv
        # Vector wrappers may have other spaces than what they wrap.
        is_wrapped = bool(vector_wrappers) or spec.changes_observations
        described = _describe(spec, factories[0]) if space_pair is None or is_wrapped else Described(*space_pair)
        try:
            env = kind(factories, autoreset_mode, spec.env.step_timeout or DEFAULT_STEP_TIMEOUT, described)
        except WorkerFailure as error:
            raise EnvironmentFailure(f"{role_prefix(spec.evaluation)}{error}, before its first step") from error
    env = _wrap_vector(spec.wrap_vector(env, _clips(atari)), vector_wrappers)
    return EnvironmentBatch(env, seeds, seeds, _repeat_counter(spec, atari), spec.evaluation)


def _check_single(spec: EnvironmentSpec, gym_spec: EnvSpec) -> None:
    expected = f"native or torch: {spec.env_id} registers vectorized environments only"
    check(gym_spec.entry_point is not None, "backend", spec.backend, expected)


def _vectorised(
    spec: EnvironmentSpec,
    env: VectorEnv[Any, Any, Any],
    atari: AtariPreprocessing | None,
    seeds: list[int],
    reset_seed: np.ndarray[Any, Any] | int | None,
) -> EnvironmentBatch | TensorEnvironments:
    """Apply wrappers to environments that come vectorised."""
    _, vector_wrappers = _split_wrappers(spec)
    env = _wrap_vector(env, vector_wrappers)
    if spec.backend == "torch":
        if not spec.evaluation:
            return TensorEnvironments(spec.wrap_tensors(env), seeds[0])
        env = AsArrays(env)
    env = spec.wrap_vector(spec.wrap_rewards(env), _clips(atari))
    return EnvironmentBatch(env, seeds, reset_seed, _repeat_counter(spec, atari), spec.evaluation)


def spaces_of(spec: EnvironmentSpec) -> Spaces:
    """Return the observation and the action space of one environment.

    Those of `async` are read in a process that is gone afterwards, with `env.step_timeout` for a reset and for `close`.

    Raises:
        ConfigurationError: As `make_environments`.
        EnvironmentFailure: The environment failed, in `close` for one.
    """
    if spec.backend == "async":
        import_modules(spec.env.imports)
        env_wrappers, vector_wrappers = _split_wrappers(spec)
        if not vector_wrappers:
            gym_spec = find_spec(spec.env_id)
            _check_single(spec, gym_spec)
            described = _describe(spec, functools.partial(make_single, spec, gym_spec, env_wrappers))
            env = spec.wrap_vector(DescribedVector(described))
            return env.single_observation_space, env.single_action_space
    environment = make_environments(spec, 1, [0])
    try:
        environment.close()
    except EnvironmentFailure as error:
        cause = error.__cause__ or error
        raise EnvironmentFailure(f"{_reader(spec)} raised in close: {summary(cause)}") from cause
    return environment.single_observation_space, environment.single_action_space


def _describe(spec: EnvironmentSpec, make: Factory) -> Described:
    """Read the spaces of an environment of worker processes in a process, with their time limit."""
    return describe(make, _reader(spec), spec.env.step_timeout or DEFAULT_STEP_TIMEOUT)


def _reader(spec: EnvironmentSpec) -> str:
    return f"the {role_prefix(spec.evaluation)}environment that reads the spaces of {spec.env_id}"


def make_single(
    spec: EnvironmentSpec, gym_spec: EnvSpec, env_wrappers: tuple[ClassSpec, ...], index: int = 0
) -> SeededEpisodes:
    """Make one environment with its wrappers.

    Args:
        spec: What to make.
        gym_spec: Of the same environment; a new process may not know of every id that this one does.
        env_wrappers: Those of `spec` that wrap single environments.
        index: Place among the environments of this process.

    Raises:
        ConfigurationError: A package is missing, or the environment or a wrapper refuses its arguments.
    """
    import_modules(spec.env.imports)  # a new process knows of none
    atari = spec.atari_options(is_atari(gym_spec, spec.env.kwargs.get("obs_type")))
    if atari is not None:
        for name, instead in (("frameskip", "frame_skip"), ("repeat_action_probability",) * 2):
            check(
                name not in spec.env.kwargs,
                f"env.kwargs.{name}",
                spec.env.kwargs.get(name),
                f"env.atari.{instead} instead",
            )
    make = functools.partial(_make_wrapped, spec, gym_spec, env_wrappers, atari)
    if spec.env.on_failure == "restart":
        return RestartingEpisodes(make, index, spec.evaluation)
    return SeededEpisodes(make(), index, spec.evaluation)


def _make_wrapped(
    spec: EnvironmentSpec, gym_spec: EnvSpec, env_wrappers: tuple[ClassSpec, ...], atari: AtariPreprocessing | None
) -> gymnasium.Env[Any, Any]:
    limit = spec.env.max_episode_steps
    kwargs = {"disable_env_checker": True} | (atari.make_kwargs(limit) if atari else limited(limit)) | spec.env.kwargs
    with explained(spec, gym_spec):
        env: gymnasium.Env[Any, Any] = gymnasium.make(gym_spec, **kwargs)
        if atari:
            env = atari.wrap(env, gym_spec.kwargs.get("repeat_action_probability", 0.0), spec.evaluation)
    if spec.env.action_repeat > 1:
        env = ActionRepeat(env, spec.env.action_repeat)
    for wrapper in env_wrappers:
        env = _wrapped(env, wrapper)
    if (repeat := learned_repeat(spec.env.learned_action_repeat)) is not None:
        max_repeats, gamma = repeat
        env = LearnedActionRepeat(
            env, max_repeats, gamma, _frames_per_step(spec, atari), spec.evaluation, _clips(atari)
        )
    env = spec.wrap(env)
    if spec.filmed:
        return Camera(env, steps_per_second(env, atari is not None, _frames_per_step(spec, atari)))
    return env


def check_filmable(spec: EnvironmentSpec) -> None:
    """Take one picture of an environment.

    Args:
        spec: What `EnvironmentSpec.for_filming` returned.

    Raises:
        ConfigurationError: The environment has no pictures, they cannot be made here, or its spaces are others than
            those of the environments that come vectorised.
    """
    import_modules(spec.env.imports)
    gym_spec = find_spec(spec.env_id)
    check(gym_spec.entry_point is not None, "env_id", spec.env_id, "one with single environments, which can be filmed")
    prepare_rendering()
    env = make_single(spec, gym_spec, _split_wrappers(spec)[0])
    try:
        check_renders(gym_spec, env)
    finally:
        env.close()


def _clips(atari: AtariPreprocessing | None) -> RewardTransform | None:
    """Return what the preprocessing does to rewards in training alone."""
    return sign if atari is not None and atari.clip_rewards else None


def _frames_per_step(spec: EnvironmentSpec, atari: AtariPreprocessing | None) -> int:
    return spec.env.action_repeat if atari is None else atari.frame_skip


def _repeat_counter(spec: EnvironmentSpec, atari: AtariPreprocessing | None) -> RepeatCounter | None:
    counter = RepeatCounter(_frames_per_step(spec, atari), spec.env.learned_action_repeat is not None)
    return counter if counter.learned or counter.frames_per_step > 1 else None


def _split_wrappers(spec: EnvironmentSpec) -> tuple[tuple[ClassSpec, ...], tuple[ClassSpec, ...]]:
    """Separate wrappers of single environments from those of vector environments."""
    single: list[ClassSpec] = []
    vector: list[ClassSpec] = []
    for wrapper in spec.wrappers:
        is_vector = issubclass(import_class("env.wrappers", wrapper["class_path"], WRAPPERS), VectorWrapper)
        (vector if is_vector else single).append(wrapper)
    if single and spec.backend in ("native", "torch", "envpool"):
        raise ConfigurationError(
            f"env.wrappers={[w['class_path'] for w in single]} wrap single environments: expected "
            f"gymnasium.vector.VectorWrapper classes with backend={spec.backend!r}"
        )
    return tuple(single), tuple(vector)


def _wrap_vector(env: VectorEnv[Any, Any, Any], wrappers: tuple[ClassSpec, ...]) -> VectorEnv[Any, Any, Any]:
    for wrapper in wrappers:
        env = _wrapped(env, wrapper)
    return env


def _wrapped(env: Any, wrapper: ClassSpec) -> Any:  # noqa: ANN401 - of either kind
    """Put a wrapper around an environment; one that ends the program is an error."""
    try:
        return instantiate("env.wrappers", wrapper, WRAPPERS, env)
    except (SystemExit, KeyboardInterrupt) as error:
        if not is_failure(error):
            raise
        raise ConfigurationError(
            f"env.wrappers: {wrapper['class_path']} raised {summary(error)} with "
            f"init_args={wrapper['init_args']!r}; expected a wrapper that can be made"
        ) from error

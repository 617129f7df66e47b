"""From an environment id to vector environments, by backend."""

from __future__ import annotations

import functools
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv, VectorWrapper

from lightning_rl.environments.atari import AtariPreprocessing, sign
from lightning_rl.environments.batch import EnvironmentBatch
from lightning_rl.environments.camera import Camera, check_renders, prepare_rendering, steps_per_second
from lightning_rl.environments.description import Described, describe
from lightning_rl.environments.errors import EnvironmentFailure, is_failure, summary
from lightning_rl.environments.registry import (
    check_envpool,
    find_spec,
    import_modules,
    is_atari,
)
from lightning_rl.environments.repeat import ActionRepeat, LearnedActionRepeat, learned_repeat
from lightning_rl.environments.restarting import RestartingEpisodes
from lightning_rl.environments.restarting_workers import RestartingProcesses
from lightning_rl.environments.rewards import RewardTransform
from lightning_rl.environments.seeding import SeededEpisodes, role_prefix
from lightning_rl.environments.spec import WRAPPERS, EnvironmentSpec
from lightning_rl.environments.tensors import AsArrays, TensorEnvironments
from lightning_rl.environments.vectorised import explained, limited, make_envpool, make_native
from lightning_rl.environments.workers import Factory, ProcessVectorEnv, WorkerFailure
from lightning_rl.validation import ClassSpec, ConfigurationError, check, import_class, instantiate

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
    import_modules(spec.imports)
    if spec.backend == "envpool":
        check_envpool()
        return _vectorised(spec, *make_envpool(spec, num_envs, seeds), seeds, None)
    gym_spec = find_spec(spec.env_id)
    atari = spec.atari_options(is_atari(gym_spec, spec.env_kwargs.get("obs_type")))
    if spec.backend in ("native", "torch"):
        env, reset_seed = make_native(spec, gym_spec, atari, num_envs, seeds)
        return _vectorised(spec, env, atari, seeds, reset_seed)
    assert spec.on_env_failure == "raise" or autoreset_mode is AutoresetMode.SAME_STEP
    if spec.filmed:
        prepare_rendering()
    env_wrappers, vector_wrappers = _split_wrappers(spec)
    factories = [functools.partial(make_single, spec, gym_spec, env_wrappers, index) for index in range(num_envs)]
    if spec.backend == "sync":
        env = SyncVectorEnv(factories, copy=False, autoreset_mode=autoreset_mode)
    else:
        kind = RestartingProcesses if spec.on_env_failure == "restart" else ProcessVectorEnv
        # Vector wrappers may have other spaces than what they wrap.
        known = space_pair is not None and not vector_wrappers
        described = Described(*space_pair) if space_pair is not None and known else _describe(spec, factories[0])
        try:
            env = kind(factories, autoreset_mode, spec.step_timeout or DEFAULT_STEP_TIMEOUT, described)
        except WorkerFailure as error:
            raise EnvironmentFailure(f"{role_prefix(spec.evaluation)}{error}, before its first step") from error
    repeats = spec.options.learned_action_repeat is not None
    env = _wrap_vector(env, vector_wrappers)
    return EnvironmentBatch(env, seeds, seeds, _frames_per_step(spec, atari), repeats, spec.evaluation)


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
            return TensorEnvironments(spec.options.wrap_tensors(env), seeds[0])
        env = AsArrays(env)
    env = spec.options.wrap_vector(env, spec.evaluation, _clips(atari))
    return EnvironmentBatch(env, seeds, reset_seed, _frames_per_step(spec, atari), evaluation=spec.evaluation)


def spaces_of(spec: EnvironmentSpec) -> Spaces:
    """Return the observation and the action space of one environment.

    Those of `async` are read in a process that is gone afterwards, with `step_timeout` for a reset and for `close`.

    Raises:
        ConfigurationError: As `make_environments`.
        EnvironmentFailure: The environment failed, in `close` for one.
    """
    if spec.backend == "async":
        import_modules(spec.imports)
        env_wrappers, vector_wrappers = _split_wrappers(spec)
        if not vector_wrappers:
            described = _describe(spec, functools.partial(make_single, spec, find_spec(spec.env_id), env_wrappers))
            return described.observation_space, described.action_space
    environment = make_environments(spec, 1, [0])
    try:
        environment.close()
    except EnvironmentFailure as error:
        cause = error.__cause__ or error
        raise EnvironmentFailure(f"{_reader(spec)} raised in close: {summary(cause)}") from cause
    return environment.single_observation_space, environment.single_action_space


def _describe(spec: EnvironmentSpec, make: Factory) -> Described:
    """Read the spaces of an environment of worker processes in a process, with their time limit."""
    return describe(make, _reader(spec), spec.step_timeout or DEFAULT_STEP_TIMEOUT)


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
    import_modules(spec.imports)  # a new process knows of none
    atari = spec.atari_options(is_atari(gym_spec, spec.env_kwargs.get("obs_type")))
    if atari is not None:
        for name, instead in (("frameskip", "frame_skip"), ("repeat_action_probability",) * 2):
            check(
                name not in spec.env_kwargs, f"env_kwargs.{name}", spec.env_kwargs.get(name), f"atari.{instead} instead"
            )
    # A stream of episodes does not begin in the middle of a game.
    first_options = {"new_game": True} if atari and atari.episodic_life else None
    make = functools.partial(_make_wrapped, spec, gym_spec, env_wrappers, atari)
    if spec.on_env_failure == "restart":
        return RestartingEpisodes(make, index, first_options, spec.evaluation)
    return SeededEpisodes(make(), index, first_options, spec.evaluation)


def _make_wrapped(
    spec: EnvironmentSpec, gym_spec: EnvSpec, env_wrappers: tuple[ClassSpec, ...], atari: AtariPreprocessing | None
) -> gymnasium.Env[Any, Any]:
    limit = spec.options.max_episode_steps
    kwargs = {"disable_env_checker": True} | (atari.make_kwargs(limit) if atari else limited(limit)) | spec.env_kwargs
    with explained(spec, gym_spec):
        env: gymnasium.Env[Any, Any] = gymnasium.make(gym_spec, **kwargs)
        if atari:
            env = atari.wrap(env, gym_spec.kwargs.get("repeat_action_probability", 0.0), spec.evaluation)
    if spec.options.action_repeat > 1:
        env = ActionRepeat(env, spec.options.action_repeat)
    for wrapper in env_wrappers:
        env = _wrapped(env, wrapper)
    if (repeat := learned_repeat(spec.options.learned_action_repeat)) is not None:
        max_repeats, gamma = repeat
        env = LearnedActionRepeat(
            env, max_repeats, gamma, _frames_per_step(spec, atari), spec.evaluation, _clips(atari)
        )
    env = spec.options.wrap(env, spec.evaluation, _clips(atari))
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
    import_modules(spec.imports)
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
    return spec.options.action_repeat if atari is None else atari.frame_skip


def _split_wrappers(spec: EnvironmentSpec) -> tuple[tuple[ClassSpec, ...], tuple[ClassSpec, ...]]:
    """Separate wrappers of single environments from those of vector environments."""
    single: list[ClassSpec] = []
    vector: list[ClassSpec] = []
    for wrapper in spec.wrappers:
        is_vector = issubclass(import_class("wrappers", wrapper["class_path"], WRAPPERS), VectorWrapper)
        (vector if is_vector else single).append(wrapper)
    if single and spec.backend in ("native", "torch", "envpool"):
        raise ConfigurationError(
            f"wrappers={[w['class_path'] for w in single]} wrap single environments: expected "
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
        return instantiate("wrappers", wrapper, WRAPPERS, env)
    except (SystemExit, KeyboardInterrupt) as error:
        if not is_failure(error):
            raise
        raise ConfigurationError(
            f"wrappers: {wrapper['class_path']} raised {summary(error)} with "
            f"init_args={wrapper['init_args']!r}; expected a wrapper that can be made"
        ) from error

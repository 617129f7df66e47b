"""Makes vectorized environments from an `EnvironmentSpec`, and reads their spaces."""

from __future__ import annotations

import contextlib
import functools
import traceback
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import VectorEnv, VectorWrapper
from gymnasium.vector.utils import batch_space

from lightning_rl.environments.atari import AtariPreprocessing, VectorGameScore
from lightning_rl.environments.batch import EnvironmentBatch, LocalVectorEnv, NativeCartPole
from lightning_rl.environments.contract import (
    EnvironmentFailure,
    WorkerFailure,
    closed_on_failure,
    is_failure,
    role_prefix,
    summary,
)
from lightning_rl.environments.episodes import RestartingEpisodes, SeededEpisodes
from lightning_rl.environments.registry import (
    find_spec,
    import_modules,
    is_atari,
    missing_package,
    unknown_id,
    working_versions,
)
from lightning_rl.environments.rendering import Camera, prepare_rendering, steps_per_second
from lightning_rl.environments.spec import WRAPPERS, EnvironmentSpec
from lightning_rl.environments.tensor_batch import TensorEnvironments
from lightning_rl.environments.workers import WorkerPool, start_context
from lightning_rl.environments.wrappers.action_mask import ReadMasks
from lightning_rl.environments.wrappers.action_repeat import (
    ActionRepeat,
    LearnedActionRepeat,
    learned_repeat,
    read_repeats,
)
from lightning_rl.environments.wrappers.transforms import RewardTransform
from lightning_rl.validation import ClassSpec, ConfigurationError, check, check_installed, import_class, instantiate

# Much longer than a step; enough for an environment that loads a world in its first reset.
DEFAULT_STEP_TIMEOUT = 120.0


class Spaces(NamedTuple):
    """Spaces of one environment, and the number of agents in one copy of it, one row for each."""

    observation: spaces.Space[Any]
    action: spaces.Space[Any]
    num_agents: int = 1


Seed = list[int] | np.ndarray[Any, Any] | int | None
"""Seed of the first reset of all environments, see `EnvironmentBatch`."""


def make_environments(spec: EnvironmentSpec, num_envs: int, seeds: list[int]) -> EnvironmentBatch:
    """Make `num_envs` environments; with the backend `torch` they are `TensorEnvironments`.

    Args:
        spec: The environment and its options.
        num_envs: Number of environments.
        seeds: Seed of each environment's stream of episodes. Native environments with a single random generator (all
            but Atari) use the first one.

    Raises:
        ConfigurationError: The id is unknown, a package is missing, or an option does not fit the backend.
        EnvironmentFailure: A worker process failed.
    """
    environments = _make(spec, num_envs, seeds)
    rows = environments.num_envs
    fits = rows == num_envs or (num_envs == 1 and rows == environments.num_agents)
    expected = f"{rows}, since the vector_entry_point of {spec.env_id} made {rows} environments"
    if spec.evaluation:
        expected += f"; evaluation.episodes must be at least {rows} for each rank"
    with closed_on_failure(environments):
        check(fits, "evaluation.num_envs" if spec.evaluation else "num_envs", num_envs, expected)
    return environments


def _make(spec: EnvironmentSpec, num_envs: int, seeds: list[int]) -> EnvironmentBatch:
    import_modules(spec.env.imports)
    _, wrappers = _split_wrappers(spec)
    make = {"sync": make_pool, "async": make_pool, "envpool": make_envpool}.get(spec.backend, make_native)
    made, atari, reset_seed = make(spec, num_envs, seeds)
    with closed_on_failure(made):
        env, is_wrapped = _wrapped(made, wrappers), bool(wrappers)
        transform = None if spec.evaluation else spec.reward_transform
        if spec.backend == "torch":
            spec.check_tensors()
            return TensorEnvironments(env, seeds[0], transform, spec.evaluation, is_wrapped)
        histories, read_repeats = spec.histories(env, _clips(atari)), _repeat_reader(spec, atari)
        return EnvironmentBatch(env, seeds, reset_seed, histories, read_repeats, transform, spec.evaluation, is_wrapped)


def make_pool(
    spec: EnvironmentSpec, num_envs: int, seeds: list[int]
) -> tuple[VectorEnv[Any, Any, Any], AtariPreprocessing | None, Seed]:
    """Return a vector environment of single environments, the options of an Atari game, and the seeds."""
    gym_spec = find_spec(spec.env_id)
    expected = "one that registers single environments: vectorized environments cannot be filmed"
    check(gym_spec.entry_point is not None or not spec.filmed, "env_id", spec.env_id, expected)
    expected = f"native (--data.backend native), or torch: {spec.env_id} registers only vectorized environments"
    check(gym_spec.entry_point is not None, "backend", spec.backend, expected)
    atari = spec.atari_options(is_atari(gym_spec, spec.env.kwargs.get("obs_type")))
    if spec.filmed:
        prepare_rendering()
    factories = [functools.partial(make_single, spec, gym_spec, index) for index in range(num_envs)]
    if spec.backend == "sync":
        return LocalVectorEnv(factories), atari, seeds
    timeout = spec.env.step_timeout or DEFAULT_STEP_TIMEOUT
    try:
        return WorkerPool(factories, timeout, spec.env.on_failure == "restart"), atari, seeds
    except WorkerFailure as error:
        forked = start_context().get_start_method() == "fork"
        hint = "; if only forked processes fail, call multiprocessing.set_start_method('spawn')" if forked else ""
        raise EnvironmentFailure(f"{role_prefix(spec.evaluation)}{error}, before its first step{hint}") from error


def make_native(
    spec: EnvironmentSpec, num_envs: int, seeds: list[int]
) -> tuple[VectorEnv[Any, Any, Any], AtariPreprocessing | None, Seed]:
    """Return the environment's own vectorized version, the options of an Atari game, and the seed."""
    gym_spec = find_spec(spec.env_id)
    atari = spec.atari_options(is_atari(gym_spec, spec.env.kwargs.get("obs_type")))
    expected = f"sync, async or envpool: {spec.env_id} registers no vector_entry_point"
    check(gym_spec.vector_entry_point is not None, "backend", spec.backend, expected)
    limit = spec.env.max_episode_steps
    if atari is None:
        kwargs = limited(limit) | spec.env.kwargs
    else:
        kwargs = (atari.for_evaluation() if spec.evaluation else atari).native_kwargs(limit) | spec.env.kwargs
        clips_rewards, kwargs["reward_clipping"] = kwargs["reward_clipping"], False  # scores need raw rewards
    with explained(spec, gym_spec):
        env = gymnasium.make_vec(gym_spec, num_envs, vectorization_mode="vector_entry_point", **kwargs)
    if atari is not None:
        return VectorGameScore(env, clips_rewards), atari, np.asarray(seeds)
    return NativeCartPole(env) if isinstance(env, CartPoleVectorEnv) else env, None, seeds[0]


def make_envpool(
    spec: EnvironmentSpec, num_envs: int, seeds: list[int]
) -> tuple[VectorEnv[Any, Any, Any], AtariPreprocessing | None, Seed]:
    """Return the environments of EnvPool, which gets its seeds here, and the options of an Atari game."""
    check_installed("backend='envpool'", "envpool", "envpool")
    with explained(spec):  # it needs libraries of the system, such as libEGL
        import envpool
    task = spec.env_id.removeprefix("ALE/")
    known = envpool.list_all_envs()
    if task not in known:
        raise unknown_id(spec.env_id, known)
    with explained(spec):
        config = envpool.make_spec(task).config
    atari = spec.atari_options("reward_clip" in config._fields)
    limit = spec.env.kwargs.get("max_episode_steps", spec.env.max_episode_steps)
    is_procgen = "num_levels" in config._fields
    # EnvPool 1.2.5 ignores the limit of these games, and of the tasks that have none, such as Catch-v0.
    ignores = is_procgen or config.max_episode_steps == np.iinfo(np.int32).max
    expected = f"None for {'Procgen games' if is_procgen else task}, whose limit EnvPool cannot change"
    check(limit is None or not ignores, "env.max_episode_steps", limit, expected)
    kwargs: dict[str, Any] = {"num_envs": num_envs, "env_seed": seeds} | limited(limit)
    if atari is not None:
        kwargs |= (atari.for_evaluation() if spec.evaluation else atari).envpool_kwargs()
        if task != spec.env_id:  # an ALE id, whose default differs from EnvPool's
            kwargs.setdefault("repeat_action_probability", 0.25)
    with explained(spec), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*Box (low|high)'s precision")  # from EnvPool's own spaces
        made: Any = envpool.make(task, env_type="gymnasium", **(kwargs | spec.env.kwargs))
        env = VectorWrapper(made)
        # Vector wrappers need the spaces of the batch; EnvPool gives the spaces of one environment.
        env.observation_space = batch_space(env.single_observation_space, env.num_envs)
        env.action_space = batch_space(env.single_action_space, env.num_envs)
    return env if atari is None else VectorGameScore(env, clips_rewards=False), atari, None


def limited(max_episode_steps: int | None) -> dict[str, Any]:
    """Return a time limit as an argument of `gymnasium.make` and similar functions."""
    return {} if max_episode_steps is None else {"max_episode_steps": max_episode_steps}


@contextlib.contextmanager
def explained(spec: EnvironmentSpec, gym_spec: EnvSpec | None = None) -> Iterator[None]:
    """Turn an exception in the making of an environment into a `ConfigurationError` that says what to change."""
    try:
        yield
    except ConfigurationError:
        raise
    except (gymnasium.error.DependencyNotInstalled, ImportError) as error:
        raise missing_package(spec.env_id, gym_spec, error) from error
    except (Exception, SystemExit) as error:
        if not is_failure(error):  # but the end of the program
            raise
        raise ConfigurationError(
            f"env_id={spec.env_id!r} cannot be made {'for a video ' * spec.filmed}with env.kwargs={spec.env.kwargs!r}: "
            f"{summary(error)}{_place(error)}{working_versions(error)}"
        ) from error


def _place(error: BaseException) -> str:
    """Return the line that raised an exception, with its statement if the exception has no text."""
    if not (frames := traceback.extract_tb(error.__traceback__)):
        return ""
    frame = frames[-1]
    statement = "" if str(error) or not frame.line else f": {frame.line}"
    return f" (at {frame.filename}:{frame.lineno} in {frame.name}{statement})"


def spaces_of(spec: EnvironmentSpec) -> Spaces:
    """Return the spaces of one environment; raises as `make_environments`."""
    environment = _make(spec, 1, [0])  # some environments have a fixed number of rows
    environment.close()
    return Spaces(environment.single_observation_space, environment.single_action_space, environment.num_agents)


def make_single(spec: EnvironmentSpec, gym_spec: EnvSpec, index: int = 0) -> SeededEpisodes:
    """Make one environment with its wrappers, possibly in a new process, where the id may not be registered.

    A missing package or a rejected argument raises a `ConfigurationError`.
    """
    import_modules(spec.env.imports)  # again, since this may be a new process
    make = functools.partial(_make_wrapped, spec, gym_spec)
    if spec.env.on_failure == "restart":
        return RestartingEpisodes(make, index, spec.evaluation)
    return SeededEpisodes(make(), index, spec.evaluation)


def _make_wrapped(spec: EnvironmentSpec, gym_spec: EnvSpec) -> gymnasium.Env[Any, Any]:
    atari = spec.atari_options(is_atari(gym_spec, spec.env.kwargs.get("obs_type")))
    limit = spec.env.max_episode_steps
    kwargs = {"disable_env_checker": True} | (atari.make_kwargs(limit) if atari else limited(limit)) | spec.env.kwargs
    with explained(spec, gym_spec):
        env: gymnasium.Env[Any, Any] = gymnasium.make(gym_spec, **kwargs)
    with closed_on_failure(env):
        if atari:
            with explained(spec, gym_spec):
                env = atari.wrap(env, gym_spec.kwargs.get("repeat_action_probability", 0.0), spec.evaluation)
        counts_all = spec.env.frame_count == "nominal"
        if spec.env.action_repeat > 1:
            env = ActionRepeat(env, spec.env.action_repeat, counts_all)
        env = _wrapped(env, _split_wrappers(spec)[0])
        frames = _frames_per_step(spec, atari)
        if spec.filmed:
            env = Camera(env, steps_per_second(env, atari is not None, frames))
        if (repeat := learned_repeat(spec.env.learned_action_repeat)) is not None:
            clips = _clips(atari)
            env = LearnedActionRepeat(env, repeat.max, repeat.gamma, frames, spec.evaluation, clips, counts_all)
        return env if spec.env.action_mask is None else ReadMasks(env, spec.env.action_mask)


def _clips(atari: AtariPreprocessing | None) -> RewardTransform | None:
    return np.sign if atari is not None and atari.clip_rewards else None


def _frames_per_step(spec: EnvironmentSpec, atari: AtariPreprocessing | None) -> int:
    return spec.env.action_repeat if atari is None else atari.frame_skip


def _repeat_reader(spec: EnvironmentSpec, atari: AtariPreprocessing | None) -> Any:  # a function
    frames, learned = _frames_per_step(spec, atari), learned_repeat(spec.env.learned_action_repeat)
    if learned is None and frames == 1:
        return None
    return functools.partial(read_repeats, frames, learned is not None and learned.discount == "per_repeat")


def _split_wrappers(spec: EnvironmentSpec) -> tuple[list[ClassSpec], list[ClassSpec]]:
    single: list[ClassSpec] = []
    vector: list[ClassSpec] = []
    for wrapper in spec.wrappers:
        is_vector = issubclass(import_class("env.wrappers", wrapper["class_path"], WRAPPERS), VectorWrapper)
        (vector if is_vector else single).append(wrapper)
    names, expected = [wrapper["class_path"] for wrapper in single], "gymnasium.vector.VectorWrapper classes"
    takes_single = spec.backend in ("sync", "async") or not single
    check(takes_single, "env.wrappers", names, f"{expected} with backend={spec.backend!r}")
    return single, vector


def _wrapped(env: Any, wrappers: list[ClassSpec]) -> Any:  # a single or a vector environment
    for wrapper in wrappers:
        try:
            env = instantiate("env.wrappers", wrapper, WRAPPERS, env)
        except SystemExit as error:
            if not is_failure(error):  # but the end of the program
                raise
            what = f"{wrapper['class_path']} refused the arguments {wrapper['init_args']}"
            raise ConfigurationError(f"env.wrappers: {what}: {summary(error)}") from error
    return env

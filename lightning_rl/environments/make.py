"""From an environment id to vector environments, by backend."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv, VectorWrapper

from lightning_rl.environments.atari import AtariPreprocessing
from lightning_rl.environments.batch import EnvironmentBatch
from lightning_rl.environments.errors import EnvironmentFailure
from lightning_rl.environments.lives import NativeLives
from lightning_rl.environments.mujoco_models import quiet_loading
from lightning_rl.environments.registry import check_envpool, find_spec, is_atari, missing_package, unknown_id
from lightning_rl.environments.restarting import RestartingEpisodes
from lightning_rl.environments.restarting_workers import RestartingProcesses
from lightning_rl.environments.seeding import SeededEpisodes
from lightning_rl.environments.spec import EnvironmentSpec
from lightning_rl.environments.tensors import AsArrays, TensorEnvironments, device_of_tensors
from lightning_rl.environments.workers import ProcessVectorEnv, WorkerFailure
from lightning_rl.validation import ClassSpec, ConfigurationError, check, import_class, instantiate

# Far longer than any step should take; long enough for an environment that loads a world in its first reset.
DEFAULT_STEP_TIMEOUT = 120.0


def make_environments(
    spec: EnvironmentSpec,
    num_envs: int,
    seeds: list[int],
    autoreset_mode: AutoresetMode = AutoresetMode.SAME_STEP,
) -> EnvironmentBatch | TensorEnvironments:
    """Make `num_envs` environments.

    Those of the backend `native` may speak tensors; for evaluation they are made to speak arrays.

    Args:
        spec: What to make.
        num_envs: How many.
        seeds: A seed for each: of its stream of episodes, whatever the others are. Environments that come vectorised
            with one random generator for all (`native`, other than Atari) are seeded by the first.
        autoreset_mode: For the backends `sync` and `async`; failures restart environments in `SAME_STEP` mode only.

    Raises:
        ConfigurationError: The id is unknown, a package is missing, or an option does not fit the backend.
        EnvironmentFailure: A worker process did not get so far as to make its environment.
    """
    if spec.backend == "envpool":
        check_envpool()
        _, vector_wrappers = _split_wrappers(spec)
        return EnvironmentBatch(_wrap_vector(_make_envpool(spec, num_envs, seeds), vector_wrappers), seeds, None)
    gym_spec = find_spec(spec.env_id)
    env_wrappers, vector_wrappers = _split_wrappers(spec)
    env: VectorEnv[Any, Any, Any]
    if spec.backend == "native":
        env, reset_seed = _make_native(spec, gym_spec, num_envs, seeds)
        env = _wrap_vector(env, vector_wrappers)
        if (device := device_of_tensors(env)) is None:
            return EnvironmentBatch(env, seeds, reset_seed)
        if spec.evaluation:
            return EnvironmentBatch(AsArrays(env), seeds, seeds[0])
        return TensorEnvironments(env, seeds[0], device)
    assert spec.on_env_failure == "raise" or autoreset_mode is AutoresetMode.SAME_STEP
    factories = [functools.partial(make_single, spec, gym_spec, env_wrappers, index) for index in range(num_envs)]
    if spec.backend == "sync":
        env = SyncVectorEnv(factories, copy=False, autoreset_mode=autoreset_mode)
        return EnvironmentBatch(_wrap_vector(env, vector_wrappers), seeds, seeds)
    try:
        kind = RestartingProcesses if spec.on_env_failure == "restart" else ProcessVectorEnv
        env = kind(factories, autoreset_mode, spec.step_timeout or DEFAULT_STEP_TIMEOUT)
    except WorkerFailure as error:
        raise EnvironmentFailure(f"{error}, before its first step") from error
    return EnvironmentBatch(_wrap_vector(env, vector_wrappers), seeds, seeds)


def spaces_of(spec: EnvironmentSpec) -> tuple[spaces.Space[Any], spaces.Space[Any]]:
    """Return the observation and the action space of one environment.

    Raises:
        ConfigurationError: As `make_environments`.
    """
    # A worker process would say the same, later.
    spec = replace(spec, backend="sync", step_timeout=None) if spec.backend == "async" else spec
    environment = make_environments(spec, 1, [0])
    environment.close()
    return environment.single_observation_space, environment.single_action_space


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
        return RestartingEpisodes(make, index, first_options)
    return SeededEpisodes(make(), index, first_options)


def _make_wrapped(
    spec: EnvironmentSpec, gym_spec: EnvSpec, env_wrappers: tuple[ClassSpec, ...], atari: AtariPreprocessing | None
) -> gymnasium.Env[Any, Any]:
    kwargs = {"disable_env_checker": True} | (atari.make_kwargs() if atari else {}) | spec.env_kwargs
    with _explained(spec, gym_spec), quiet_loading(gym_spec, spec.env_kwargs):
        env: gymnasium.Env[Any, Any] = gymnasium.make(gym_spec, **kwargs)
        if atari:
            env = atari.wrap(env, gym_spec.kwargs.get("repeat_action_probability", 0.0), spec.evaluation)
    for wrapper in env_wrappers:
        env = instantiate("wrappers", wrapper, env)
    return env


def _make_native(
    spec: EnvironmentSpec, gym_spec: EnvSpec, num_envs: int, seeds: list[int]
) -> tuple[VectorEnv[Any, Any, Any], np.ndarray[Any, Any] | int]:
    """Return the environment's own vectorised version, and what to seed it with."""
    if gym_spec.vector_entry_point is None:
        raise ConfigurationError(
            f"backend='native' is not valid: {spec.env_id} registers no vector_entry_point; expected sync, async or "
            "envpool"
        )
    atari = spec.atari_options(is_atari(gym_spec, spec.env_kwargs.get("obs_type")))
    kwargs: dict[str, Any] = {}
    if atari is not None:
        atari = atari.for_evaluation() if spec.evaluation else atari
        # SAME_STEP wastes no step on resets; the other native environments choose for themselves.
        kwargs = atari.native_kwargs() | {"autoreset_mode": AutoresetMode.SAME_STEP}
    with _explained(spec, gym_spec):
        env = gymnasium.make_vec(
            gym_spec, num_envs, vectorization_mode="vector_entry_point", **(kwargs | spec.env_kwargs)
        )
        env = NativeLives(env) if atari is not None and atari.episodic_life else env
    return env, seeds[0] if atari is None else np.asarray(seeds)


def _make_envpool(spec: EnvironmentSpec, num_envs: int, seeds: list[int]) -> VectorEnv[Any, Any, Any]:
    import envpool

    task = spec.env_id.removeprefix("ALE/")
    known = envpool.list_all_envs()
    if task not in known:
        raise unknown_id(spec.env_id, known)
    atari = spec.atari_options("reward_clip" in envpool.make_spec(task).config._fields)
    kwargs: dict[str, Any] = {"num_envs": num_envs, "env_seed": seeds}
    if atari is not None:
        kwargs |= (atari.for_evaluation() if spec.evaluation else atari).envpool_kwargs()
        if task != spec.env_id:  # an ALE id: keep its stickiness, which EnvPool does not
            kwargs.setdefault("repeat_action_probability", 0.25)
    with _explained(spec), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*Box (low|high)'s precision")  # EnvPool's own declarations
        env: Any = envpool.make(task, env_type="gymnasium", **(kwargs | spec.env_kwargs))
        _ = env.observation_space, env.action_space
    return env  # type: ignore[no-any-return]


@contextlib.contextmanager
def _explained(spec: EnvironmentSpec, gym_spec: EnvSpec | None = None) -> Iterator[None]:
    """Turn whatever the making of an environment raises into an error that says what to change."""
    try:
        yield
    except ConfigurationError:
        raise
    except (gymnasium.error.DependencyNotInstalled, ImportError) as error:
        if gym_spec is None:
            raise
        raise missing_package(gym_spec, error) from error
    except Exception as error:
        raise ConfigurationError(
            f"env_id={spec.env_id!r} cannot be made with env_kwargs={spec.env_kwargs!r}: "
            f"{type(error).__name__}: {error}"
        ) from error


def _split_wrappers(spec: EnvironmentSpec) -> tuple[tuple[ClassSpec, ...], tuple[ClassSpec, ...]]:
    """Separate wrappers of single environments from those of vector environments."""
    single: list[ClassSpec] = []
    vector: list[ClassSpec] = []
    for wrapper in spec.wrappers:
        is_vector = issubclass(import_class("wrappers", wrapper["class_path"]), VectorWrapper)
        (vector if is_vector else single).append(wrapper)
    if single and spec.backend in ("native", "envpool"):
        raise ConfigurationError(
            f"wrappers={[w['class_path'] for w in single]} wrap single environments: expected "
            f"gymnasium.vector.VectorWrapper classes with backend={spec.backend!r}"
        )
    return tuple(single), tuple(vector)


def _wrap_vector(env: VectorEnv[Any, Any, Any], wrappers: tuple[ClassSpec, ...]) -> VectorEnv[Any, Any, Any]:
    for wrapper in wrappers:
        env = instantiate("wrappers", wrapper, env)
    return env

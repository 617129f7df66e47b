"""From an environment id to vector environments, by backend."""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import gymnasium
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv, VectorWrapper

from lightning_rl.environments.atari import AtariPreprocessing
from lightning_rl.environments.batch import EnvironmentBatch
from lightning_rl.environments.seeding import SeededEpisodes
from lightning_rl.validation import ClassSpec, ConfigurationError, check, import_class, instantiate

Backend = Literal["sync", "async", "native", "envpool"]

# Packages that register environments when they are imported, with the extra that installs them.
_PLUGINS = {"ale_py": "atari", "minigrid": "minigrid"}
_EXTRA_BY_PREFIX = {"ALE/": "atari", "MiniGrid-": "minigrid", "BabyAI-": "minigrid"}
_EXTRA_BY_ENTRY_POINT = {
    "gymnasium.envs.mujoco": "mujoco",
    "gymnasium.envs.box2d": "box2d",
    "ale_py": "atari",
}


@dataclass(frozen=True)
class EnvironmentSpec:
    """Everything needed to make an environment, as plain data.

    Args:
        env_id: Gymnasium id (`module:id` imports `module` first), or EnvPool task.
        env_kwargs: Arguments of the environment's constructor.
        wrappers: Applied in this order; classes of `gymnasium.Wrapper`, or of `gymnasium.vector.VectorWrapper`.
        backend: `sync` (in this process), `async` (a worker process each), `native` (the environment's own
            vectorised version) or `envpool`.
        atari: Preprocessing of Atari games; None means the defaults for Atari games and nothing for others.
        step_timeout: Seconds a worker process may take for a step.
        evaluation: Leave the environment's own rewards and episodes alone.
    """

    env_id: str
    env_kwargs: dict[str, Any] = field(default_factory=dict)
    wrappers: tuple[ClassSpec, ...] = ()
    backend: Backend = "sync"
    atari: AtariPreprocessing | None = None
    step_timeout: float | None = None
    evaluation: bool = False

    def __post_init__(self) -> None:
        """Check what can be checked without making an environment."""
        check(
            self.backend in get_args(Backend),
            "backend",
            self.backend,
            "one of " + ", ".join(get_args(Backend)),
        )
        if self.step_timeout is not None:
            check(self.backend == "async", "step_timeout", self.step_timeout, "None unless backend is 'async'")
            check(self.step_timeout > 0, "step_timeout", self.step_timeout, "a number of seconds above 0")

    def for_evaluation(self, wrappers: Iterable[ClassSpec]) -> EnvironmentSpec:
        """Return the spec of the evaluation environments, with only the given wrappers."""
        return replace(self, wrappers=tuple(wrappers), evaluation=True)

    def atari_options(self, is_game: bool) -> AtariPreprocessing | None:
        """Return the preprocessing to apply, None where the environment is no Atari game.

        Raises:
            ConfigurationError: Options were given for an environment that is none.
        """
        if not is_game:
            check(
                self.atari is None,
                "atari",
                self.atari,
                f"None, since {self.env_id} is no Atari game with frames",
            )
            return None
        options = self.atari or AtariPreprocessing()
        return options.for_evaluation() if self.evaluation else options


def make_environments(
    spec: EnvironmentSpec,
    num_envs: int,
    seeds: list[int],
    autoreset_mode: AutoresetMode = AutoresetMode.SAME_STEP,
) -> EnvironmentBatch:
    """Make `num_envs` environments.

    Args:
        spec: What to make.
        num_envs: How many.
        seeds: A seed for each.
        autoreset_mode: For the backends `sync` and `async`.

    Raises:
        ConfigurationError: The id is unknown, a package is missing, or an option does not fit the backend.
    """
    env_wrappers, vector_wrappers = _split_wrappers(spec)
    if spec.backend == "envpool":
        return EnvironmentBatch(_wrap_vector(_make_envpool(spec, num_envs, seeds), vector_wrappers), None)
    if spec.backend == "native":
        return EnvironmentBatch(_wrap_vector(_make_native(spec, num_envs), vector_wrappers), seeds[0])
    factories = [functools.partial(make_single, spec, env_wrappers, index) for index in range(num_envs)]
    env: VectorEnv[Any, Any, Any]
    if spec.backend == "sync":
        env = SyncVectorEnv(factories, copy=False, autoreset_mode=autoreset_mode)
    else:
        env = AsyncVectorEnv(factories, copy=False, autoreset_mode=autoreset_mode)
    if vector_wrappers and spec.backend == "async":
        raise ConfigurationError(
            f"wrappers={[w['class_path'] for w in vector_wrappers]} wrap vector environments: expected "
            "gymnasium.Wrapper classes with backend='async'"
        )
    return EnvironmentBatch(_wrap_vector(env, vector_wrappers), seeds, spec.step_timeout)


def make_single(spec: EnvironmentSpec, env_wrappers: tuple[ClassSpec, ...], index: int = 0) -> SeededEpisodes:
    """Make one environment with its wrappers."""
    gym_spec = find_spec(spec.env_id)
    atari = spec.atari_options(is_atari(gym_spec))
    kwargs = {"disable_env_checker": True} | (atari.make_kwargs() if atari else {}) | spec.env_kwargs
    try:
        env: gymnasium.Env[Any, Any] = gymnasium.make(gym_spec, **kwargs)
        env = atari.wrap(env) if atari else env
    except (gymnasium.error.DependencyNotInstalled, ImportError) as error:
        raise _missing_package(spec.env_id, error) from error
    except TypeError as error:
        raise ConfigurationError(f"env_kwargs={spec.env_kwargs!r} were refused by {spec.env_id}: {error}") from error
    for wrapper in env_wrappers:
        env = instantiate("wrappers", wrapper, env)
    return SeededEpisodes(env, index)


def find_spec(env_id: str) -> EnvSpec:
    """Look an id up in Gymnasium's registry, importing the packages that register more where installed.

    Raises:
        ConfigurationError: The id is unknown (with the nearest names), or its package is not installed.
    """
    module, _, name = env_id.rpartition(":")
    if module:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ConfigurationError(f"env_id={env_id!r}: module {module!r} cannot be imported: {error}") from error
    for package in _PLUGINS:
        if name not in gymnasium.registry and importlib.util.find_spec(package):
            plugin = importlib.import_module(package)
            gymnasium.register_envs(plugin)
    if name in gymnasium.registry:
        return gymnasium.spec(name)
    extra = next((extra for prefix, extra in _EXTRA_BY_PREFIX.items() if name.startswith(prefix)), None)
    if name.endswith(("NoFrameskip-v4", "NoFrameskip-v0")):
        extra = "atari"
    missing = [package for package, its_extra in _PLUGINS.items() if its_extra == extra]
    if missing and not importlib.util.find_spec(missing[0]):
        raise _missing_package(env_id, f"{missing[0]} is not installed", extra)
    raise _unknown_id(env_id, gymnasium.registry)


def is_atari(spec: EnvSpec) -> bool:
    """Whether an environment is an ALE game that returns frames."""
    return str(spec.entry_point).startswith("ale_py") and spec.kwargs.get("obs_type", "rgb") != "ram"


def _unknown_id(env_id: str, known: Iterable[str]) -> ConfigurationError:
    by_lower = {name.lower(): name for name in known}
    near = difflib.get_close_matches(env_id.rpartition(":")[2].lower(), by_lower, n=3, cutoff=0.5)
    hint = f"; did you mean {', '.join(by_lower[name] for name in near)}?" if near else ""
    return ConfigurationError(f"env_id={env_id!r} is unknown: expected a registered environment id{hint}")


def _missing_package(env_id: str, error: object, extra: str | None = None) -> ConfigurationError:
    if extra is None:
        entry_point = str(gymnasium.spec(env_id).entry_point) if env_id in gymnasium.registry else ""
        extra = next((e for prefix, e in _EXTRA_BY_ENTRY_POINT.items() if entry_point.startswith(prefix)), None)
    how = f": pip install 'lightning-rl[{extra}]'" if extra else ""
    return ConfigurationError(f"env_id={env_id!r} needs a package that is not installed ({error}){how}")


def _split_wrappers(spec: EnvironmentSpec) -> tuple[tuple[ClassSpec, ...], tuple[ClassSpec, ...]]:
    """Separate wrappers of single environments from those of vector environments."""
    single, vector = [], []
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


def _make_native(spec: EnvironmentSpec, num_envs: int) -> VectorEnv[Any, Any, Any]:
    gym_spec = find_spec(spec.env_id)
    if gym_spec.vector_entry_point is None:
        raise ConfigurationError(
            f"backend='native' is not valid: {spec.env_id} registers no vector_entry_point; expected sync, async or envpool"
        )
    atari = spec.atari_options(is_atari(gym_spec))
    kwargs = (atari.native_kwargs() if atari else {}) | spec.env_kwargs
    try:
        return gymnasium.make_vec(spec.env_id, num_envs, vectorization_mode="vector_entry_point", **kwargs)
    except (gymnasium.error.DependencyNotInstalled, ImportError) as error:
        raise _missing_package(spec.env_id, error) from error


def _make_envpool(spec: EnvironmentSpec, num_envs: int, seeds: list[int]) -> VectorEnv[Any, Any, Any]:
    if not importlib.util.find_spec("envpool"):
        raise ConfigurationError(
            "backend='envpool' needs a package that is not installed: pip install 'lightning-rl[envpool]'"
        )
    import envpool

    task = spec.env_id.removeprefix("ALE/")
    known = envpool.list_all_envs()
    if task not in known:
        raise _unknown_id(spec.env_id, known)
    atari = spec.atari_options("reward_clip" in envpool.make_spec(task).config._fields)
    kwargs = atari.envpool_kwargs() if atari else {}
    if task != spec.env_id:  # an ALE id: keep its stickiness, which EnvPool does not
        kwargs.setdefault("repeat_action_probability", 0.25)
    return envpool.make(  # type: ignore[no-any-return]
        task, env_type="gymnasium", num_envs=num_envs, env_seed=seeds, **(kwargs | spec.env_kwargs)
    )

"""Looks environments up in Gymnasium's registry, with errors that name near ids and missing packages."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
from collections.abc import Iterable, Mapping
from importlib.metadata import entry_points
from traceback import walk_tb

import gymnasium
from gymnasium.envs.registration import EnvSpec

from lightning_rl.environments.contract import summary
from lightning_rl.validation import ConfigurationError, check_installed, how_to_install

# Packages that register environments when they are imported, with the extra that installs them.
_PLUGINS = {"ale_py": "atari", "minigrid": "minigrid", "minatar": "minatar"}
_EXTRA_BY_PREFIX = {
    "ALE/": "atari",
    "MiniGrid-": "minigrid",
    "BabyAI-": "minigrid",
    "MinAtar/": "minatar",
    "PettingZoo/mpe2.": "mpe",
}
_PARALLEL = "PettingZoo/"
_ATARI_SUFFIXES = ("NoFrameskip-v4", "NoFrameskip-v0")
_PACKAGE_BY_PREFIX = {
    **dict.fromkeys(("Fetch", "Hand", "Adroit", "PointMaze", "AntMaze", "Franka"), "gymnasium_robotics"),
    "dm_control/": "shimmy",
}
_EXTRA_BY_ENTRY_POINT = {"gymnasium.envs.mujoco": "mujoco", "gymnasium.envs.box2d": "box2d", **_PLUGINS}


def find_spec(env_id: str) -> EnvSpec:
    """Return the registered spec of an environment; imports the packages that register more environments.

    Args:
        env_id: As in `gymnasium.make`; `module:id` imports `module` first. `PettingZoo/<module>` is the parallel
            environment of a module.

    Raises:
        ConfigurationError: The id is unknown, or its package is not installed.
    """
    module, _, name = env_id.rpartition(":")
    if module:
        _import(module, f"env_id={env_id!r}")
    if parallel := parallel_module(name):
        if importlib.util.find_spec(parallel.partition(".")[0]):  # otherwise, making it names the extra
            _import(parallel, f"env_id={env_id!r}")
        entry_point = "lightning_rl.environments.pettingzoo:make_parallel_env"
        return EnvSpec(name, vector_entry_point=entry_point, kwargs={"module": parallel})
    if name not in gymnasium.registry:  # Gymnasium 1.0 and newer do not call the functions that packages declare
        for plugin in entry_points(group="gymnasium.envs", name=name.partition("/")[0]):
            plugin.load()()
    for package in _PLUGINS:
        if name not in gymnasium.registry and importlib.util.find_spec(package):
            gymnasium.register_envs(importlib.import_module(package))
    if name in gymnasium.registry:
        return gymnasium.spec(name)
    extra = "atari" if name.endswith(_ATARI_SUFFIXES) else _by_prefix(_EXTRA_BY_PREFIX, name)
    for package, its_extra in _PLUGINS.items():
        if its_extra == extra:
            check_installed(f"env_id={env_id!r}", extra, package)
    home = _by_prefix(_PACKAGE_BY_PREFIX, name)
    if home is not None and not module:
        raise ConfigurationError(f"env_id={env_id!r} is unknown: expected {home}:{name}, which imports its package")
    imports = f"; a package that registers it is imported by package:{name}, or by --data.env.imports [package]"
    raise unknown_id(env_id, _current_ids(gymnasium.registry.values()), "" if module else imports)


def parallel_module(env_id: str) -> str:
    """Return the module of an id `PettingZoo/<module>`; an empty string for other ids."""
    return env_id.removeprefix(_PARALLEL) if env_id.startswith(_PARALLEL) else ""


def import_modules(names: Iterable[str]) -> None:
    """Import the modules of `env.imports`; raise a `ConfigurationError` if this fails."""
    for name in names:
        _import(name, "env.imports")


def _import(module: str, field: str) -> None:
    if module in _PACKAGE_BY_PREFIX.values():
        check_installed(field, "robotics", module)
    try:
        importlib.import_module(module)
    except (Exception, SystemExit) as error:
        raise ConfigurationError(
            f"{field}: module {module!r} cannot be imported ({summary(error)}): expected a module in the current "
            "folder, on PYTHONPATH or installed"
        ) from error


def _by_prefix(values: Mapping[str, str], name: str) -> str | None:
    return next((value for prefix, value in values.items() if name.startswith(prefix)), None)


# Without older versions of the same environment, and without Gymnasium's JAX environments.
def _current_ids(specs: Iterable[EnvSpec]) -> list[str]:
    by_version = sorted(specs, key=lambda spec: spec.version or 0)
    newest = {(spec.namespace, spec.name): spec.id for spec in by_version}
    return [env_id for (namespace, _), env_id in newest.items() if namespace not in ("phys2d", "tabular")]


def is_atari(spec: EnvSpec, obs_type: str | None = None) -> bool:
    """Whether an environment is an ALE game that returns frames; `obs_type` overrides the spec's."""
    return str(spec.entry_point).startswith("ale_py") and (obs_type or spec.kwargs.get("obs_type", "rgb")) != "ram"


def unknown_id(env_id: str, known: Iterable[str], otherwise: str = "") -> ConfigurationError:
    """Return the error for an unknown id: it names the nearest known ids, or ends with `otherwise`."""
    by_lower = {name.lower(): name for name in known}
    module, colon, name = env_id.rpartition(":")
    near = difflib.get_close_matches(name.lower(), by_lower, n=3, cutoff=0.75)
    hint = f"; did you mean {', '.join(module + colon + by_lower[one] for one in near)}?" if near else otherwise
    return ConfigurationError(f"env_id={env_id!r} is unknown: expected a registered environment id{hint}")


def missing_package(env_id: str, spec: EnvSpec | None, error: object) -> ConfigurationError:
    """Return the error for an environment that needs a package: it names the extra; EnvPool has no `spec`."""
    extra = spec and (_by_prefix(_EXTRA_BY_ENTRY_POINT, str(spec.entry_point)) or _by_prefix(_EXTRA_BY_PREFIX, spec.id))
    how = f": {how_to_install(extra)}" if extra else ""
    return ConfigurationError(f"env_id={env_id!r} needs a package that is not installed or incompatible ({error}){how}")


def working_versions(error: BaseException) -> str:
    """Return the end of a message that names compatible versions, if a robotics package raised the error."""
    modules = {frame.f_globals.get("__name__", "").partition(".")[0] for frame, _ in walk_tb(error.__traceback__)}
    if not modules & {"gymnasium_robotics", "dm_control"}:
        return ""
    return f"; these versions work together: {how_to_install('robotics').partition(',')[0]}"

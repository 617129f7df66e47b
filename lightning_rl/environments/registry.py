"""Looking environments up, and saying what is missing where they cannot be found."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
from collections.abc import Iterable, Iterator, Mapping
from traceback import walk_tb

import gymnasium
from gymnasium.envs.registration import EnvSpec

from lightning_rl.environments.contract import is_failure, summary
from lightning_rl.validation import ConfigurationError, how_to_install

# Packages that register environments when they are imported, with the extra that installs them.
_PLUGINS = {"ale_py": "atari", "minigrid": "minigrid"}
_EXTRA_BY_PREFIX = {"ALE/": "atari", "MiniGrid-": "minigrid", "BabyAI-": "minigrid"}
_EXTRA_BY_SUFFIX = {"NoFrameskip-v4": "atari", "NoFrameskip-v0": "atari"}
_ROBOTICS = ("gymnasium_robotics", "shimmy")
_PACKAGE_BY_PREFIX = {
    **dict.fromkeys(("Fetch", "Hand", "Adroit", "PointMaze", "AntMaze", "Franka"), "gymnasium_robotics"),
    "dm_control/": "shimmy",
}
_EXTRA_BY_ENTRY_POINT = {
    "gymnasium.envs.mujoco": "mujoco",
    "gymnasium.envs.box2d": "box2d",
    "ale_py": "atari",
    "minigrid": "minigrid",
}


def find_spec(env_id: str) -> EnvSpec:
    """Look an id up in Gymnasium's registry, importing the packages that register more where installed.

    Args:
        env_id: As `gymnasium.make` takes it; `module:id` imports `module` first.

    Raises:
        ConfigurationError: The id is unknown (with the nearest names), or its package is not installed.
    """
    module, _, name = env_id.rpartition(":")
    if module:
        _import(module, f"env_id={env_id!r}")
    for package in _PLUGINS:
        if name not in gymnasium.registry and importlib.util.find_spec(package):
            gymnasium.register_envs(importlib.import_module(package))
    if name in gymnasium.registry:
        return gymnasium.spec(name)
    extra = next((extra for prefix, extra in _EXTRA_BY_PREFIX.items() if name.startswith(prefix)), None)
    extra = next((extra for suffix, extra in _EXTRA_BY_SUFFIX.items() if name.endswith(suffix)), extra)
    for package, its_extra in _PLUGINS.items():
        if its_extra == extra and not importlib.util.find_spec(package):
            raise _needs(f"env_id={env_id!r}", extra, f"{package} is not installed")
    home = next((home for prefix, home in _PACKAGE_BY_PREFIX.items() if name.startswith(prefix)), None)
    if home is not None and not module:
        raise ConfigurationError(f"env_id={env_id!r} is unknown: expected {home}:{name}, which imports its package")
    imports = f"; a package that registers it is imported by package:{name}, or by --data.env.imports [package]"
    raise unknown_id(env_id, _worth_naming(gymnasium.registry), "" if module else imports)


def import_modules(names: Iterable[str]) -> None:
    """Import modules that register environments.

    Raises:
        ConfigurationError: One cannot be imported.
    """
    for name in names:
        _import(name, "env.imports")


def _import(module: str, field: str) -> None:
    try:
        importlib.import_module(module)
    except BaseException as error:
        if not is_failure(error):
            raise
        what = summary(error)
        if module in _ROBOTICS and not importlib.util.find_spec(module):
            raise _needs(field, "robotics", f"{module} is not installed") from error
        raise ConfigurationError(
            f"{field}: module {module!r} cannot be imported ({what}): expected a module in the current folder, on "
            "PYTHONPATH or installed"
        ) from error


def _worth_naming(registry: Mapping[str, EnvSpec]) -> Iterator[str]:
    """Yield the ids but for older versions of an environment, and those of Gymnasium that need JAX."""
    newest: dict[tuple[str | None, str], int] = {}
    for spec in registry.values():
        newest[spec.namespace, spec.name] = max(newest.get((spec.namespace, spec.name), 0), spec.version or 0)
    for env_id, spec in registry.items():
        if spec.namespace not in ("phys2d", "tabular") and (spec.version or 0) == newest[spec.namespace, spec.name]:
            yield env_id


def is_atari(spec: EnvSpec, obs_type: str | None = None) -> bool:
    """Whether an environment is an ALE game that returns frames.

    Args:
        spec: Of the environment.
        obs_type: Where the user asked for another type of observation than the spec's.
    """
    return str(spec.entry_point).startswith("ale_py") and (obs_type or spec.kwargs.get("obs_type", "rgb")) != "ram"


def unknown_id(env_id: str, known: Iterable[str], otherwise: str = "") -> ConfigurationError:
    """Return the error for an id that is not among the known ones: it names the nearest.

    Args:
        env_id: What is unknown.
        known: The known ids.
        otherwise: End of the message where no known id is near.
    """
    by_lower = {name.lower(): name for name in known}
    near = difflib.get_close_matches(env_id.rpartition(":")[2].lower(), by_lower, n=3, cutoff=0.75)
    hint = f"; did you mean {', '.join(by_lower[name] for name in near)}?" if near else otherwise
    return ConfigurationError(f"env_id={env_id!r} is unknown: expected a registered environment id{hint}")


def missing_package(spec: EnvSpec, error: object) -> ConfigurationError:
    """Return the error for a registered environment whose package is not installed: it names the extra."""
    entry_point = str(spec.entry_point)
    extra = next((e for prefix, e in _EXTRA_BY_ENTRY_POINT.items() if entry_point.startswith(prefix)), None)
    return _needs(f"env_id={spec.id!r}", extra, str(error))


def working_versions(error: BaseException) -> str:
    """Return which versions work together, to end a message with, where the simulation of another package failed.

    Args:
        error: What the environment raised.
    """
    modules = {frame.f_globals.get("__name__", "").partition(".")[0] for frame, _ in walk_tb(error.__traceback__)}
    if not modules & {"gymnasium_robotics", "dm_control"}:
        return ""
    return "; these versions work together: pip install 'lightning-rl[robotics]'"


def check_envpool() -> None:
    """Raise unless EnvPool is installed.

    Raises:
        ConfigurationError: It is not; names the extra.
    """
    if not importlib.util.find_spec("envpool"):
        raise _needs("backend='envpool'", "envpool", "envpool is not installed")


def _needs(what: str, extra: str | None, problem: str) -> ConfigurationError:
    how = f": {how_to_install(extra)}" if extra else ""
    return ConfigurationError(f"{what} needs a package that is not installed ({problem}){how}")

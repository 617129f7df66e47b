"""The configurations that come with the package, by name: `ppo/cartpole`."""

from __future__ import annotations

import argparse
import difflib
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ActionConfigFile  # type: ignore[attr-defined]

_SUFFIX = ".yaml"


def folder() -> Path:
    """Return where they are: inside an installed package, beside it in a checkout."""
    package = Path(__file__).parents[1]
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def names() -> list[str]:
    """Return the names of all of them."""
    return sorted(path.relative_to(folder()).with_suffix("").as_posix() for path in folder().glob(f"*/*{_SUFFIX}"))


def resolve(given: str) -> str:
    """Return the file of a configuration that was named, and anything else as it is: a file, or YAML itself.

    Raises:
        FileNotFoundError: It has the form of a name, but there is none such; names the nearest ones.
    """
    algorithm, _, name = given.partition("/")
    if Path(given).exists() or not (algorithm.isidentifier() and name.isidentifier()):
        return given
    if given not in names():
        near = difflib.get_close_matches(given, names(), cutoff=0.4)
        known = f"like {', '.join(near)}" if near else f"one of {', '.join(names())}"
        raise FileNotFoundError(f"config={given!r}: expected a file, or the name of a shipped configuration {known}")
    return str(folder() / f"{given}{_SUFFIX}")


class ActionConfig(ActionConfigFile):
    """An option that takes a file or the name of a shipped configuration."""

    def __call__(self, parser: Any, cfg: Any, values: Any, option_string: str | None = None) -> None:  # noqa: ANN401
        """Parse it, and add what it sets."""
        try:
            resolved = resolve(values)
        except FileNotFoundError as error:
            raise argparse.ArgumentError(None, str(error)) from error
        _check_yaml(resolved)
        super().__call__(parser, cfg, resolved, option_string)  # type: ignore[no-untyped-call]


def _check_yaml(given: str) -> None:
    """Raise an error that names the file where that is no YAML: the one of the parser does not."""
    try:
        with Path(given).open() as file:
            yaml.safe_load(file)  # not its text, which has no name
    except yaml.YAMLError as error:
        raise argparse.ArgumentError(None, f"config: {error}") from error
    except OSError:
        return  # YAML itself, or a file that the parser refuses

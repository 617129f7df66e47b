"""The configurations that come with the package, by name: `ppo/cartpole`."""

from __future__ import annotations

import argparse
import difflib
from pathlib import Path
from typing import Any

from jsonargparse import ActionConfigFile  # type: ignore[attr-defined]

from lightning_rl.files import read_yaml
from lightning_rl.validation import ConfigurationError


def folder() -> Path:
    """Return the folder of the configurations: inside an installed package, beside it in a checkout."""
    package = Path(__file__).parents[1]
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


def names() -> list[str]:
    """Return the names of all shipped configurations."""
    return sorted(path.relative_to(folder()).with_suffix("").as_posix() for path in folder().glob("*/*.yaml"))


def resolve(given: str) -> str:
    """Return the file of a named configuration; return files and YAML text unchanged."""
    algorithm, _, name = given.partition("/")
    if not (algorithm.isidentifier() and name.isidentifier()) or Path(given).exists():
        return given
    if given not in names():
        near = difflib.get_close_matches(given, names(), cutoff=0.4)
        known = f"like {', '.join(near)}" if near else f"one of {', '.join(names())}"
        raise FileNotFoundError(f"config={given!r}: expected a file, or the name of a shipped configuration {known}")
    return str(folder() / f"{given}.yaml")


class ActionConfig(ActionConfigFile):
    """The option `--config`, which takes a file or the name of a shipped configuration."""

    def __call__(self, parser: Any, cfg: Any, values: Any, option_string: str | None = None) -> None:  # noqa: ANN401
        """Parse the configuration and apply its settings."""
        try:
            resolved = resolve(values)
            if Path(resolved).is_file():  # the parser's own errors do not name the file
                read_yaml(resolved, "config")
        except (FileNotFoundError, ConfigurationError) as error:
            raise argparse.ArgumentError(None, str(error)) from error
        super().__call__(parser, cfg, resolved, option_string)  # type: ignore[no-untyped-call]

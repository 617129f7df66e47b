"""The configurations that come with the package, by name: `ppo/cartpole`."""

from __future__ import annotations

import argparse
import difflib
import sys
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
    """Return the file of a named configuration; return files, URLs and YAML text unchanged.

    Raises:
        FileNotFoundError: There is neither a file nor a shipped configuration of this name.
    """
    if Path(given).exists() or any(sign in given for sign in ":{\n"):
        return given
    if given not in names():
        near = ", ".join(difflib.get_close_matches(given, names(), cutoff=0.4) or ["ppo/cartpole"])
        expected = f"a file, or the name of a shipped configuration like {near}"
        raise FileNotFoundError(f"config={given!r} does not exist: expected {expected}")
    return str(folder() / f"{given}.yaml")


def search_beside(config: str | None) -> None:
    """Let Python find modules in the folder of a configuration, if it is a file."""
    if config is not None and Path(config).is_file():
        sys.path.append(str(Path(config).absolute().parent))


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
        search_beside(resolved)
        super().__call__(parser, cfg, resolved, option_string)  # type: ignore[no-untyped-call]

"""Where a run keeps its files: `<root>/version_<n>/`, the same for logs, configuration and checkpoints.

Lightning numbers its log folders anew in each process, so `ckpt_path="last"` finds nothing there after a restart.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from lightning_rl.validation import ConfigurationError

CHECKPOINTS = "checkpoints"
_SHARED = "LIGHTNING_RL_RUN_DIR"


def run_root(default_root_dir: str | None, algorithm: str, env_id: str) -> Path:
    """Return the folder of all runs of one setting: `default_root_dir`, or `runs/<algorithm>/<environment>`."""
    if default_root_dir:
        return Path(default_root_dir)
    return Path("runs") / algorithm.lower() / re.sub(r"[^\w.-]+", "-", env_id)


def new_run_dir(root: Path) -> Path:
    """Return the next free `version_<n>` folder.

    Further ranks that the Trainer starts on this machine share the folder of the first.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0" and _SHARED in os.environ:
        return Path(os.environ[_SHARED])
    taken = [int(path.name[8:]) for path in root.glob("version_*") if path.name[8:].isdigit()]
    run_dir = root / f"version_{max(taken, default=-1) + 1}"
    os.environ[_SHARED] = str(run_dir)
    return run_dir


def find_checkpoint(root: Path, name: str) -> Path | None:
    """Return the newest checkpoint called `last` or `best` of any run under `root`, None if there is none."""
    found = root.glob(f"version_*/{CHECKPOINTS}/{name}*.ckpt")
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def run_dir_of(checkpoint: Path, root: Path) -> Path:
    """Return the run folder that a checkpoint lies in, or a new one where it lies elsewhere."""
    return checkpoint.parent.parent if checkpoint.parent.name == CHECKPOINTS else new_run_dir(root)


def existing_checkpoint(path: str) -> Path:
    """Return the path of a checkpoint file.

    Raises:
        ConfigurationError: There is no such file.
    """
    if not Path(path).is_file():
        raise ConfigurationError(f"ckpt_path={path!r} does not exist: expected a checkpoint file, 'last' or 'best'")
    return Path(path)

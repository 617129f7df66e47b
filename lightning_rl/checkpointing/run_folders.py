"""The folder of a run, `<root>/version_<n>/`, with its logs, configurations and checkpoints."""

from __future__ import annotations

import contextlib
import os
import re
from operator import itemgetter
from pathlib import Path, PureWindowsPath

from lightning.pytorch.utilities.rank_zero import rank_zero_warn  # type: ignore[attr-defined]

from lightning_rl.checkpointing.format import CHECKPOINT_KEY, is_weights_only, read_checkpoint
from lightning_rl.files import DamagedFileError, check_intact
from lightning_rl.validation import ConfigurationError, make_folder

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


RUNS = Path("runs")
"""Default folder of all runs."""
CHECKPOINTS = "checkpoints"
CONFIG = "config.yaml"
"""Configuration of the first start of a run; a resumed run with other options adds `config-2.yaml`, and so on."""
_CONFIGS = re.compile(r"config(?:-(\d+))?\.yaml")
KEEP_NEWEST = (None, "step")
"""Values of `monitor` of callbacks that keep the newest checkpoints, not the best."""
_SHARED = "LIGHTNING_RL_RUN_DIR"
_SCHEDULERS = ("SLURM_PROCID", "JSM_NAMESPACE_RANK")


class RunLock:
    """Locks a run folder for one process; the operating system releases the lock when the process ends."""

    def __init__(self) -> None:
        self._folder: int | None = None

    def acquire(self, run_dir: Path) -> None:
        """Lock a folder on the first rank; other ranks may not know the right folder."""
        if not _is_first_rank():
            return
        make_folder("run folder", run_dir)
        if fcntl is None:
            return
        self._folder = os.open(run_dir, os.O_RDONLY)
        try:
            fcntl.flock(self._folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigurationError(
                f"ckpt_path: another process is still training the run in {run_dir}: wait until it ends, or give "
                "simultaneous jobs different values of trainer.default_root_dir"
            ) from None
        except OSError:  # the file system has no locks
            self.release()

    def release(self) -> None:
        if self._folder is not None:
            os.close(self._folder)
            self._folder = None


def run_root(default_root_dir: str | None, algorithm: str, env_id: str) -> Path:
    """Return the folder of all runs of one setting: `default_root_dir`, or `runs/<algorithm>/<environment>`."""
    if default_root_dir:
        return Path(default_root_dir)
    return RUNS / algorithm.lower() / re.sub(r"[^\w.-]+", "-", env_id)


def new_run_dir(root: Path) -> Path:
    """Make the next free `version_<n>` folder on the first rank, and return it.

    Processes that the Trainer starts on the same machine get the path from an environment variable. Ranks that were
    started by `torchrun`, SLURM or by hand guess it, and write nothing there: Lightning's first rank writes logs and
    configurations, and sends the path of checkpoints to the others.
    """
    version = 1 + max(map(_version, root.glob("version_*")), default=-1)
    if not _is_first_rank():
        return Path(os.environ.get(_SHARED) or root / f"version_{version}")
    make_folder("default_root_dir", root)
    while True:
        run_dir = root / f"version_{version}"
        try:
            run_dir.mkdir()
        except FileExistsError:  # another run started at the same moment
            version += 1
        else:
            os.environ[_SHARED] = str(run_dir)
            return run_dir


def _version(path: Path) -> int:
    number = path.name.removeprefix("version_")
    return int(number) if number.isdecimal() else -1


def configurations(run_dir: Path) -> list[Path]:
    """Return the configurations of a run, from its first start to its last."""
    return sorted(filter(_number_of, run_dir.glob("config*.yaml")), key=_number_of)


def next_configuration(run_dir: Path) -> Path:
    """Return the path for the next configuration of a run."""
    existing = configurations(run_dir)
    return run_dir / (f"config-{_number_of(existing[-1]) + 1}.yaml" if existing else CONFIG)


def _number_of(path: Path) -> int:
    found = _CONFIGS.fullmatch(path.name)
    return int(found[1] or 1) if found else 0


def remove_empty(run_dir: Path) -> None:
    """Remove the folder of a run that did not start, and its parents in `runs`, if they are empty."""
    with contextlib.suppress(OSError):  # not empty
        run_dir.rmdir()
        for folder in run_dir.parents:
            if folder.is_relative_to(RUNS):
                folder.rmdir()


def _is_first_rank() -> bool:
    """Return whether this process will be rank 0; Lightning does not know yet."""
    rank = next((os.environ[name] for name in ("RANK", "LOCAL_RANK", *_SCHEDULERS) if name in os.environ), "0")
    node = "0" if "RANK" in os.environ else os.environ.get("NODE_RANK", "0")
    return int(rank) == 0 and int(node) == 0


def find_checkpoint(root: Path, name: str, resumable: bool = False, nested: bool = False) -> Path | None:
    """Return a checkpoint of the newest run under `root`, or None.

    Args:
        root: Folder of the runs.
        name: `last` for the intact one with the most environment steps; `best` for the `best_model_path` of the first
            `ModelCheckpoint` with a monitor.
        resumable: Skip checkpoints that contain only weights.
        nested: Search all folders below `root` for runs.
    """
    paths = root.glob(f"{'**/' if nested else ''}version_*/{CHECKPOINTS}/*.ckpt")
    runs = list(dict.fromkeys(path.parent for path in sorted(paths, key=saved_at, reverse=True)))
    if name == "best":
        return _best(runs[0], resumable) if runs else None
    return next((path for run in runs if (path := _furthest_intact(run, resumable)) is not None), None)


def saved_at(path: str | Path) -> float:
    """Return the time of a file; 0 if there is none, since a run that is still training may have replaced it."""
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0


def _furthest_first(folder: Path, resumable: bool = False) -> list[tuple[float, Path]]:
    """Return environment steps and path of checkpoints; `resumable` leaves out files that have only weights.

    Copies of a run keep the steps, unlike the times. A file that cannot be read has its place by its time.
    """
    found: list[tuple[float, Path]] = []
    # Of files of the same step and time, `last.ckpt` comes first.
    for path in sorted(folder.glob("*.ckpt"), key=lambda path: (saved_at(path), path.name.startswith("last"))):
        steps = max((earlier for earlier, _ in found), default=-1) + 0.5
        with contextlib.suppress(ConfigurationError):
            checkpoint = read_checkpoint(path, mapped=True)
            if resumable and is_weights_only(checkpoint):
                continue
            steps = checkpoint[CHECKPOINT_KEY]["env_steps"]
        if path.exists():  # a run that is still training may replace it
            found.append((steps, path))
    return sorted(reversed(found), key=itemgetter(0), reverse=True)


def _best(run: Path, resumable: bool) -> Path | None:
    for _, path in _furthest_first(run):
        check_intact(path)
        for state in read_checkpoint(path, mapped=True).get("callbacks", {}).values():
            given = PureWindowsPath(state.get("best_model_path") or "")  # parses paths of all systems
            if not given.name or state.get("monitor") in KEEP_NEWEST:
                continue
            for best in (path.parent / given.name, Path(state["best_model_path"])):  # the run may have been moved
                if best.is_file():
                    check_intact(best)
                    return None if resumable and is_weights_only(read_checkpoint(best, mapped=True)) else best
    return None


def _furthest_intact(run: Path, resumable: bool) -> Path | None:
    damages: list[DamagedFileError] = []
    for _, path in _furthest_first(run, resumable):
        try:
            check_intact(path)
        except DamagedFileError as error:
            damages.append(error)
            continue
        for damage in damages:
            rank_zero_warn(f"{damage}; using {str(path)!r} instead, the last intact checkpoint of the run")
        return path
    if damages:
        raise damages[0]
    return None


def folder_around(checkpoint: Path) -> Path | None:
    """Return the run folder that has a checkpoint in its folder of checkpoints, or None."""
    return checkpoint.parent.parent if checkpoint.parent.name == CHECKPOINTS else None


def run_dir_of(checkpoint: Path, env_steps: int) -> Path | None:
    """Return the run folder of a checkpoint; None if a later one in it would be overwritten, or it is not in a run."""
    # Without a configuration, the folder is the log of a run elsewhere, or of a script.
    if (run_dir := folder_around(checkpoint)) is None or not configurations(run_dir):
        return None
    later = any(steps > env_steps for steps, _ in _furthest_first(checkpoint.parent))
    return None if later else run_dir

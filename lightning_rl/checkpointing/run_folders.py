"""Where a run keeps its files: `<root>/version_<n>/`, the same for logs, configuration and checkpoints.

Lightning numbers its log folders anew in each process, so `ckpt_path="last"` finds nothing there after a restart.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_warn  # type: ignore[attr-defined]

from lightning_rl.checkpointing.atomic import LastCheckpoint
from lightning_rl.checkpointing.format import CHECKPOINT_KEY, is_weights_only, read_checkpoint
from lightning_rl.files import DamagedFileError, check_intact
from lightning_rl.validation import ConfigurationError, make_folder

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


RUNS = Path("runs")
"""Where runs are that nothing else was said of, by algorithm and environment."""
CHECKPOINTS = "checkpoints"
CONFIG = "config.yaml"
"""Configuration of the first start of a run; a resumed run with other settings adds `config-2.yaml`, and so on."""
_SHARED = "LIGHTNING_RL_RUN_DIR"
_SCHEDULERS = ("SLURM_PROCID", "JSM_NAMESPACE_RANK")


class RunLock:
    """Keeps a run folder for one process; the operating system gives it back however the process ends."""

    def __init__(self) -> None:
        self._folder: int | None = None

    def acquire(self, run_dir: Path) -> None:
        """Take a folder; only the first of several ranks does, since the others may only guess which it is.

        Args:
            run_dir: The folder.

        Raises:
            ConfigurationError: It cannot be written, or another process trains there.
        """
        if not _is_first_rank():
            return
        make_folder("run folder", run_dir)  # that of an earlier run may be gone, or another's
        if fcntl is None:
            return
        folder = os.open(run_dir, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(folder)
            raise ConfigurationError(
                f"ckpt_path: the run in {run_dir} has not ended, another process is training it: expected one that "
                "has; jobs that run at the same time need a trainer.default_root_dir each"
            ) from None
        except OSError:  # a file system without locks
            os.close(folder)
        else:
            self._folder = folder

    def release(self) -> None:
        """Give it back."""
        if self._folder is not None:
            os.close(self._folder)
            self._folder = None


def run_root(default_root_dir: str | None, algorithm: str, env_id: str) -> Path:
    """Return the folder of all runs of one setting: `default_root_dir`, or `runs/<algorithm>/<environment>`."""
    if default_root_dir:
        return Path(default_root_dir)
    return RUNS / algorithm.lower() / re.sub(r"[^\w.-]+", "-", env_id)


def new_run_dir(root: Path) -> Path:
    """Make the next free `version_<n>` folder, and return it.

    Only the first of several ranks makes one. The processes that the Trainer starts on its machine are told which;
    those that were started by `torchrun`, SLURM or by hand only guess: Lightning has the first rank write logs and
    configuration, and tells the others where checkpoints go.

    Raises:
        ConfigurationError: It cannot be made.
    """
    version = 1 + max(map(_version, root.glob("version_*")), default=-1)
    if not _is_first_rank():
        return Path(os.environ.get(_SHARED) or root / f"version_{version}")
    while True:
        run_dir = root / f"version_{version}"
        try:
            run_dir.mkdir(parents=True)
        except FileExistsError:  # taken by a run that was started at the same moment
            version += 1
        except OSError as error:
            raise ConfigurationError(
                f"default_root_dir={str(root)!r}: expected a folder that can be written: {error.strerror}"
            ) from error
        else:
            os.environ[_SHARED] = str(run_dir)
            return run_dir


def configurations(run_dir: Path) -> list[Path]:
    """Return the configurations of a run, from its first start to its last."""
    further = [path for path in run_dir.glob("config-*.yaml") if _number_of(path) > 1]
    return [path for path in (run_dir / CONFIG,) if path.is_file()] + sorted(further, key=_number_of)


def next_configuration(run_dir: Path) -> Path:
    """Return where a run keeps its next configuration."""
    existing = configurations(run_dir)
    return run_dir / (f"config-{_number_of(existing[-1]) + 1}.yaml" if existing else CONFIG)


def _number_of(config: Path) -> int:
    number = config.stem.partition("-")[2]
    return int(number) if number.isdecimal() else 1


def remove_empty(run_dir: Path) -> None:
    """Remove the folder of a run that did not begin, and those of its setting that have no other, if they are empty."""
    with contextlib.suppress(OSError):  # there is something in it
        run_dir.rmdir()
        for folder in run_dir.parents:
            if folder.is_relative_to(RUNS):  # not what somebody may have made as `default_root_dir`
                folder.rmdir()


def _is_first_rank() -> bool:
    """Return whether this process will be rank 0, before the ranks have met.

    From what `torchrun` (`RANK`), the Trainer (`LOCAL_RANK`, `NODE_RANK`), SLURM or LSF have set; each only where those
    before it have not, since SLURM's are also there in processes that something else has started.
    """
    rank = next((os.environ[name] for name in ("RANK", "LOCAL_RANK", *_SCHEDULERS) if name in os.environ), "0")
    node = "0" if "RANK" in os.environ else os.environ.get("NODE_RANK", "0")
    return int(rank) == 0 and int(node) == 0


def _version(path: Path) -> int:
    number = path.name.removeprefix("version_")
    return int(number) if number.isdecimal() else -1


def find_checkpoint(root: Path, name: str, resumable: bool = False, nested: bool = False) -> Path | None:
    """Return the newest checkpoint of the runs under `root`, None if there is none.

    Where `last` is damaged, the newest intact checkpoint of the same run takes its place, with a warning.

    Args:
        root: Folder of the runs.
        name: `last` for the newest of all, `best` for the newest whose name begins so.
        resumable: Pass over those that hold weights only.
        nested: Runs of several settings are there, each in folders of its own.

    Raises:
        DamagedFileError: The best checkpoint is damaged, or all that can be resumed from of the newest run are.
    """
    folders = "**/version_*" if nested else "version_*"
    found = root.glob(f"{folders}/{CHECKPOINTS}/{'*' if name == 'last' else name + '*'}.ckpt")
    # Of two that were written in the same moment, the one that is called so.
    newest_first = sorted(found, key=lambda path: (path.stat().st_mtime, path.name.startswith(name)), reverse=True)
    damaged: list[tuple[Path, DamagedFileError]] = []
    for path in newest_first:
        if damaged and path.parent != damaged[0][0].parent:
            continue
        try:
            check_intact(path, "ckpt_path", "an intact checkpoint")
            passed_over = _holds_weights_only(path) and resumable
        except DamagedFileError as error:
            if name == "best":
                raise
            damaged.append((path, error))
            continue
        if passed_over:
            continue
        for _, damage in damaged:
            rank_zero_warn(f"{damage}; taking {str(path)!r} instead, the newest intact checkpoint of the run")
        return path
    if damaged:
        raise damaged[0][1]
    return None


def _holds_weights_only(path: Path) -> bool:
    try:
        return is_weights_only(read_checkpoint(path, mapped=True))
    except ConfigurationError:  # better named in an error than passed over
        return False


def run_dir_of(checkpoint: Path, env_steps: int) -> Path | None:
    """Return the run folder in which training goes on from a checkpoint; None if it takes a new one.

    It goes on in the folder that the checkpoint lies in, unless a newer one lies there too: that is not overwritten.

    Args:
        checkpoint: Where it lies.
        env_steps: Its number of environment steps.
    """
    run_dir = checkpoint.parent.parent
    if checkpoint.parent.name != CHECKPOINTS:
        return None
    newest = max(checkpoint.parent.glob("*.ckpt"), key=lambda path: path.stat().st_mtime)
    if newest == checkpoint:
        return run_dir
    try:
        check_intact(newest, "ckpt_path", "an intact checkpoint")
        later = read_checkpoint(newest, mapped=True)[CHECKPOINT_KEY]["env_steps"] > env_steps
    except ConfigurationError:  # it was damaged, which is why another one was chosen
        later = True
    return None if later else run_dir


def default_checkpoints(folder: Path, given: list[Callback], validates: bool) -> list[Callback]:
    """Return what saves the newest checkpoint and, unless the configuration chooses by something else, the best one.

    A `LastCheckpoint` of the configuration saves in the same folder unless it has its own: `--ckpt_path last` looks
    there, wherever the logger writes.
    """
    added: list[Callback] = []
    for callback in given:
        if isinstance(callback, LastCheckpoint) and callback.dirpath is None:
            callback.dirpath = str(folder)
    chooses = any(isinstance(callback, ModelCheckpoint) and callback.monitor is not None for callback in given)
    if validates and not chooses:
        added.append(ModelCheckpoint(folder, "best-{step}", monitor="val/episode_return", mode="max"))
    if not has_any(given, LastCheckpoint):
        added.append(LastCheckpoint(folder))
    return added


def has_any(callbacks: list[Callback], kind: type[Callback]) -> bool:
    """Whether one of the callbacks is of a kind."""
    return any(isinstance(callback, kind) for callback in callbacks)

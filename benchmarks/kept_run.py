"""A training run in a separate folder, which any process can continue after the previous one was killed.

The folder contains plain files:

* `identity.json`: the inputs that determine the numbers of the run. If one of them changes, the run starts again.
* `history.jsonl`: a line for each start, with its commit, and for each pause and end that the queue observed.
* `progress.json`: environment steps and speed, updated every few seconds.
* `version_<n>/checkpoints/`, `log/start<n>/metrics.csv`, `final.ckpt`: checkpoints, a log per start, the final state.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections import deque
from pathlib import Path
from typing import Any

import yaml
from computation import digest
from lightning.pytorch import Callback, LightningModule, Trainer
from record import source, versions
from run_files import append_event, history, read_json, replace_json

CHECKPOINT_INTERVAL = "0:01:00"
_PROGRESS_SECONDS = 2.0
_RATE_SECONDS = 60.0


def claim(folder: Path, config: Path, overrides: list[str], seed: int = 0) -> None:
    """Prepare the folder of a run; delete an earlier run in it that had other inputs, but no files of anything else."""
    settings = json.dumps([yaml.safe_load(config.read_text()), overrides], sort_keys=True)
    identity = {"computation": digest(), "settings": hashlib.sha256(settings.encode()).hexdigest()} | versions()
    identity["seed"] = seed
    path = folder / "identity.json"
    found = read_json(path)
    # The queue may add to the history before the run claims its folder.
    if found is None and {other.name for other in folder.glob("[!.]*")} - {"history.jsonl"}:
        raise ValueError(f"folder={str(folder)!r}: expected a new or an empty folder, or the folder of an earlier run")
    if found is not None and (other := found.setdefault("seed", seed)) != seed:  # earlier folders have no seed
        raise ValueError(f"folder={str(folder)!r} has the run of seed {other}: expected another one for seed {seed}")
    if found != identity:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        replace_json(path, identity)


def arguments(folder: Path) -> list[str]:
    """Return the arguments of `lightning-rl fit` that save a run every minute and resume it."""
    return [
        *("--ckpt_path", "last"),
        *("--trainer.callbacks+", "lightning_rl.LastCheckpoint"),
        *("--trainer.callbacks.train_time_interval", CHECKPOINT_INTERVAL),
        *("--trainer.callbacks+", "kept_run.RunClock"),
        *("--trainer.callbacks.folder", str(folder)),
        *("--trainer.logger.init_args.flush_logs_every_n_steps", "1"),
    ]


def new_log(folder: Path) -> str:
    """Return the name of the log of the next start."""
    return f"start{len(list(folder.glob('log/start*')))}"


def logs(folder: Path) -> list[tuple[Path, float]]:
    """Return the log of each start, and the environment steps up to which the run kept its entries."""
    starts = [event for event in history(folder) if event["event"] == "start"]
    ends = [*(event["env_steps"] for event in starts[1:]), float("inf")]
    # If the last checkpoint was damaged, a later start resumes from an earlier step than the start before.
    kept = [min(ends[number:]) for number in range(len(ends))]
    return [(folder / "log" / start["log"] / "metrics.csv", end) for start, end in zip(starts, kept, strict=False)]


def training_seconds(trainer: Trainer) -> dict[str, float]:
    """Return wall and CPU seconds of all starts of a run, without work that kills discarded."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    [clock] = [callback for callback in callbacks if isinstance(callback, RunClock)]
    return clock.seconds


class RunClock(Callback):
    """Records starts and progress of a run, and sums the training time that its checkpoints include.

    Args:
        folder: Folder of the run.
    """

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self._source = source()  # the imported code; the files may change later
        self._before = {"wall": 0.0, "cpu": 0.0}
        self._start = self._now()
        self._recent: deque[tuple[float, int]] = deque()

    @staticmethod
    def _now() -> dict[str, float]:
        return {"wall": time.monotonic(), "cpu": sum(os.times()[:4])}

    @property
    def seconds(self) -> dict[str, float]:
        """Wall and CPU seconds of the training so far, without work that kills discarded."""
        now = self._now()
        return {name: round(self._before[name] + now[name] - self._start[name], 2) for name in now}

    def state_dict(self) -> dict[str, Any]:
        """Return the time so far."""
        return self.seconds

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the time so far."""
        self._before = dict(state_dict)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the start."""
        env_steps = int(pl_module.env_steps)  # type: ignore[arg-type]
        log = Path(trainer.log_dir or "").name
        commit = {name: self._source[name] for name in ("commit", "dirty")}
        append_event(self.folder, "start", env_steps=env_steps, **commit, log=log)
        self._start = self._now()
        self._report(env_steps)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Record the progress."""
        if time.monotonic() - self._recent[-1][0] >= _PROGRESS_SECONDS:
            self._report(int(pl_module.env_steps))  # type: ignore[arg-type]

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the final progress."""
        self._report(int(pl_module.env_steps))  # type: ignore[arg-type]

    def _report(self, env_steps: int) -> None:
        now = time.monotonic()
        while self._recent and now - self._recent[0][0] > _RATE_SECONDS:
            self._recent.popleft()
        rate = 0.0
        if self._recent and now > self._recent[0][0]:
            rate = (env_steps - self._recent[0][1]) / (now - self._recent[0][0])
        self._recent.append((now, env_steps))
        replace_json(self.folder / "progress.json", {"env_steps": env_steps, "steps_per_second": round(rate, 1)})

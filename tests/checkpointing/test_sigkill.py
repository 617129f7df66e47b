"""A run that is killed at any moment and restarted by the same command ends like an uninterrupted one."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import record
from lightning_rl.cli.main import main
from tests.checkpointing.test_resume import differences, run_state
from tests.cli.test_main import SMALL
from tests.programs import Program


def line(epochs: int) -> list[str]:
    """Return the command that a job script would run for each start."""
    more = ["--model.optimizer.anneal=true", "--trainer.enable_progress_bar=false", "--ckpt_path=last"]
    return ["fit", *SMALL, f"--trainer.max_epochs={epochs}", *more]


def start(folder: Path, epochs: int) -> Program:
    folder.mkdir(exist_ok=True)
    return Program("-m", "lightning_rl", *line(epochs), cwd=folder)


def newest(folder: Path) -> Path | None:
    """Return the checkpoint to resume from; a process killed before its first save leaves none."""
    found = folder.glob("runs/ppo/CartPole-v1/version_*/checkpoints/last.ckpt")
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def wait_for_checkpoint(folder: Path, process: Program) -> None:
    while newest(folder) is None:
        assert process.poll() is None
        time.sleep(0.01)


def steps_saved(folder: Path) -> int:
    last = newest(folder)
    return 0 if last is None else int(run_state(last)["lightning_rl"]["env_steps"])


def whole_run(folder: Path, epochs: int) -> dict[str, Any]:
    """Return the seconds until the first checkpoint and until the end of an uninterrupted run."""
    begin, process = time.monotonic(), start(folder, epochs)
    wait_for_checkpoint(folder, process)
    first = time.monotonic() - begin
    assert process.wait(300) == 0
    return {"first_checkpoint": first, "end": time.monotonic() - begin}


def killed_run(folder: Path, epochs: int, moments: list[tuple[str, float]]) -> list[dict[str, Any]]:
    """Kill a run repeatedly, then let it finish.

    Args:
        folder: Folder of the run.
        epochs: Length of the run.
        moments: When to kill: the event (`start`, or the first `checkpoint` of the process) and the seconds after it.
    """
    kills: list[dict[str, Any]] = []
    for after, delay in moments:
        before, begin = steps_saved(folder), time.monotonic()
        process = start(folder, epochs)
        while after == "checkpoint" and steps_saved(folder) == before and process.poll() is None:
            time.sleep(0.05)
        try:
            status = process.wait(delay)
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        else:
            assert status == 0
            return kills
        seconds, writing = time.monotonic() - begin, any(folder.glob("runs/**/.unfinished-*"))
        kills.append({"seconds": round(seconds, 3), "env_steps_saved": steps_saved(folder), "while_writing": writing})
    assert start(folder, epochs).wait(300) == 0
    return kills


def compare(whole: Path, killed: Path) -> list[str]:
    """Return the differences between the last checkpoints."""
    paths = newest(whole), newest(killed)
    assert paths[0] is not None
    assert paths[1] is not None
    return differences(run_state(paths[0]), run_state(paths[1]))


def test_killed_and_resumed_run_equals_uninterrupted_run(tmp_path, monkeypatch):
    whole, killed, epochs = tmp_path / "whole", tmp_path / "killed", 20
    whole.mkdir()
    monkeypatch.chdir(whole)
    monkeypatch.setattr(sys, "argv", ["lightning-rl"])
    main(line(epochs))
    process = start(killed, epochs)
    wait_for_checkpoint(killed, process)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert 0 < steps_saved(killed) < steps_saved(whole) == epochs * 2 * 32
    assert start(killed, epochs).wait(300) == 0
    assert compare(whole, killed) == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_twenty_random_kills_change_nothing(tmp_path):
    epochs, wanted, seed = 300, 22, int(time.time())
    seconds = whole_run(tmp_path / "whole", epochs)
    generator = random.Random(seed)
    kills: list[dict[str, Any]] = []
    runs = 0
    while len(kills) < wanted:
        # Most kills hit training, some hit the start or the restoring.
        moments = [
            ("checkpoint", generator.uniform(0, 1))
            if generator.random() < 0.8
            else ("start", generator.uniform(0.5, 1.1) * seconds["first_checkpoint"])
            for _ in range(wanted - len(kills))
        ]
        killed = tmp_path / f"killed_{runs}"
        kills += killed_run(killed, epochs, moments)
        runs += 1
        assert compare(tmp_path / "whole", killed) == []
    record.write_json(
        record.RESULTS / "resume/sigkill.json",
        {
            "what": "kill -9 at random moments, started again with --ckpt_path last: final checkpoint bit for bit "
            "that of the run that was left alone (weights, optimiser, counters, generators, environments)",
            "command": " ".join(["lightning-rl", *line(epochs)]),
            "source": record.source(),
            "versions": record.versions(),
            "hardware": record.hardware(),
            "seed_of_the_moments": seed,
            "seconds_of_the_whole_run": {name: round(value, 2) for name, value in seconds.items()},
            "runs": runs,
            "kills": kills,
            "different": [],
        },
    )

"""Actors end with their learner, whatever ends the learner."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.programs import Program

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc, and forks")


def is_there(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone_within(pids: list[int], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while any(map(is_there, pids)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@pytest.mark.parametrize(
    ("signum", "to_all", "code", "said"),
    [(signal.SIGKILL, False, -9, ""), (signal.SIGINT, True, 130, "SIGINT: stopping after the update")],
)
def test_no_actor_outlives_its_learner(signum, to_all, code, said):
    """Neither a killed learner, nor one that gets Ctrl-C, which a terminal also sends to actors; they ignore it."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    arguments = ["-m", "tests.data.learner_script"]
    if signum == signal.SIGKILL:  # after which an interpreter does nothing
        learner: Any = Program(*arguments, cwd=ROOT, env=environment)
    else:
        learner = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    try:
        assert learner.stdout is not None
        pids = [int(pid) for pid in learner.stdout.readline().split()]
        assert len(pids) == 2 and all(map(is_there, pids))
        (os.killpg if to_all else os.kill)(learner.pid, signum)
        try:
            _, errors = learner.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            there = [name for name, pid in (("learner", learner.pid), *enumerate(pids)) if is_there(pid)]
            os.killpg(learner.pid, signal.SIGKILL)
            pytest.fail(f"{there} had not ended:\n{learner.communicate()[1]}")
    finally:
        if learner.poll() is None:
            os.killpg(learner.pid, signal.SIGKILL)
    assert learner.returncode == code, errors
    assert gone_within(pids, 20)
    assert said in errors and "Traceback" not in errors

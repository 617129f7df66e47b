"""A rank that fails ends the others, and on the command line what happened is said once: on two processes."""

import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.programs import Program

ROOT = Path(__file__).parents[2]
NOISE = (
    r"Training FailingPPO on "
    r"|Seed set to|\[rank: 1\] Seed set|[GTH]PU available|Initializing distributed|distributed_backend=|All dist|---"
    r"|\w+ updates by |.*has no checkpoint callback"
    r"|\[Gloo\] Rank|.*connected peer ranks is"  # PyTorch 2.8's, of two ranks that write at once
)


def run(folder: Path, how: str, rank: int, *arguments: str) -> tuple[int, list[str]]:
    """Exit status, and what was said besides Lightning's announcements; fails if a process outlives the first."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    kept = {name: value for name, value in os.environ.items() if name not in ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE")}
    environment = kept | {"PYTHONPATH": path, "FAIL": f"{how} {rank}"}
    process = Program("-m", "tests.cli.failing_ranks", *arguments, cwd=folder, env=environment, join=True, ranks=1)
    output = process.stdout.read()
    status = process.wait(60)
    try:
        assert ended_within(5, process.pid), "a process is left behind"
    finally:
        process.kill()
    return status, [line for line in output.splitlines() if line.strip() and not re.match(NOISE, line)]


def ended_within(seconds: float, group: int) -> bool:
    deadline = time.monotonic() + seconds
    while True:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_an_environment_that_fails_on_one_rank_is_told_once(tmp_path, rank):
    status, lines = run(tmp_path, "environment", rank)
    assert status == 1
    assert re.match(rf"lightning-rl: error: rank {rank}: environment [01] .*the physics exploded", lines[0]), lines
    assert re.match(r'  File ".*failing_ranks.py", line \d+, in step$', lines[1])
    assert len(lines) == 2


@pytest.mark.slow
def test_a_loss_that_is_not_finite_on_one_rank_is_told_once_though_every_rank_stops(tmp_path):
    status, lines = run(tmp_path, "nan", 1)
    assert status == 1
    assert re.match(r"lightning-rl: error: \w+ is nan in the update from rollout 2 ", lines[0]), lines
    assert len(lines) == 1


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_an_error_of_another_kind_is_shown_with_the_traceback_of_its_rank_alone(tmp_path, rank):
    status, lines = run(tmp_path, "raise", rank)
    assert status == 1
    assert lines[-1] == f"[rank{rank}]: RuntimeError: boom"
    assert [line for line in lines if not line.startswith(f"[rank{rank}]:")] == []


def test_a_rank_that_is_killed_ends_the_first(tmp_path):
    status, lines = run(tmp_path, "kill", 1)
    assert (status, lines) == (1, ["lightning-rl: error: rank 1 was killed by SIGKILL"])


def test_a_rank_that_exits_without_an_error_is_named(tmp_path):
    status, lines = run(tmp_path, "exit", 1)
    assert (status, lines) == (1, ["lightning-rl: error: rank 1 ended with exit code 3"])


@pytest.mark.slow
def test_a_first_rank_that_is_killed_ends_the_others(tmp_path):
    status, lines = run(tmp_path, "kill", 0)
    assert status == -signal.SIGKILL
    assert [line for line in lines if line.startswith("lightning-rl: error: the connection to another rank")] == lines
    assert len(lines) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("how", "rank"), [("kill", 1), ("raise", 0), ("raise", 1), ("environment", 1)])
def test_a_script_ends_on_every_rank_too(tmp_path, how, rank):
    status, lines = run(tmp_path, how, rank, "script")
    assert status == 1
    errors = [line for line in lines if re.match(r"\[rank\d\]: [\w.]+(Error|Failure): ", line)]
    other = [line for line in errors if line.startswith(f"[rank{1 - rank}]: ")]
    assert all("Connection" in line for line in other)
    assert how == "kill" or "boom" in "".join(errors) or "exploded" in "".join(errors)

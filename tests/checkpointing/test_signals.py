"""Signals to whole programs: exit status, checkpoints, and no surviving workers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.checkpointing.test_resume import differences, run_state
from tests.cli.test_main import SMALL
from tests.programs import Program

ROOT = Path(__file__).parents[2]
RUN = Path("runs/ppo/CartPole-v1/version_0")
LAST = RUN / "checkpoints/last.ckpt"
PROGRAM = "from lightning_rl.cli.main import main\nif __name__ == '__main__':\n    main()\n"
# A rollout takes more than a second, so that signals arrive during collection.
SLOW = "import time, gymnasium\nclass Slow(gymnasium.Wrapper):\n    def step(self, action):\n"
SLOW += "        time.sleep({seconds})\n        return super().step(action)\n"


@pytest.fixture(autouse=True)
def in_folder(in_tmp_path):
    Path("slow.py").write_text(SLOW.format(seconds=0.04))
    Path("program.py").write_text(PROGRAM)
    return in_tmp_path


@contextmanager
def started(*arguments: str, ranks: int = 0) -> Iterator[Program]:
    """Start the command line as the leader of a process group, as a shell does."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{Path.cwd()}"}
    program = Program("program.py", "fit", *SMALL, *arguments, env=environment, ranks=ranks)
    try:
        yield program
    finally:
        if program.poll() is None:
            program.kill()
            program.wait()


def wait_for(condition, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def descendants(pid: int) -> set[int]:
    """Return the living descendants of a process."""
    found: set[int] = set()
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            child = int(status.parent.name)
            found |= {child} | descendants(child)
    return found


def alive(pids: set[int]) -> set[int]:
    def runs(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            return False

    return {pid for pid in pids if runs(pid)}


def stored() -> int:
    return torch.load(LAST, weights_only=True)["lightning_rl"]["policy_version"]


WORKERS = [
    "--data.backend=async",
    "--data.env.wrappers=[slow.Slow]",
    "--max_env_steps=100000",
    "--trainer.limit_val_batches=0",
]


@pytest.mark.parametrize(("signum", "to"), [(signal.SIGINT, "group"), (signal.SIGTERM, "process")])
def test_first_signal_saves_and_ends_program(signum, to):
    with started(*WORKERS) as process:
        wait_for(LAST.exists)
        before, workers = stored(), descendants(process.pid)
        assert len(workers) >= 2
        time.sleep(0.2)
        # Ctrl-C in a terminal, and some schedulers, send to every process of the run.
        (os.killpg if to == "group" else os.kill)(process.pid, signum)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signum
    assert out.splitlines()[-1] == f"Continue with: lightning-rl fit --config {RUN}/config.yaml --ckpt_path {LAST}"
    assert "Traceback" not in err
    assert stored() > before
    wait_for(lambda: not alive(workers), 5)


def test_first_signal_saves_though_the_reader_of_the_output_has_ended():
    # As with `2>&1 | tee log`: Ctrl-C also ends tee. Here the run prints lines before the signal too.
    with started(*WORKERS) as process:
        wait_for(LAST.exists)
        before = stored()
        process.stdout.close()
        process.stderr.close()
        wait_for(lambda: stored() > before)
        before = stored()
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(60) == 130
    assert stored() > before


def test_second_signal_ends_program_at_once():
    Path("slow.py").write_text(
        SLOW.format(seconds=3).replace("        time", "        open('stepped', 'w')\n        time")
    )
    with started(*WORKERS) as process:
        wait_for(Path("stepped").exists)  # the first rollout has started; it takes a minute
        workers = descendants(process.pid)
        assert len(workers) >= 2
        os.killpg(process.pid, signal.SIGINT)
        assert any(line.startswith("SIGINT: stopping") for line in process.stderr)  # wait for the message
        time.sleep(0.5)
        assert process.poll() is None
        start = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(10) == 130
        assert time.monotonic() - start < 1
    assert not LAST.exists()
    wait_for(lambda: not alive(workers), 10)


def test_program_ends_without_closing_workers():
    code = (
        "from lightning_rl import RolloutDataModule\n"
        "from lightning_rl.environments import make_environments\n"
        "data = RolloutDataModule('CartPole-v1', backend='async')\n"
        "environments = make_environments(data.spec, 2, [1, 2])\n"
        "environments.reset()\n"
        "import sys; sys.exit(3)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, timeout=60).returncode == 3


def test_slurm_signal_to_process_group_requeues_and_job_resumes(monkeypatch):
    values = {"NTASKS": "1", "JOB_NAME": "train", "JOB_ID": "17", "PROCID": "0", "LOCALID": "0", "NODEID": "0"}
    for name, value in values.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    Path("scontrol").write_text('#!/bin/sh\necho "$@" >> calls\n')
    Path("scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{Path.cwd()}{os.pathsep}{os.environ['PATH']}")
    with started(*WORKERS, "--ckpt_path=last") as process:
        wait_for(LAST.exists)
        os.killpg(process.pid, signal.SIGUSR1)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGUSR1, err
    assert Path("calls").read_text() == "requeue 17\n"
    saved = stored()
    hpc = torch.load(RUN / "hpc_ckpt_1.ckpt", weights_only=True)
    assert hpc["lightning_rl"]["policy_version"] == saved
    with started(*WORKERS, "--ckpt_path=last") as process:
        wait_for(lambda: stored() > saved)
        os.kill(process.pid, signal.SIGTERM)
        out, _ = process.communicate(timeout=60)
    assert f"Resuming from {LAST}, at {saved * 32} environment steps" in out
    assert process.returncode == 143


@pytest.mark.parametrize("goes_on", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_all_ranks_stop_after_same_rollout_and_resume_exactly(goes_on):
    ranks = ["--trainer.devices=2", "--trainer.strategy=ddp", "--trainer.limit_val_batches=0", "--max_env_steps=640"]
    with started(*ranks, "--data.env.wrappers=[slow.Slow]", ranks=1) as process:
        wait_for(LAST.exists)
        others = descendants(process.pid)
        os.kill(process.pid, signal.SIGTERM)  # to the first rank only
        out, err = process.communicate(timeout=60)
    assert process.returncode == 143, err
    assert out.splitlines()[-1].startswith("Continue with: ")
    assert 2 <= stored() < 10
    wait_for(lambda: not alive(others), 5)
    if not goes_on:
        return
    Path("slow.py").write_text(SLOW.format(seconds=0))
    with started(*ranks, "--data.env.wrappers=[slow.Slow]", "--ckpt_path=last", ranks=1) as process:
        assert process.wait(60) == 0, process.stderr.read()
    LAST.rename("resumed.ckpt")
    with started(*ranks, "--data.env.wrappers=[slow.Slow]", ranks=1) as process:
        assert process.wait(60) == 0, process.stderr.read()
    whole = Path("runs/ppo/CartPole-v1/version_1/checkpoints/last.ckpt")
    assert differences(run_state(Path("resumed.ckpt")), run_state(whole)) == []


def test_ranks_that_wait_for_actors_save_before_they_stop():
    actors = ["--model=OverlappedPPO", "--data.actors.count=1", "--data.env.wrappers=[slow.Slow]"]
    ranks = ["--trainer.devices=2", "--trainer.strategy=ddp", "--trainer.limit_val_batches=0", "--max_env_steps=100000"]
    with started(*actors, *ranks, ranks=1) as process:
        wait_for(lambda: any(Path("runs").glob("*/*/*/checkpoints/last.ckpt")))
        others = descendants(process.pid)
        os.kill(process.pid, signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 143, err
    assert "Stopped by a signal; the run is saved in" in err and "Traceback" not in err
    wait_for(lambda: not alive(others), 5)

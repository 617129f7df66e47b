"""SIGINT and SIGTERM before training begins."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.test_main import SMALL
from tests.programs import Program

ROOT = Path(__file__).parents[2]
# An import that takes long; some modules raise another error when they are interrupted.
TORCH = """
import pathlib, time
pathlib.Path("reached").touch()
try:
    time.sleep(60)
except KeyboardInterrupt:
    raise AttributeError("module 'numpy' has no attribute 'matrix'")
"""
SLOW = """
import pathlib, time, gymnasium, lightning.pytorch
def wait():
    pathlib.Path("reached").touch()
    time.sleep(60)
class Slow(gymnasium.Wrapper):
    def __init__(self, env):
        wait()
class SlowSetup(lightning.pytorch.Callback):
    def setup(self, trainer, pl_module, stage):
        wait()
class SlowFitStart(lightning.pytorch.Callback):
    def on_fit_start(self, trainer, pl_module):
        wait()
"""


@pytest.fixture(autouse=True)
def in_folder(in_tmp_path, monkeypatch):
    Path("train.py").write_text("from lightning_rl import PPO\n")
    Path("slow.py").write_text(SLOW)
    monkeypatch.setenv("PYTHONPATH", f"{in_tmp_path}{os.pathsep}{ROOT}")


def interrupted(start: Callable[..., subprocess.Popen[str]], signum: int = signal.SIGINT) -> tuple[int, str, str]:
    """Exit status and output of a program that gets a signal, with its workers, when it has reached a place."""
    process = start()
    try:
        deadline = time.monotonic() + 100
        while not Path("reached").exists():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(0.1)  # it is about to sleep
        os.killpg(process.pid, signum)
        out, err = process.communicate(timeout=50)
        return process.returncode, out, err
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def python(*arguments: str) -> Callable[[], subprocess.Popen[str]]:
    command = [sys.executable, *arguments]
    pipe = subprocess.PIPE
    return lambda: subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


def test_programs_that_import_the_package_are_interrupted_as_usual():
    Path("torch.py").write_text(TORCH)
    status, _, err = interrupted(python("train.py", "-m", "lightning_rl"))
    assert status == 1
    assert "\nKeyboardInterrupt\n" in err


def test_ctrl_c_while_the_command_line_imports_ends_without_a_traceback():
    Path("torch.py").write_text(TORCH)
    assert interrupted(python("-m", "lightning_rl", "fit", "--config=ppo/cartpole")) == (130, "", "")


def test_while_environments_are_made_a_run_cleans_up_and_ends_with_the_status_of_an_interrupt():
    arguments = ["fit", *SMALL, "--data.env.wrappers=[slow.Slow]", "--data.backend=async"]
    assert interrupted(python("-m", "lightning_rl", *arguments)) == (130, "", "Seed set to 0\n")
    assert not list(Path("runs").rglob("version_*"))


def test_until_training_takes_the_signal_over_the_status_is_that_of_an_interrupt():
    status, _, err = interrupted(
        lambda: Program("-m", "lightning_rl", "fit", *SMALL, "--trainer.callbacks=slow.SlowSetup")
    )
    assert status == 130
    assert "Traceback" not in err


# The second one is there after the model summary, before Lightning and this package handle signals.
@pytest.mark.parametrize("slow", ["--data.env.wrappers=[slow.Slow]", "--trainer.callbacks=slow.SlowFitStart"])
def test_sigterm_before_training_ends_the_command_line_with_its_message_and_status(slow):
    command = ["fit", *SMALL, slow]
    status, out, err = interrupted(lambda: Program("-m", "lightning_rl", *command), signal.SIGTERM)
    assert status == 143
    assert "SIGTERM: stopping; a second signal stops at once" in err and "Traceback" not in err
    assert out == "" or out.startswith("Training PPO on CartPole-v1 in runs/")
    assert bool(list(Path("runs").rglob("version_*"))) == ("SlowFitStart" in slow)

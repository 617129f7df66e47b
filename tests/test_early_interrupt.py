"""Ctrl-C before training: what a user sees of it while the program imports, and until the run has begun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_rl import early_interrupt
from lightning_rl.cli import main
from lightning_rl.commands import run_command
from tests.programs import Program
from tests.test_cli import SMALL

ROOT = Path(__file__).parents[1]
# As pip writes it.
SCRIPT = "import sys\nfrom lightning_rl.__main__ import run\nsys.exit(run())\n"
# What is imported first of all that takes long; some modules fail otherwise if they are interrupted.
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
COMMAND_LINES = [["-m", "lightning_rl"], ["-mlightning_rl"], ["-m", "lightning_rl.__main__"], ["lightning-rl"]]


@pytest.fixture(autouse=True)
def in_folder(in_tmp_path, monkeypatch):
    Path("lightning-rl").write_text(SCRIPT)
    Path("train.py").write_text("import lightning_rl\n")
    Path("slow.py").write_text(SLOW)
    monkeypatch.setenv("PYTHONPATH", f"{in_tmp_path}{os.pathsep}{ROOT}")
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


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


@pytest.mark.parametrize("command", COMMAND_LINES, ids=" ".join)
def test_while_the_program_imports_it_ends_at_once_without_a_word(command):
    Path("torch.py").write_text(TORCH)
    assert interrupted(python(*command, "fit", "--config", "ppo/cartpole")) == (-signal.SIGINT, "", "")


def test_programs_that_import_the_package_are_interrupted_as_any():
    Path("torch.py").write_text(TORCH)
    status, _, err = interrupted(python("train.py", "-m", "lightning_rl"))
    assert status == 1
    assert "\nKeyboardInterrupt\n" in err


def test_workers_which_have_the_arguments_of_the_program_leave_it_to_the_program():
    Path("torch.py").write_text("import signal; raise SystemExit(repr(signal.getsignal(signal.SIGINT)))")
    code = "import sys; sys.argv = ['/bin/lightning-rl', 'fit']; import lightning_rl"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert "default_int_handler" in done.stderr


def test_a_program_in_the_background_of_a_shell_goes_on_ignoring_it():
    Path("torch.py").write_text("import signal; raise SystemExit(repr(signal.getsignal(signal.SIGINT)))")
    command = "trap '' INT; exec \"$0\" -m lightning_rl fit"
    done = subprocess.run(["sh", "-c", command, sys.executable], capture_output=True, text=True, timeout=50)
    assert "SIG_IGN" in done.stderr


def test_while_environments_are_made_a_run_cleans_up_and_ends_with_the_status_of_an_interrupt():
    arguments = ["fit", *SMALL, "--data.wrappers=[slow.Slow]", "--data.backend=async"]
    assert interrupted(python("-m", "lightning_rl", *arguments)) == (130, "", "Seed set to 0\n")
    assert not list(Path("runs").rglob("version_*"))


def test_until_training_takes_the_signal_over_the_status_is_that_of_an_interrupt():
    status, _, err = interrupted(
        lambda: Program("-m", "lightning_rl", "fit", *SMALL, "--trainer.callbacks=slow.SlowSetup")
    )
    assert status == 130
    assert "Traceback" not in err


# The second one is there after the model summary, before Lightning and this package handle signals.
@pytest.mark.parametrize("slow", ["--data.wrappers=[slow.Slow]", "--trainer.callbacks=slow.SlowFitStart"])
def test_sigterm_before_training_ends_the_command_line_with_its_message_and_status(slow):
    command = ["fit", *SMALL, slow]
    status, out, err = interrupted(lambda: Program("-m", "lightning_rl", *command), signal.SIGTERM)
    assert status == 143
    assert "SIGTERM: stopping; a second signal stops at once" in err and "Traceback" not in err
    assert out == ""
    assert bool(list(Path("runs").rglob("version_*"))) == ("SlowFitStart" in slow)


@pytest.mark.parametrize(
    "command",
    [
        lambda: run_command(["plot", "--help"]),
        lambda: main(["fit", *SMALL, "--num_threads=0"]),
    ],
)
def test_commands_that_have_something_to_clean_up_can_do_so(command, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["lightning-rl"])
    monkeypatch.setattr(early_interrupt, "_held", True)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    with pytest.raises(SystemExit):
        command()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

"""What starts with the command line: as little as it can, counted in modules."""

import importlib.util
import io
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

import lightning_rl
from lightning_rl import __version__
from lightning_rl.__main__ import run
from tests import programs
from tests.cli.test_main import SMALL, printed

ROOT = Path(__file__).parents[2]

SCRIPT = """
import contextlib, io, json, logging, runpy, signal, sys, threading, time, warnings
import lightning.pytorch, torch
before, seconds = set(sys.modules), time.process_time()
def state():
    loggers = {name: (list(log.filters), list(log.handlers), log.level) for name, log in
               logging.root.manager.loggerDict.items() if isinstance(log, logging.Logger)}
    return {
        "handlers": [signal.getsignal(number) for number in signal.valid_signals()],
        "hooks": (warnings.showwarning, warnings.formatwarning, sys.excepthook, threading.excepthook),
        "settings": (torch.get_num_threads(), torch.get_default_dtype(), list(warnings.filters)),
        "loggers": loggers,
    }
old = state()
import lightning_rl
new = state()
new["loggers"] = {name: log for name, log in new["loggers"].items() if name in old["loggers"]}
sys.argv[1:] = ["--help"]
with contextlib.redirect_stdout(io.StringIO()) as printed:
    try:
        runpy.run_module("lightning_rl", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        assert end.code == 0
found = {"more": sorted(set(sys.modules) - before), "all": sorted(sys.modules), "help": printed.getvalue()}
found["side_effects"] = [name for name, value in old.items() if new[name] != value]
print(json.dumps(found | {"seconds": time.process_time(), "seconds_of_lightning": seconds}))
"""
# What a run needs and help does not; matplotlib Lightning imports by itself, by way of torchmetrics.
HEAVY = {
    *("tensorboard", "matplotlib", "scipy", "onnx", "onnxruntime", "ray", "optuna", "huggingface_hub"),
    *("mujoco", "ale_py", "envpool", "Box2D", "pygame", "cv2", "minigrid"),
}


def ask_for_help() -> dict[str, Any]:
    """What `python -m lightning_rl --help` prints and imports after Lightning, and CPU seconds of the interpreter."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, cwd=ROOT, timeout=280)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    return ask_for_help()


def test_help_imports_little_more_than_lightning(seen):
    assert "fit" in seen["help"]
    more = [name for name in seen["more"] if name.partition(".")[0] != "lightning_rl"]
    assert not [name for name in more if name.partition(".")[0] in HEAVY]
    assert "tensorboard" not in seen["all"]
    assert not [name for name in more if name.startswith("gymnasium.envs.") and "mujoco" in name]
    # 140 with Gymnasium 1.4 and jsonargparse 4.53; any large package more would have hundreds.
    assert len(more) < 250, more


def test_python_m_is_the_same_program_and_starts_in_at_most_half_as_long_again_as_lightning(seen, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["lightning-rl"])
    assert seen["help"] == printed(capsys, "--help")
    for _attempt in range(3):
        ours, lightnings = seen["seconds"], seen["seconds_of_lightning"]
        if ours <= 1.5 * lightnings:
            break
        seen = ask_for_help()
    else:
        pytest.fail(f"{ours:.1f} s of CPU time instead of at most 1.5 × {lightnings:.1f} s")
    assert 'lightning-rl = "lightning_rl.__main__:run"' in (ROOT / "pyproject.toml").read_text()


AT_ONCE = """
import sys, time
from lightning_rl.__main__ import run
sys.argv[1:] = {arguments}
try:
    run()
except SystemExit as end:
    heavy = {{"torch", "lightning", "numpy", "jsonargparse", "gymnasium"}} & set(sys.modules)
    print(end.code, time.process_time() < 0.5, heavy)
"""


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--version"], 0, ""),
        (["fti"], 2, "'fti' is no command: expected one of fit, .*, push; did you mean fit\\?"),
        (["exprt"], 2, "'exprt' is no command: .*; did you mean export\\?"),
        (["xyzzy"], 2, "'xyzzy' is no command: expected one of fit, .*, push"),
        ([], 2, "expected one of fit, validate, test, predict, export, plot, pull, push"),
    ],
    ids=["version", "typo", "own_typo", "unknown", "nothing"],
)
def test_the_version_and_typos_of_commands_are_answered_before_anything_is_imported(arguments, status, message):
    command = [sys.executable, "-c", AT_ONCE.format(arguments=arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=100)
    *printed, last = done.stdout.splitlines()
    assert last == f"{status} True set()"
    assert printed == ([f"lightning-rl {__version__}"] if status == 0 else [])
    lines = [rf"lightning-rl: error: {message}", r"All options: lightning-rl --help"] if message else []
    assert len(lines) == len(done.stderr.splitlines())
    assert all(re.fullmatch(*pair) for pair in zip(lines, done.stderr.splitlines(), strict=True))


def test_importing_the_package_has_no_side_effects(seen):
    assert seen["side_effects"] == []


def test_a_console_completes_public_names_before_their_first_use():
    spec: Any = lightning_rl.__spec__
    spec.loader.exec_module(unused := importlib.util.module_from_spec(spec))
    assert "PPO" not in vars(unused)
    assert {"PPO", "RolloutDataModule", "functional", "__version__"} <= {*dir(unused)}


@pytest.mark.slow
def test_a_type_checker_refuses_a_misspelled_import(tmp_path):
    mypy, file = pytest.importorskip("mypy.api"), tmp_path / "own.py"
    file.write_text("from lightning_rl import PPO, RolloutDataModul, functional\n")
    output = mypy.run([str(file)])[0]
    assert 'has no attribute "RolloutDataModul"' in output and "Found 1 error" in output


@pytest.mark.slow
def test_a_type_checker_accepts_dicts_in_groups_and_lists_of_names(tmp_path):
    mypy, file = pytest.importorskip("mypy.api"), tmp_path / "own.py"
    file.write_text(
        "from lightning_rl.environments.spec import EnvConfig\n"
        "from lightning_rl.training.config import OptimizerConfig\n"
        "names, scheduler = ['my.Wrapper'], {'name': 'my.Scheduler'}\n"
        "EnvConfig(wrappers=names, training_wrappers=('my.Wrapper',))\n"
        "OptimizerConfig(critic={'learning_rate': 1e-3}, l2={'policy': 1e-4}, scheduler=scheduler)\n"
    )
    assert mypy.run([str(file)])[2] == 0


def test_program_in_an_archive_starts_further_ranks(in_tmp_path):
    with zipfile.ZipFile("lightning-rl.exe", "w") as archive:  # as pip installs it on Windows
        archive.writestr("__main__.py", "from lightning_rl.__main__ import run\nrun()\n")
    options = [*SMALL, "--trainer.fast_dev_run=1", "--trainer.devices=2", "--trainer.strategy=ddp"]
    done = programs.run("lightning-rl.exe", "fit", *options, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    assert "GLOBAL_RANK: 1, MEMBER: 2/2" in done.stderr


def test_help_is_printed_where_the_encoding_lacks_letters(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["lightning-rl", "fit", "--model.help", "PPO"])
    monkeypatch.setattr(sys, "stdout", pipe := io.TextIOWrapper(io.BytesIO(), "cp1252"))  # as a pipe on Windows
    with pytest.raises(SystemExit, match="0"):
        run()
    pipe.seek(0)
    assert r"GAE_LAMBDA \u03bb of the advantage estimates" in " ".join(pipe.read().split())

"""Checkpoints are written atomically; a failed write keeps the earlier checkpoint."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from contextlib import nullcontext
from pathlib import Path
from pickle import UnpicklingError
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO

from lightning_rl.checkpointing.atomic import AtomicCheckpointIO, CheckpointFailure
from lightning_rl.checkpointing.run_folders import find_checkpoint
from lightning_rl.cli.main import main
from tests import programs
from tests.cli.test_main import SMALL
from tests.helpers import full_disk, make_data, make_model, make_trainer
from tests.programs import Program

BEFORE, AFTER = {"weights": torch.zeros(3)}, {"weights": torch.ones(100_000)}


@pytest.fixture
def path(tmp_path) -> Path:
    path = tmp_path / "checkpoints/last.ckpt"
    AtomicCheckpointIO().save_checkpoint(BEFORE, path)
    return path


def stored(path: Path) -> torch.Tensor:
    return torch.load(path, weights_only=True)["weights"]


def test_checkpoint_replaces_earlier_file_without_leftovers(path):
    AtomicCheckpointIO().save_checkpoint(AFTER, path)
    assert torch.equal(stored(path), AFTER["weights"])
    assert list(path.parent.iterdir()) == [path]


def test_values_that_resuming_could_not_load_are_named_when_they_are_saved(path):
    """Such as the state of a callback, or of an algorithm that overrides `on_save_checkpoint`."""
    content = {"state": {"best": np.float64(1), "last": deque([1])}, "weights": torch.zeros(3)}
    with pytest.warns(UserWarning, match=r"last\.ckpt' contains collections\.deque, numpy.* cannot load it as data"):
        AtomicCheckpointIO().save_checkpoint(content, path)
    with pytest.raises(UnpicklingError):
        AtomicCheckpointIO().load_checkpoint(path)


def test_saving_to_a_symlink_replaces_the_link_not_its_target(path):
    link = path.with_name("link.ckpt")
    link.symlink_to(path.name)
    AtomicCheckpointIO().save_checkpoint(AFTER, link)
    assert torch.equal(stored(path), BEFORE["weights"])
    assert torch.equal(stored(link), AFTER["weights"])


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_failed_write_keeps_earlier_checkpoint_without_leftovers(call, path, monkeypatch):
    monkeypatch.setattr(os, call, full_disk)
    expected = r"checkpoint '.*last\.ckpt' could not be written: No space left on device; earlier checkpoints are unch"
    with pytest.raises(CheckpointFailure, match=expected):
        AtomicCheckpointIO().save_checkpoint(AFTER, path)
    assert torch.equal(stored(path), BEFORE["weights"])
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(("patience", "is_replaced"), [(30.0, True), (-1.0, False)])
def test_checkpoint_that_another_program_reads_is_replaced_later_on_windows(patience, is_replaced, path, monkeypatch):
    replace, refusals = os.replace, [PermissionError(13, "Access is denied")] * 2

    def refused_twice(*paths: object) -> None:
        if refusals:
            raise refusals.pop()
        replace(*paths)

    windows = SimpleNamespace(**vars(os) | {"name": "nt", "replace": refused_twice})
    monkeypatch.setattr("lightning_rl.files.os", windows)
    monkeypatch.setattr("lightning_rl.files._PATIENCE", patience)
    refused = pytest.raises(CheckpointFailure, match="could not be written: Access is denied")
    with nullcontext() if is_replaced else refused:
        AtomicCheckpointIO().save_checkpoint(AFTER, path)
    assert torch.equal(stored(path), (AFTER if is_replaced else BEFORE)["weights"])
    assert list(path.parent.iterdir()) == [path]


def test_checkpoint_that_another_program_reads_is_removed_later_on_windows(path, monkeypatch):
    remove, refusals = os.remove, [PermissionError(13, "Access is denied")] * 2

    def refused_twice(*paths: object) -> None:
        if refusals:
            raise refusals.pop()
        remove(*paths)

    monkeypatch.setattr("lightning_rl.files.os", SimpleNamespace(name="nt"))
    monkeypatch.setattr(os, "remove", refused_twice)
    AtomicCheckpointIO().remove_checkpoint(path)
    assert not path.exists() and not refusals


def test_unwritable_folder_raises_error_with_path(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        CheckpointFailure, match=r"'.*file/last\.ckpt' could not be written: .*; earlier checkpoints are unch"
    ):
        AtomicCheckpointIO().save_checkpoint(AFTER, tmp_path / "file/last.ckpt")


def test_checkpoint_is_flushed_to_disk_before_rename(path, monkeypatch):
    order, replace, fsync = [], os.replace, os.fsync

    def synced(descriptor: int) -> None:
        order.append(f"fsync {os.path.basename(os.readlink(f'/proc/self/fd/{descriptor}'))}")
        fsync(descriptor)

    def replaced(*paths: object) -> None:
        order.append("replace")
        replace(*paths)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    AtomicCheckpointIO().save_checkpoint(AFTER, path)
    assert order == [f"fsync .unfinished-{os.getpid()}.tmp", "replace", "fsync checkpoints"]


def test_kill_while_writing_keeps_earlier_checkpoint_and_next_save_removes_leftovers(path):
    code = (
        "import os, time, sys, torch\n"
        "from lightning_rl.checkpointing.atomic import AtomicCheckpointIO\n"
        "os.fsync = lambda descriptor: (print('writing', flush=True), time.sleep(100))\n"
        f"AtomicCheckpointIO().save_checkpoint({{'weights': torch.ones(100_000)}}, {str(path)!r})\n"
    )
    process = Program("-c", code)
    assert process.stdout.readline() == "writing\n"
    unfinished = path.with_name(f".unfinished-{process.pid}.tmp")
    AtomicCheckpointIO().save_checkpoint(BEFORE, path)
    assert unfinished.exists()  # its process is still running
    process.kill()
    process.wait()
    assert unfinished.stat().st_size > 100_000
    assert torch.equal(stored(path), BEFORE["weights"])
    run_root = path.parents[1] / "runs"
    (run_root / "version_0").mkdir(parents=True)
    path.parent.rename(run_root / "version_0/checkpoints")
    path = run_root / "version_0/checkpoints/last.ckpt"
    os.utime(path.with_name(unfinished.name), (time.time() + 10,) * 2)
    assert find_checkpoint(run_root, "last") == path
    AtomicCheckpointIO().save_checkpoint(AFTER, path)
    assert list(path.parent.iterdir()) == [path]


# Kills a process that saves checkpoints in a loop at a random moment, 20 times. A slow fsync of the unfinished file
# makes most of each save the writing.
KILLED = """
import os, random, signal, stat, sys, time
import torch
from lightning_rl.checkpointing.atomic import AtomicCheckpointIO
from lightning_rl.files import load_plain

path, generator, number, while_writing = sys.argv[1], random.Random(0), 0, 0
fsync = os.fsync

def slow_fsync(descriptor):
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        time.sleep(0.03)
    fsync(descriptor)

for kill in range(20):
    reports, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.fsync = slow_fsync
        while True:
            number += 1
            AtomicCheckpointIO().save_checkpoint({"number": number, "weights": torch.full((50_000,), number)}, path)
            os.write(writer, number.to_bytes(4, "little"))
    os.close(writer)
    saved = os.read(reports, 4)
    time.sleep(generator.uniform(0, 0.15))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while more := os.read(reports, 4):
        saved = more
    os.close(reports)
    while_writing += any(name.startswith(".unfinished-") for name in os.listdir(os.path.dirname(path)))
    found = load_plain(path, "path", "an intact checkpoint")
    assert (found["weights"] == found["number"]).all()
    reported = int.from_bytes(saved, "little")
    assert found["number"] in (reported, reported + 1), (found["number"], reported)
    number = found["number"]
print(number, while_writing)
"""


def test_kill_at_any_moment_leaves_intact_latest_checkpoint(tmp_path):
    done = programs.run("-c", KILLED, str(tmp_path / "checkpoints/last.ckpt"))
    assert done.returncode == 0, done.stderr
    number, while_writing = map(int, done.stdout.split())
    assert number >= 20
    assert while_writing >= 5  # of 20 kills left an unfinished file


def test_fit_uses_atomic_io_unless_trainer_has_a_checkpoint_plugin(tmp_path):
    class Own(TorchCheckpointIO):
        pass

    for plugins, expected in ([], AtomicCheckpointIO), ([Own()], Own):
        data = make_data()
        trainer = make_trainer(plugins=plugins)
        trainer.fit(make_model(data), data)
        assert type(trainer.strategy.checkpoint_io) is expected


# The kernel fails writes beyond this size, as if the disk were full.
LIMITED = (
    "import resource\n"
    "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
    "from lightning_rl.__main__ import run\n"
    "run()\n"
)


def test_command_line_reports_failed_checkpoint_in_one_line(in_tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["lightning-rl"])
    monkeypatch.setenv("LIGHTNING_RL_RUN_DIR", "")
    main(["fit", *SMALL, "--max_env_steps=64"])
    last = Path("runs/ppo/CartPole-v1/version_0/checkpoints/last.ckpt")
    before = last.read_bytes()
    assert len(before) > 20_000
    done = programs.run("-c", LIMITED, "fit", *SMALL, "--max_env_steps=128", "--ckpt_path=last")
    assert done.returncode == 1
    (message,) = [line for line in done.stderr.splitlines() if "error" in line.lower()]
    assert message.startswith("lightning-rl: error: checkpoint '")
    assert "could not be written: File too large; " in message
    assert last.read_bytes() == before
    assert not list(last.parent.glob(".unfinished*"))

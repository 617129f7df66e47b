"""Run folders are numbered, locked, and found by a restart."""

import os
import re

import pytest
import torch

from lightning_rl.checkpointing.format import FORMAT, read_checkpoint
from lightning_rl.checkpointing.run_folders import (
    RunLock,
    find_checkpoint,
    new_run_dir,
    remove_empty,
    run_dir_of,
    run_root,
)
from lightning_rl.files import DamagedFileError
from lightning_rl.validation import ConfigurationError
from tests.helpers import flip_a_bit


@pytest.fixture(autouse=True)
def own_environment(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID", "LIGHTNING_RL_RUN_DIR"):
        monkeypatch.setenv(name, "")  # restores the variable after the test
        monkeypatch.delenv(name)


def write(path, time, **content):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.parent.name == "checkpoints":  # of a run, which has a configuration
        (path.parent.parent / "config.yaml").touch()
    torch.save(content, path)
    os.utime(path, (time, time))
    return path


@pytest.mark.parametrize(
    ("given", "algorithm", "env_id", "expected"),
    [
        (None, "PPO", "CartPole-v1", "runs/ppo/CartPole-v1"),
        (None, "PPO", "ALE/Pong-v5", "runs/ppo/ALE-Pong-v5"),
        (None, "MyPPO", "my_package:My_Env-v0", "runs/myppo/my_package-My_Env-v0"),
        ("elsewhere/a", "PPO", "CartPole-v1", "elsewhere/a"),
    ],
)
def test_run_root_of_a_setting(given, algorithm, env_id, expected):
    assert str(run_root(given, algorithm, env_id)) == expected


def test_new_run_dir_takes_the_highest_number(tmp_path):
    assert [new_run_dir(tmp_path).name for _ in range(3)] == ["version_0", "version_1", "version_2"]
    (tmp_path / "version_1").rmdir()
    assert new_run_dir(tmp_path).name == "version_3"  # the gap is not filled: numbers are in the order of time
    (tmp_path / "version_10").mkdir()
    (tmp_path / "version_old").mkdir()
    assert new_run_dir(tmp_path).name == "version_11"


def test_runs_started_at_the_same_moment_get_separate_folders(tmp_path, monkeypatch):
    new_run_dir(tmp_path)
    monkeypatch.setattr(
        "lightning_rl.checkpointing.run_folders._version", lambda path: -1
    )  # as if the other run did not exist yet
    assert new_run_dir(tmp_path).name == "version_1"


def test_local_ranks_share_the_folder_of_the_first(tmp_path, monkeypatch):
    first = new_run_dir(tmp_path)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert new_run_dir(tmp_path) == first
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert new_run_dir(tmp_path) != first


@pytest.mark.parametrize(
    ("told", "makes_it"),
    [
        ({"RANK": "1", "LOCAL_RANK": "0", "GROUP_RANK": "1"}, False),  # torchrun
        ({"RANK": "0", "LOCAL_RANK": "0", "SLURM_PROCID": "3"}, True),  # torchrun in a SLURM task
        ({"SLURM_PROCID": "1", "SLURM_LOCALID": "0"}, False),
        ({"SLURM_PROCID": "0"}, True),
        ({"NODE_RANK": "1"}, False),  # started by hand on each node
        ({"NODE_RANK": "1", "LOCAL_RANK": "0"}, False),
        ({"NODE_RANK": "0"}, True),
    ],
)
def test_only_first_external_rank_makes_a_folder(tmp_path, monkeypatch, told, makes_it):
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    run_dir = new_run_dir(tmp_path)
    RunLock().acquire(run_dir)  # a late rank guesses a wrong folder
    assert run_dir == tmp_path / "version_0"
    assert [path.name for path in tmp_path.iterdir()] == ["version_0"] * makes_it


def test_last_is_newest_checkpoint(tmp_path):
    assert find_checkpoint(tmp_path, "last") is None
    write(tmp_path / "version_0/checkpoints/last.ckpt", 400)
    last = write(tmp_path / "version_1/checkpoints/last.ckpt", 500)
    write(tmp_path / "elsewhere/last.ckpt", 900)
    write(tmp_path / "version_1/last.ckpt", 900)
    assert find_checkpoint(tmp_path, "last") == last
    newer = write(tmp_path / "version_0/checkpoints/step=30.ckpt", 600)
    assert find_checkpoint(tmp_path, "last") == newer


OURS = {"lightning_rl": {"format": FORMAT, "env_steps": 10}, "optimizer_states": []}


def write_run(folder, time, best="best-step=10.ckpt", monitor="val/episode_return"):
    """The checkpoints of a run whose callback monitors a value; return the best one, which is not the newest."""
    states = {"Last": {"monitor": None, "best_model_path": str(folder / "last.ckpt")}}
    states["Best"] = {"monitor": monitor, "best_model_path": str(folder / best)}
    found = write(folder / best, time, **OURS)
    write(folder / "best-step=20.ckpt", time + 1, **OURS)
    write(folder / "last.ckpt", time + 2, callbacks=states, **OURS)
    return found


def test_best_is_the_best_checkpoint_of_the_callback_of_the_newest_run(tmp_path):
    assert find_checkpoint(tmp_path, "best") is None
    older = write_run(tmp_path / "version_0/checkpoints", 100)
    assert find_checkpoint(tmp_path, "best") == find_checkpoint(tmp_path, "best", resumable=True) == older
    newer = write_run(tmp_path / "version_1/checkpoints", 200, "top-step=10.ckpt")
    assert find_checkpoint(tmp_path, "best") == newer
    (tmp_path / "version_1").rename(tmp_path / "version_2")
    moved = tmp_path / "version_2/checkpoints/top-step=10.ckpt"
    assert find_checkpoint(tmp_path, "best") == moved
    earlier = {"Best": {"monitor": "val/episode_return", "best_model_path": "deleted.ckpt"}}
    write(tmp_path / "version_2/checkpoints/step=5.ckpt", 250, callbacks=earlier, **OURS)  # copied without its time
    assert find_checkpoint(tmp_path, "best") == moved


@pytest.mark.parametrize("name", ["last", "best"])
@pytest.mark.parametrize("when", ["before its time is read", "before it is read"])
def test_checkpoint_that_a_running_process_replaces_while_others_are_found(tmp_path, monkeypatch, name, when):
    write_run(tmp_path / "version_0/checkpoints", 10)
    expected = find_checkpoint(tmp_path, name)
    replaced = tmp_path / "version_0/checkpoints/best-step=5.ckpt"
    if when == "before its time is read":
        replaced.symlink_to("gone")  # `glob` finds a file that has no time
    else:
        write(replaced, 30)

        def read(path, mapped):
            replaced.unlink(missing_ok=True)
            return read_checkpoint(path, mapped)

        monkeypatch.setattr("lightning_rl.checkpointing.run_folders.read_checkpoint", read)
    assert find_checkpoint(tmp_path, name) == expected


def test_there_is_no_best_checkpoint_if_the_newest_run_has_none(tmp_path):
    write_run(tmp_path / "version_0/checkpoints", 100)
    write_run(tmp_path / "version_1/checkpoints", 200, "step=10.ckpt", monitor="step")
    assert find_checkpoint(tmp_path, "best") is None
    best = write_run(tmp_path / "version_2/checkpoints", 300)
    write(best, 300, lightning_rl=OURS["lightning_rl"])  # weights alone
    assert find_checkpoint(tmp_path, "best") == best
    assert find_checkpoint(tmp_path, "best", resumable=True) is None
    best.unlink()
    assert find_checkpoint(tmp_path, "best") is None
    write(tmp_path / "version_3/checkpoints/weights.ckpt", 400, lightning_rl=OURS["lightning_rl"])
    assert find_checkpoint(tmp_path, "best") is None


def test_weights_only_checkpoints_are_skipped_when_resuming(tmp_path):
    ours = {"lightning_rl": {"format": FORMAT, "env_steps": 10}}
    whole = write(tmp_path / "version_0/checkpoints/last.ckpt", 100, optimizer_states=[], **ours)
    weights = write(tmp_path / "version_0/checkpoints/weights.ckpt", 200, **ours)
    assert find_checkpoint(tmp_path, "last") == weights
    assert find_checkpoint(tmp_path, "last", resumable=True) == whole
    foreign = write(tmp_path / "version_0/checkpoints/foreign.ckpt", 300)
    assert find_checkpoint(tmp_path, "last", resumable=True) == foreign


def test_last_falls_back_to_newest_intact_checkpoint_with_warning(tmp_path):
    ours = {"lightning_rl": {"format": FORMAT, "env_steps": 10}, "optimizer_states": []}
    write(tmp_path / "version_1/checkpoints/last.ckpt", 500, **ours)
    older, newer, half, last = (
        write(tmp_path / f"version_0/checkpoints/{name}.ckpt", 100 * time, **ours)
        for time, name in enumerate(("step=1", "step=2", "step=3", "last"), 6)
    )
    half.write_bytes(half.read_bytes()[:-100])
    os.utime(half, (800, 800))
    flip_a_bit(last, "data.pkl")
    for resumable in (False, True):
        with pytest.warns(UserWarning) as warned:
            assert find_checkpoint(tmp_path, "last", resumable) == newer
        for damaged, warning in zip((last, half), warned, strict=True):
            assert re.match(
                rf"ckpt_path='{damaged}' is damaged .*; using '{newer}' instead, the last intact checkpoint of the "
                "run",
                str(warning.message),
            )
    for path in (older, newer):
        flip_a_bit(path, "data.pkl")
    with pytest.raises(DamagedFileError, match=rf"ckpt_path='{last}' is damaged .*: expected an intact checkpoint"):
        find_checkpoint(tmp_path, "last")  # the checkpoint of another run is not used


@pytest.mark.parametrize("kind", ["damaged", "of another program"])
def test_unreadable_file_from_before_the_last_checkpoint_is_no_obstacle(kind, tmp_path, recwarn):
    folder = tmp_path / "version_0/checkpoints"
    best = write_run(folder, 100)
    other = write(folder / "step=5.ckpt", 50)
    if kind == "damaged":
        other.write_bytes(other.read_bytes()[:-100])
        os.utime(other, (50, 50))
    assert find_checkpoint(tmp_path, "last") == folder / "last.ckpt"
    assert find_checkpoint(tmp_path, "best") == best
    assert run_dir_of(folder / "last.ckpt", 10) == tmp_path / "version_0"
    assert not recwarn.list


def test_damaged_best_checkpoint_raises(tmp_path):
    best = flip_a_bit(write_run(tmp_path / "version_0/checkpoints", 100), "data.pkl")
    with pytest.raises(DamagedFileError, match=f"ckpt_path='{best}' is damaged"):
        find_checkpoint(tmp_path, "best")


def test_a_copied_run_with_other_times_resumes_from_its_last_step(tmp_path):
    folder = tmp_path / "version_0/checkpoints"
    best = write(folder / "best-step=10.ckpt", 200, **OURS)
    last = write(folder / "last.ckpt", 100, **OURS | {"lightning_rl": {"format": FORMAT, "env_steps": 50}})
    assert find_checkpoint(tmp_path, "last") == find_checkpoint(tmp_path, "last", resumable=True) == last
    assert run_dir_of(last, 50) == tmp_path / "version_0"
    assert run_dir_of(best, 10) is None  # resuming there would overwrite the last checkpoint
    flip_a_bit(last, "data.pkl")
    assert find_checkpoint(tmp_path, "last") == best


def test_a_copied_run_with_a_damaged_last_checkpoint_resumes_from_the_one_before(tmp_path):
    folder = tmp_path / "version_0/checkpoints"
    write(folder / "step=10.ckpt", 300, **OURS)
    before = write(folder / "step=40.ckpt", 200, **OURS | {"lightning_rl": {"format": FORMAT, "env_steps": 40}})
    last = write(
        folder / "last.ckpt", 100, **OURS | {"lightning_rl": {"format": FORMAT, "env_steps": 50}}, x=torch.ones(9)
    )
    flip_a_bit(last, "data/0")
    with pytest.warns(UserWarning, match="last.ckpt' is damaged"):
        assert find_checkpoint(tmp_path, "last") == before


def test_name_decides_between_checkpoints_of_equal_time(tmp_path):
    last = write(tmp_path / "version_0/checkpoints/last.ckpt", 100)
    write(tmp_path / "version_0/checkpoints/step=30.ckpt", 100)
    assert find_checkpoint(tmp_path, "last") == last


def test_resumed_run_keeps_its_folder_unless_later_checkpoint_exists(tmp_path):
    folder = tmp_path / "version_0/checkpoints"
    best = write(folder / "best.ckpt", 100, lightning_rl={"format": FORMAT, "env_steps": 10})
    last = write(folder / "last.ckpt", 200, lightning_rl={"format": FORMAT, "env_steps": 50})
    assert run_dir_of(last, 50) == tmp_path / "version_0"
    assert run_dir_of(best, 10) is None
    write(
        folder / "best.ckpt", 100, lightning_rl={"format": FORMAT, "env_steps": 50}
    )  # the same environment steps as the last checkpoint
    assert run_dir_of(best, 50) == tmp_path / "version_0"
    assert run_dir_of(write(tmp_path / "my.ckpt", 100), 10) is None


def test_checkpoint_beside_a_log_without_a_configuration_is_in_no_run(tmp_path):
    last = write(tmp_path / "version_0/checkpoints/last.ckpt", 100, lightning_rl={"format": FORMAT, "env_steps": 50})
    assert run_dir_of(last, 50) == tmp_path / "version_0"
    (tmp_path / "version_0/config.yaml").unlink()
    assert run_dir_of(last, 50) is None


def test_older_checkpoint_beside_damaged_newer_one_starts_new_folder(tmp_path):
    folder = tmp_path / "version_0/checkpoints"
    older = write(folder / "step=10.ckpt", 100, lightning_rl={"format": FORMAT, "env_steps": 10})
    (folder / "last.ckpt").write_bytes(b"half a file")
    assert run_dir_of(older, 10) is None
    last = write(folder / "last.ckpt", 200, lightning_rl={"format": FORMAT, "env_steps": 5})
    assert run_dir_of(older, 10) == tmp_path / "version_0"
    flip_a_bit(last, "data.pkl")
    assert run_dir_of(older, 10) is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist: expected a checkpoint of lightning_rl, 'last' or 'best'"),
        (b"", "is damaged or another kind of file"),
        (b"junk", "is damaged or another kind of file"),
        ({"state_dict": {}}, "was not written by lightning_rl"),
        ([1, 2], "was not written by lightning_rl"),
    ],
)
def test_other_files_are_rejected_by_name(tmp_path, content, message):
    path = tmp_path / "x.ckpt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    with pytest.raises(ConfigurationError, match=f"ckpt_path='{path}' {message}"):
        read_checkpoint(path)


def test_remove_empty_removes_only_empty_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given, other = tmp_path / "given", run_root(None, "A2C", "CartPole-v1")
    first, second = new_run_dir(run_root(None, "PPO", "CartPole-v1")), new_run_dir(run_root(None, "PPO", "Taxi-v3"))
    begun = write(new_run_dir(other) / "config.yaml", 0)
    for run_dir in (first, new_run_dir(given), begun.parent):
        remove_empty(run_dir)
    assert not first.parent.exists() and second.is_dir() and begun.is_file()
    assert list(given.iterdir()) == []

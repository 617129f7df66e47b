"""The queue of long runs: its order, its digest, pauses, and runs that are killed and continued."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
import yaml

from lightning_rl.tools.trained import shipped_configs
from tests.checkpointing.test_resume import differences, run_state
from tests.programs import Program

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"
sys.path.append(str(BENCHMARKS))

import computation  # noqa: E402
import kept_run  # noqa: E402
import reproduce  # noqa: E402
import reproduce_all  # noqa: E402
import run_files  # noqa: E402
import training_queue  # noqa: E402
from training_queue import Row  # noqa: E402

TINY = {
    "seed_everything": 0,
    "num_threads": 1,
    "data": {
        "env_id": "CartPole-v1",
        "num_envs": 2,
        "rollout_length": 16,
        "rollouts_per_epoch": 20,
        "evaluation": {"episodes": 1},
    },
    "model": {
        "class_path": "PPO",
        "init_args": {
            "num_epochs": 2,
            "num_minibatches": 2,
            "optimizer": {"anneal": True},
            "normalization": {"rewards": True},
        },
    },
    "trainer": {"accelerator": "cpu"},
}


@pytest.fixture
def in_folder(tmp_path, monkeypatch):
    """A queue of short runs, in folders of the test."""
    monkeypatch.setattr(training_queue, "CONFIGS", tmp_path / "configs")
    monkeypatch.setattr(training_queue, "PLAN", tmp_path / "queue.json")
    (tmp_path / "configs" / "ppo").mkdir(parents=True)
    return tmp_path


def plan(folder: Path, seeds: int, max_env_steps: int) -> None:
    (folder / "configs/ppo/tiny.yaml").write_text(yaml.safe_dump(TINY | {"max_env_steps": max_env_steps}))
    group = {"seeds": seeds, "configurations": ["ppo/tiny"]}
    (folder / "queue.json").write_text(json.dumps({"groups": [group]}))


def start(folder: Path, workers: int = 1) -> Program:
    """Start the queue with workers of the usual priority, since the tests wait for them.

    They are forked from it: it has what they need but this package, whose import takes them less than a second.
    """
    code = f"""
import os, subprocess, sys
sys.path.insert(0, {str(BENCHMARKS)!r})
from pathlib import Path
from types import SimpleNamespace
import reproduce_all, training_queue
from tests.programs import Fork
assert "lightning_rl" not in sys.modules
training_queue.subprocess = SimpleNamespace(**vars(subprocess) | {{"Popen": Fork}})
os.nice, os.sched_setscheduler, training_queue.AUTOGROUP = lambda n: n, lambda *_: None, Path(os.devnull)
training_queue.CONFIGS, training_queue.PLAN = Path("configs").resolve(), Path("queue.json")
sys.exit(reproduce_all.main(["--queue", "--workers", "{workers}", "--root", "root", "--out", "results"]))
"""
    return Program("-c", code, cwd=folder, join=True)


def ask(folder: Path, *options: str) -> None:
    assert reproduce_all.main(["--root", str(folder / "root"), "--out", str(folder / "results"), *options]) == 0


def workers(folder: Path) -> dict[str, int]:
    return run_files.read_json(folder / "root/workers.json") or {}


def env_steps(folder: Path, row: str = "ppo/tiny/seed0") -> int:
    return (run_files.read_json(folder / "root" / row / "progress.json") or {"env_steps": 0})["env_steps"]


def wait_until(condition, program: Program | None = None, seconds: float = 200) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        assert program is None or program.poll() is None, program.communicate()[0]
        time.sleep(0.02)


def state(pid: int) -> str:
    """State of a process: T if it is stopped; empty if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def test_the_queue_goes_group_by_group_and_seed_by_seed(in_folder):
    groups = [{"seeds": 2, "configurations": ["ppo/a", "ppo/b"]}, {"seeds": 1, "configurations": ["ppg/c"]}]
    (in_folder / "queue.json").write_text(json.dumps({"groups": groups}))
    order = [("ppo/a", 0), ("ppo/b", 0), ("ppo/a", 1), ("ppo/b", 1), ("ppg/c", 0)]
    assert training_queue.plan() == [Row(*row) for row in order]


def test_the_queue_holds_shipped_configurations_once():
    rows = training_queue.plan()
    assert {row.configuration for row in rows} <= shipped_configs().keys()
    assert len(set(rows)) == len(rows) >= 80


def test_workers_take_the_first_rows_without_a_result(in_folder, monkeypatch):
    plan(in_folder, seeds=5, max_env_steps=64)
    root, results = in_folder / "root", in_folder / "results"
    (results / "ppo/tiny").mkdir(parents=True)
    (results / "ppo/tiny/seed0.json").write_text("{}")
    root.mkdir()
    monkeypatch.setattr(training_queue.subprocess, "Popen", lambda *args, **more: type("Started", (), {"pid": 1}))
    queue = training_queue.Queue(root, results, 2)
    queue.set_aside.add(Row("ppo/tiny", 1))
    queue._start_workers()
    queue._start_workers()
    assert [worker.row.seed for worker in queue.workers] == [2, 3]


def test_workers_have_the_lowest_priority():
    code = f"""
import os, sys
sys.path.insert(0, {str(BENCHMARKS)!r})
import training_queue
if os.getsid(0) != os.getpid():
    os.setsid()
training_queue.lower_priority()
print(os.nice(0), os.sched_getscheduler(0) == os.SCHED_IDLE)
print(training_queue.AUTOGROUP.read_text().split()[-1] if training_queue.AUTOGROUP.exists() else 19)
"""
    assert Program("-c", code).communicate()[0] == "19 True\n19\n"


@pytest.fixture(scope="module")
def digest():
    """The digest of the package, and of each copy."""
    return computation.digest()


@pytest.fixture
def package(tmp_path):
    """A copy of the package."""
    return Path(shutil.copytree(ROOT / "lightning_rl", tmp_path / "package"))


def replace(path: Path, before: str, after: str) -> None:
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after, 1))


def test_comments_docstrings_and_moved_files_do_not_change_the_digest(package, digest):
    returns = package / "functional/returns.py"
    text = returns.read_text().replace("from __future__ import annotations", "from __future__ import annotations # yes")
    text = text.replace('"""', '"""Changed: ', 1)
    (package / "functional/other_name.py").write_text(text)
    returns.unlink()
    folded = package / "nested.py"  # a module that is folded into another one
    with (package / "spaces.py").open("a") as file:
        file.write("\n\n" + folded.read_text().replace("from __future__ import annotations", ""))
    folded.unlink()
    with (package / "cli.py").open("a") as file:
        file.write("\nCOLOR = 'blue'\n")
    assert computation.digest(package) == digest


@pytest.mark.parametrize(
    ("module", "line", "other"),
    [
        ("algorithms/base.py", "learning_rate: Scheduled = 3e-4", "learning_rate: Scheduled = 2e-4"),
        ("policies/normalization.py", "weight = count / new_count", "weight = 2 * count / new_count"),
    ],
)
def test_a_changed_constant_changes_the_digest(package, digest, module, line, other):
    replace(package / module, line, other)
    assert computation.digest(package) != digest


def test_a_run_begins_again_when_its_numbers_would_change(tmp_path, monkeypatch):
    config, folder = tmp_path / "tiny.yaml", tmp_path / "run"
    config.write_text("# one\nmax_env_steps: 1000\n")
    monkeypatch.setattr(kept_run, "digest", lambda: "code")

    def keeps() -> bool:
        (folder / "last.ckpt").touch()
        kept_run.claim(folder, config, [])
        return (folder / "last.ckpt").is_file()

    kept_run.claim(folder, config, [])
    assert keeps()
    config.write_text("# two\nmax_env_steps: 1_000\n")
    assert keeps()
    config.write_text("max_env_steps: 2000\n")
    assert not keeps()
    monkeypatch.setattr(kept_run, "digest", lambda: "other code")
    assert not keeps()
    monkeypatch.setattr(kept_run, "versions", lambda: {"torch": "1.0"})
    assert not keeps()
    assert keeps()


def test_a_folder_with_the_run_of_another_seed_is_refused(tmp_path, monkeypatch):
    config, folder = tmp_path / "tiny.yaml", tmp_path / "run"
    config.write_text("max_env_steps: 1000\n")
    monkeypatch.setattr(kept_run, "digest", lambda: "code")
    kept_run.claim(folder, config, [], seed=1)
    (folder / "last.ckpt").touch()
    with pytest.raises(ValueError, match="has the run of seed 1: expected another one for seed 2"):
        kept_run.claim(folder, config, [], seed=2)
    kept_run.claim(folder, config, [], seed=1)
    assert (folder / "last.ckpt").is_file()
    identity = run_files.read_json(folder / "identity.json")
    del identity["seed"]  # of an earlier version
    run_files.replace_json(folder / "identity.json", identity)
    kept_run.claim(folder, config, [], seed=1)
    assert (folder / "last.ckpt").is_file()


def test_a_folder_with_other_files_is_refused_and_keeps_them(tmp_path, monkeypatch):
    config = tmp_path / "tiny.yaml"
    config.write_text("max_env_steps: 1000\n")
    monkeypatch.setattr(kept_run, "digest", lambda: "code")
    with pytest.raises(ValueError, match="expected a new or an empty folder"):
        kept_run.claim(tmp_path, config, [])
    assert config.is_file()
    paused = tmp_path / "paused"  # the queue paused the run before it began
    paused.mkdir()
    run_files.append_event(paused, "pause")
    kept_run.claim(paused, config, [])


def test_all_workers_stop_and_continue_within_a_second(in_folder, capsys):
    plan(in_folder, seeds=2, max_env_steps=10_000_000)
    ask(in_folder, "--pause")  # before there is a queue
    assert capsys.readouterr().out == "paused; no queue is running\n"
    queue, rows = start(in_folder, workers=2), ("ppo/tiny/seed0", "ppo/tiny/seed1")
    root = in_folder / "root"
    wait_until(lambda: training_queue.is_running(root), queue)
    ask(in_folder, "--resume")
    wait_until(lambda: all(env_steps(in_folder, row) > 0 for row in rows), queue)
    pids = list(workers(in_folder).values())
    assert len(pids) == 2

    begin = time.monotonic()
    ask(in_folder, "--pause")
    wait_until(lambda: [state(pid) for pid in pids] == ["T", "T"])
    assert time.monotonic() - begin < 1
    assert capsys.readouterr().out == "paused, 2 workers stopped\n"
    ask(in_folder, "--status")
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:2] == ["ppo/tiny/seed0", "running"]
    assert lines[-1] == "0 of 2 done; 2 workers, paused"

    begin = time.monotonic()
    ask(in_folder, "--resume")
    wait_until(lambda: "T" not in [state(pid) for pid in pids])
    assert time.monotonic() - begin < 1
    assert [event["event"] for event in run_files.history(root / rows[0])] == ["start", "pause", "resume"]

    with pytest.raises(SystemExit), training_queue.only_queue(root) as free:
        assert not free
        raise SystemExit
    os.kill(queue.pid, signal.SIGKILL)  # the workers die with the queue
    queue.wait()
    wait_until(lambda: not any(map(state, pids)), seconds=10)
    ask(in_folder, "--status")
    assert capsys.readouterr().out.splitlines()[1].split()[1] == "waiting"


@pytest.mark.filterwarnings("ignore:LightningCLI's args parameter")
def test_a_queue_that_is_killed_and_started_again_gives_the_result_of_an_uninterrupted_run(in_folder, capsys):
    plan(in_folder, seeds=1, max_env_steps=3_200)
    folder = in_folder / "root/ppo/tiny/seed0"
    queue = start(in_folder)
    wait_until(lambda: list(folder.glob("version_0/checkpoints/last.ckpt")), queue)
    [worker] = workers(in_folder).values()
    os.kill(worker, signal.SIGKILL)  # which the queue starts again
    wait_until(lambda: len(run_files.history(folder)) == 3, queue)
    os.kill(queue.pid, signal.SIGKILL)
    queue.wait()
    queue = start(in_folder)
    assert queue.wait() == 0, queue.communicate()[0]

    config = in_folder / "configs/ppo/tiny.yaml"
    whole = reproduce.reproduce(config, 0, in_folder / "whole", [], folder=in_folder / "whole_run")
    killed, expected = (json.loads(path.read_text()) for path in (in_folder / "results/ppo/tiny/seed0.json", whole))
    assert [event["event"] for event in killed["history"]] == ["start", "end", "start", "start"]
    assert [killed["interruptions"], expected["interruptions"]] == [2, 0]
    assert all(event["commit"] for event in killed["history"] if event["event"] == "start")
    assert killed["history"][1]["status"] == -signal.SIGKILL
    for name in ("env_steps", "curve", "evaluation", "settings"):
        assert killed[name] == expected[name], name
    ends = [run_state(path / "final.ckpt") for path in (folder, in_folder / "whole_run")]
    assert differences(*ends) == []
    capsys.readouterr()
    ask(in_folder, "--status")
    assert capsys.readouterr().out.splitlines()[1].split() == ["ppo/tiny/seed0", "done", "3,200", "3,200", "2"]

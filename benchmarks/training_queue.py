"""Train the missing rows of `queue.json` in the background; any process can be killed at any moment.

    python benchmarks/reproduce_all.py --queue              train, with one worker on each core
    python benchmarks/reproduce_all.py --queue --status     what is done, runs and waits
    python benchmarks/reproduce_all.py --queue --pause      stop all workers within a second, for timings
    python benchmarks/reproduce_all.py --queue --resume     continue them

A row is a configuration and a seed. `queue.json` lists the rows by priority: groups in their order, within a group
seed by seed. A worker is `reproduce.py --folder` with one thread and the lowest CPU priority: it saves the run every
minute, continues it with `--ckpt_path last`, evaluates the final policy and writes the usual result.

Everything is in plain files under `--root`. Workers die with the queue. The next `--queue` continues where the last
checkpoints are, and begins a row again if the code that computes, its configuration or a version has changed. A pause
is the file `paused`: it outlives the queue, and a new queue waits until `--resume` removes it.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from run_files import append_event, history, interruptions, read_json, replace_json

HERE = Path(__file__).resolve().parent
PLAN = HERE / "queue.json"
CONFIGS = HERE.parent / "configs"
DEFAULT_ROOT = Path("~/.cache/lightning-rl-queue")
POLL_SECONDS = 0.1
STOP_SECONDS = 60.0
"""How long a worker has to save and leave when the queue is stopped."""
ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
_PR_SET_PDEATHSIG = 1
AUTOGROUP = Path("/proc/self/autogroup")
"""Priority of a session: Linux compares the priorities of processes only within a session."""


@dataclass(frozen=True)
class Row:
    """One run of the queue: a configuration, `<algorithm>/<name>`, and a seed."""

    configuration: str
    seed: int

    @property
    def name(self) -> str:
        """Name of the row, its folder and its result."""
        return f"{self.configuration}/seed{self.seed}"

    @property
    def config(self) -> Path:
        """The file of the configuration."""
        return CONFIGS / f"{self.configuration}.yaml"

    def is_done(self, results: Path) -> bool:
        """Return whether the result exists."""
        return (results / f"{self.name}.json").is_file()

    def failed(self, root: Path) -> bool:
        """Return whether the last worker ended with an error, not by a signal."""
        events = history(root / self.name)
        return bool(events) and events[-1]["event"] == "end" and events[-1]["status"] in range(1, 128)


def plan() -> list[Row]:
    """Return all rows, by priority."""
    groups = json.loads(PLAN.read_text())["groups"]
    return [
        Row(configuration, seed)
        for group in groups
        for seed in range(group["seeds"])
        for configuration in group["configurations"]
    ]


def lower_priority() -> None:
    """Give this process the lowest CPU priority; on Linux, end it with its parent process."""
    os.nice(19)
    if sys.platform == "linux":
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        with contextlib.suppress(OSError):
            AUTOGROUP.write_text("19")
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Worker:
    """The process that trains a row.

    Args:
        row: The row.
        root: Folder of the queue.
        results: Folder of the results.
    """

    def __init__(self, row: Row, root: Path, results: Path) -> None:
        self.row, self.folder = row, root / row.name
        self.folder.mkdir(parents=True, exist_ok=True)
        self.output = self.folder.with_suffix(".txt")
        command = [sys.executable, str(HERE / "reproduce.py"), str(row.config), "--seed", str(row.seed)]
        paths = [str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        with self.output.open("a") as output:
            self.process = subprocess.Popen(
                [*command, "--out", str(results), "--folder", str(self.folder)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | ONE_THREAD | {"PYTHONPATH": os.pathsep.join(paths)},
                preexec_fn=lower_priority,
                start_new_session=True,
            )

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process and its child processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def ended(self) -> bool:
        """Return whether the process has ended, and record its end."""
        if self.process.poll() is None:
            return False
        append_event(self.folder, "end", status=self.process.returncode)
        return True


class Queue:
    """Runs up to `workers` processes for the rows without a result.

    Args:
        root: Folder of the queue.
        results: Folder of the results.
        workers: Number of processes.
    """

    def __init__(self, root: Path, results: Path, workers: int) -> None:
        self.root, self.results, self.num_workers = root, results, workers
        self.workers: list[Worker] = []
        self.set_aside: set[Row] = set()
        self.paused = self.stopping = False

    def run(self) -> int:
        """Work until every row is done or has failed, or a signal stops the queue; return 1 if rows failed."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._stop)
        while True:
            self._obey_pause()
            self._take_back()
            if not (self.paused or self.stopping):
                self._start_workers()
            if self.stopping or not (self.workers or self.paused):
                break
            time.sleep(POLL_SECONDS)
        self._end_workers()
        return int(bool(self.set_aside))

    def _stop(self, *_: object) -> None:
        self.stopping = True

    def _obey_pause(self) -> None:
        """Stop or continue all workers when the file `paused` appears or disappears; write their number to it."""
        asked = paused_file(self.root).exists()
        if asked == self.paused:
            return
        self.paused = asked
        for worker in self.workers:
            worker.signal(signal.SIGSTOP if asked else signal.SIGCONT)
            append_event(worker.folder, "pause" if asked else "resume")
        if asked:
            with contextlib.suppress(FileNotFoundError), paused_file(self.root).open("r+") as file:
                file.truncate()
                file.write(str(len(self.workers)))  # "r+" fails if `--resume` has removed the file in between

    def _take_back(self) -> None:
        """Remove ended workers; do not repeat rows that failed."""
        for worker in [worker for worker in self.workers if worker.ended()]:
            self.workers.remove(worker)
            status = worker.process.returncode
            say(f"{worker.row.name}: {'done' if status == 0 else f'ended with status {status}'}")
            if worker.row.failed(self.root) or (status == 0 and not worker.row.is_done(self.results)):
                self.set_aside.add(worker.row)
                say(f"{worker.row.name}: not tried again by this queue, see {worker.output}")
            self._write_workers()

    def _start_workers(self) -> None:
        if len(self.workers) == self.num_workers:
            return
        running = {worker.row for worker in self.workers} | self.set_aside
        waiting = [row for row in plan() if row not in running and not row.is_done(self.results)]
        for row in waiting[: self.num_workers - len(self.workers)]:
            self.workers.append(Worker(row, self.root, self.results))
            say(f"{row.name}: started")
            self._write_workers()

    def _write_workers(self) -> None:
        replace_json(self.root / "workers.json", {worker.row.name: worker.process.pid for worker in self.workers})

    def _end_workers(self) -> None:
        """Let all workers save and end between two rollouts; kill workers that take too long."""
        for worker in self.workers:
            worker.signal(signal.SIGTERM)
            worker.signal(signal.SIGCONT)
        deadline = time.monotonic() + STOP_SECONDS
        for worker in self.workers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(max(0.0, deadline - time.monotonic()))
            worker.signal(signal.SIGKILL)
            worker.process.wait()
            worker.ended()


def say(line: str) -> None:
    """Print a line with the time."""
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}", flush=True)


def paused_file(root: Path) -> Path:
    """Return the file whose existence pauses the queue."""
    return root / "paused"


@contextlib.contextmanager
def only_queue(root: Path, attempts: int = 1) -> Iterator[bool]:
    """Hold the lock of a root until the process ends; yield False if another process holds it."""
    with (root / "lock").open("a") as file:
        for _ in range(attempts):
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield True
                return
            time.sleep(POLL_SECONDS)
        yield False


def is_running(root: Path) -> bool:
    """Return whether a queue runs in this root."""
    with only_queue(root) as free:
        return not free


def pause(root: Path) -> None:
    """Stop all workers, and return when they are stopped."""
    paused_file(root).touch()
    stopped, deadline = "", time.monotonic() + 10
    while is_running(root) and not (stopped := _read(paused_file(root))):
        if time.monotonic() > deadline:
            raise TimeoutError(f"root={str(root)!r}: the queue did not stop its workers within 10 s")
        time.sleep(0.02)
    print(f"paused, {stopped} workers stopped" if stopped else "paused; no queue is running")


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""


def status(root: Path, results: Path) -> None:
    """Print a table of all rows, and the number of finished ones."""
    running = (read_json(root / "workers.json") or {}) if is_running(root) else {}
    rows = [_status_row(row, root, results, row.name in running) for row in plan()]
    head = ["row", "state", "env steps", "of", "steps/s", "time left", "interruptions"]
    widths = [max(len(cells[column]) for cells in [head, *rows]) for column in range(len(head))]
    for cells in [head, *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip())
    paused = ", paused" if paused_file(root).exists() else ""
    done = sum(cells[1] == "done" for cells in rows)
    print(f"{done} of {len(rows)} done; {len(running)} workers{paused}")


def _status_row(row: Row, root: Path, results: Path, runs: bool) -> list[str]:
    folder = root / row.name
    total = int(yaml.safe_load(row.config.read_text())["max_env_steps"])
    progress: dict[str, Any] = read_json(folder / "progress.json") or {"env_steps": 0, "steps_per_second": 0.0}
    steps, rate = progress["env_steps"], progress["steps_per_second"] if runs else 0.0
    if row.is_done(results):
        found = json.loads((results / f"{row.name}.json").read_text())
        return [row.name, "done", f"{found['env_steps']:,}", f"{total:,}", "", "", str(found.get("interruptions", 0))]
    state = "failed" if row.failed(root) else "waiting"
    if runs:
        state = "running" if steps < total else "evaluating"
    left = max(0, total - steps) / rate if rate else None
    clock = "" if left is None else f"{left // 3600:.0f}:{left // 60 % 60:02.0f} h"
    interrupted = str(interruptions(history(folder)))
    return [row.name, state, f"{steps:,}", f"{total:,}", f"{rate:,.0f}" if rate else "", clock, interrupted]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the queue."""
    group = parser.add_argument_group("queue of long runs, see training_queue.py")
    group.add_argument("--queue", action="store_true", help="train the missing rows of queue.json, interruptible")
    group.add_argument("--workers", type=int, default=os.cpu_count(), help="processes of the queue; default: all cores")
    group.add_argument("--root", type=Path, default=DEFAULT_ROOT, help=f"folder of the queue; default: {DEFAULT_ROOT}")
    what = group.add_mutually_exclusive_group()
    what.add_argument("--status", action="store_true", help="print finished, running and waiting rows")
    what.add_argument("--pause", action="store_true", help="stop all workers within a second")
    what.add_argument("--resume", action="store_true", help="continue them")


def main(args: argparse.Namespace, results: Path) -> int:
    """Run the command that the options select; return the exit status."""
    root = args.root.expanduser().resolve()
    root.mkdir(parents=True, exist_ok=True)
    if args.status:
        status(root, results)
    elif args.pause:
        pause(root)
    elif args.resume:
        paused_file(root).unlink(missing_ok=True)
    else:
        with only_queue(root, attempts=5) as free:  # `--status` holds the lock for a moment
            if not free:
                print(f"root={str(root)!r}: another queue works there; expected one at a time", file=sys.stderr)
                return 1
            return Queue(root, results.resolve(), args.workers).run()
    return 0

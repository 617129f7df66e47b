"""Functions that all throughput drivers share: workloads, clock, and the JSON line at the end.

Needs only the standard library. Import this module first, so that `import_s` includes every import and the number of
threads is set in time. It is independent of the measured packages.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

THREADS = int(os.environ.get("OMP_NUM_THREADS", "1"))
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[_name] = str(THREADS)
os.environ.setdefault("SDL_VIDEODRIVER", "dummy")

WORKLOADS: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "workloads.json").read_text())
WARM_UP = 2
"""Rollouts, with their updates, before the clock starts."""
EPISODE_RETURNS: list[float] = []
"""Raw returns of the training episodes that finished in this process."""
REACHED_OVER = 20
"""Number of last episodes whose mean return counts as reached."""


def process_start() -> float:
    """Return the start time of this process, in seconds since the epoch; approximately now if it is unknown."""
    now = time.time()
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age = float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return now
    return now - age


def cpu_time_with_children() -> float:
    """Return the CPU seconds of this process and of all its `multiprocessing` children, running or ended.

    Raises:
        OSError: The system does not report the time of running processes (Linux does).
    """
    living = multiprocessing.active_children()  # joins ended children, whose time is then in `os.times`
    ticks = 0
    for process in living:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    times = os.times()
    ended = times.children_user + times.children_system
    return time.process_time() + ended + ticks / os.sysconf("SC_CLK_TCK")


class Clock:
    """Wall and CPU time from the end of the second rollout and its update to the end of the last.

    CPU time covers all threads of this process. Other load on the machine affects it much less than wall time.

    Args:
        with_children: Include the processes that this one starts by `multiprocessing`, such as actors.
    """

    def __init__(self, with_children: bool = False) -> None:
        self.with_children = with_children
        self.started = process_start()
        self.imported_at, self.imported_cpu = self.started, 0.0
        self.marks: list[tuple[int, float, float]] = []
        self.episodes: list[int] = []

    def imported(self) -> None:
        """Call once all imports are done."""
        self.imported_at, self.imported_cpu = time.time(), time.process_time()

    def tick(self, env_steps: int) -> None:
        """Call after the update from a rollout, with the number of environment steps so far."""
        cpu = cpu_time_with_children() if self.with_children else time.process_time()
        self.marks.append((env_steps, time.time(), cpu))
        self.episodes.append(len(EPISODE_RETURNS))

    def reached(self, episode_return: float) -> dict[str, float] | None:
        """Return the cost of a mean return over the last episodes, from the end of the imports; None if not reached.

        The cost includes making environments and networks, and compiling. Returns are checked at the end of each
        rollout.
        """
        for (env_steps, wall, cpu), count in zip(self.marks, self.episodes, strict=True):
            last = EPISODE_RETURNS[max(0, count - REACHED_OVER) : count]
            if len(last) == REACHED_OVER and sum(last) >= REACHED_OVER * episode_return:
                seconds = {"cpu_seconds": cpu - self.imported_cpu, "seconds": wall - self.imported_at}
                return {"env_steps": env_steps} | {name: round(value, 2) for name, value in seconds.items()}
        return None

    def interval(self) -> tuple[int, float, float]:
        """Return environment steps, wall seconds and CPU seconds of the timed part.

        Raises:
            ValueError: The run had too few rollouts.
        """
        if len(self.marks) <= WARM_UP:
            raise ValueError(f"{len(self.marks)} rollouts are too few: expected more than {WARM_UP}")
        (steps, wall, cpu), (first_steps, first_wall, first_cpu) = self.marks[-1], self.marks[WARM_UP - 1]
        return steps - first_steps, wall - first_wall, cpu - first_cpu

    def quiet_rate(self, rollouts: int = 1) -> float:
        """Return environment steps per second of CPU time in the fastest quarter of the timed rollouts.

        Other programs slow down everything for seconds at a time; this rate excludes such times.

        Args:
            rollouts: Number of consecutive rollouts to measure together, if the work after them differs.
        """
        marks = self.marks[WARM_UP - 1 :: rollouts]
        rates = sorted(
            (
                (steps - before) / (cpu - cpu_before)
                for (before, _, cpu_before), (steps, _, cpu) in itertools.pairwise(marks)
            ),
            reverse=True,
        )
        return rates[len(rates) // 4] if rates else 0.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of every driver."""
    parser.add_argument("workload", choices=sorted(WORKLOADS))
    parser.add_argument("--steps", type=int, help="environment steps, rounded down to whole rollouts")
    parser.add_argument("--seed", type=int, default=1)


def workload(args: argparse.Namespace) -> dict[str, Any]:
    """Return the workload with its derived sizes: `rows` of a rollout and of a `minibatch`, and `rollouts`."""
    chosen = dict(WORKLOADS[args.workload])
    chosen["rows"] = chosen["num_envs"] * chosen["num_steps"]
    chosen["minibatch"] = chosen["rows"] // chosen["minibatches"]
    chosen["rollouts"] = max(WARM_UP + 1, (args.steps or chosen["steps"]) // chosen["rows"])
    return chosen


class Run:
    """One run of a peer's driver.

    Attributes:
        args: Arguments of the command line.
        workload: The chosen workload.
        clock: Clock of the run.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.workload = workload(args)
        self.clock = Clock(with_children="actors" in self.workload)
        self._steps = 0

    def imported(self) -> None:
        """Call once all imports are done; sets the number of PyTorch's threads to `THREADS`, if it is imported."""
        self.clock.imported()
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(THREADS)

    def tick(self) -> None:
        """Call after the update from each rollout of the workload's size."""
        self._steps += self.workload["rows"]
        self.clock.tick(self._steps)

    def report(self, peer: str, version: str, episode_returns: list[float], note: str = "") -> None:
        """Print the result as one line of JSON, the last of the output."""
        report(peer, version, self.args, self.clock, episode_returns, note=note)


def begin(*, images: bool = True) -> Run:
    """Parse the command line of a peer's driver and hide GPUs from the peer; call it before any large import.

    Args:
        images: Whether the driver supports workloads with images.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # throughput is measured on the CPU
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args()
    if not (images or WORKLOADS[args.workload]["hidden"]):
        parser.error(f"workload={args.workload!r}: expected one whose observations are vectors")
    return Run(args)


def report(
    peer: str,
    version: str,
    args: argparse.Namespace,
    clock: Clock,
    episode_returns: list[float],
    variant: str = "",
    note: str = "",
) -> dict[str, Any]:
    """Print the result as one line of JSON, the last of the output, and return it."""
    steps, seconds, cpu_seconds = clock.interval()
    last = episode_returns[-20:]
    first_steps, first_wall, _ = clock.marks[WARM_UP - 1]
    start_up = first_wall - clock.started - first_steps * seconds / steps
    result = {
        "peer": peer,
        "version": version,
        "workload": args.workload,
        "env_steps": steps,
        "seconds": round(seconds, 4),
        "sps": round(steps / seconds, 1),
        "final_return": round(sum(last) / len(last), 2) if last else None,
        "cpu_seconds": round(cpu_seconds, 4),
        "sps_cpu": round(steps / cpu_seconds, 1),
        "sps_cpu_quiet": round(clock.quiet_rate(WORKLOADS[args.workload].get("policy_iterations", 1)), 1),
        "variant": variant,
        "seed": args.seed,
        "total_steps": clock.marks[-1][0],
        "episodes": len(episode_returns),
        "import_s": round(clock.imported_at - clock.started, 2),
        "startup_s": round(start_up, 2),
        "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "peak_child_rss_mb": round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024),
        "threads": THREADS,
        "note": note,
    }
    if (goal := WORKLOADS[args.workload].get("goal")) is not None:
        last = EPISODE_RETURNS[-100:]
        result |= {"last_100": round(sum(last) / len(last), 2) if last else None, "reached": clock.reached(goal)}
    sys.stderr.flush()
    print("\n" + json.dumps(result), flush=True)
    return result

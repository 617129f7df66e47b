"""Time this package and a peer in alternation on one thread, and store every pair of runs.

    python benchmarks/compare.py W1 sb3
    python benchmarks/compare.py W1 sb3 --backend native
    python benchmarks/compare.py W3 rl_games --compiled

The runs alternate between both packages, so that other load on the machine affects both. Each run is a separate
process. The ratio of a pair is this package / peer, and the reported ratio is the median over pairs. The CPU time of a
workload with actors includes all processes. The peer runs on Gymnasium's synchronous environments, in the virtual
environment `$PEERS_VENVS/<peer>` (default `~/peers-venvs`) with `benchmarks/peers/requirements-<peer>.txt`. `--backend`
sets the backend of this package, and `--plain` disables its fast paths. Each pair is added to
`benchmarks/results/throughput/<workload>-<peer>[-<backend>][-compiled][-plain].json`. A second start continues there,
unless the package has changed in between.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from record import RESULTS, ROOT, hardware, source, versions, write_json

# For each peer its supported workloads, and the script.
PEERS = {
    "sb3": (("W1", "W2", "W3"), "sb3_ppo.py"),
    "skrl": (("W1", "W2", "W3"), "skrl_ppo.py"),
    "rl_games": (("W1", "W2", "W3"), "rl_games_ppo.py"),
    "rsl_rl": (("W1", "W2"), "rsl_rl_ppo.py"),
    "sheeprl": (("W1", "W2", "W3"), "sheeprl_ppo.py"),
    "tianshou": (("W1", "W2"), "tianshou_ppo.py"),
    "torchrl": (("W1", "W2"), "torchrl_ppo.py"),
    "sample_factory": (("W1",), "sample_factory_ppo.py"),
    "sb3_contrib": (("W4",), "sb3_contrib_ppo.py"),
    "ding": (("W5",), "ding_ppg.py"),
    "torchbeast": (("W6",), "torchbeast_impala.py"),
    "sbx": (("W1",), "sbx_ppo.py"),
    "jax": (("W1",), "jax_ppo.py"),
    "pufferlib": (("W1",), "pufferlib_ppo.py"),
}
# Long enough for a spread of a few per cent between runs, short enough for five pairs within minutes.
STEPS = {"W1": 100_000, "W2": 24_576, "W3": 5_120, "W4": 16_384, "W5": 65_536, "W6": 32_000}
TIMEOUT = 7200
"""Seconds after which a run is taken for hung: many times what any takes."""


@dataclass(frozen=True)
class Comparison:
    """What is compared, and how.

    Attributes:
        workload: Name in `workloads.json`.
        peer: Name of the other package.
        backend: Backend of this package; the peer has Gymnasium's synchronous environments.
        compiled: Whether this package compiles its losses.
        plain: Whether the fast paths of this package are disabled.
        pairs: Number of runs of either package.
        steps: Environment steps of each run; None takes the number in `STEPS`.
        folder: Folder of the result.
    """

    workload: str
    peer: str
    backend: str = "sync"
    compiled: bool = False
    plain: bool = False
    pairs: int = 5
    steps: int | None = None
    folder: Path = RESULTS / "throughput"

    @property
    def variant(self) -> str:
        """The setting of this package in a word; empty for the default."""
        backend = [] if self.backend == "sync" else [self.backend]
        return "-".join(backend + ["compiled"] * self.compiled + ["plain"] * self.plain)

    @property
    def path(self) -> Path:
        """The file of the result."""
        name = "-".join(part for part in (self.workload, self.peer, self.variant) if part)
        return self.folder / f"{name}.json"

    def commands(self, seed: int, python: str) -> tuple[list[str], list[str]]:
        """Return the command lines of this package and of the peer."""
        here = ROOT / "benchmarks"
        common = [self.workload, "--steps", str(self.steps or STEPS[self.workload]), "--seed", str(seed)]
        ours = [sys.executable, str(here / "throughput.py"), *common, "--backend", self.backend]
        theirs = [python, str(here / "peers" / PEERS[self.peer][1]), *common]
        return ours + ["--compiled"] * self.compiled + ["--plain"] * self.plain, theirs


def interpreter(peer: str) -> Path:
    """Return the Python of a peer's virtual environment, which may not exist."""
    return Path(os.environ.get("PEERS_VENVS", Path.home() / "peers-venvs")) / peer / "bin" / "python"


def run(command: list[str]) -> dict[str, Any]:
    """Run a driver on one thread and return the JSON of its last line.

    Raises:
        RuntimeError: The driver failed, with its output, or exceeded the time limit.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=TIMEOUT)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{' '.join(command[1:])} was not done after {TIMEOUT} s") from error
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[1:])} ended with status {done.returncode}:\n{done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def done_before(comparison: Comparison, digest: str) -> list[dict[str, Any]]:
    """Return the stored runs of the current version of the package: this package and the peer in alternation."""
    if not comparison.path.exists():
        return []
    kept = json.loads(comparison.path.read_text())
    same = kept["source"]["package_sha256"] == digest
    steps = comparison.steps or STEPS[comparison.workload]
    same = same and kept.get("steps") == steps
    return list(kept["runs"][: 2 * comparison.pairs]) if same else []


def seconds_of_pair(comparison: Comparison) -> float | None:
    """Return the seconds that stored pairs of any version of the package took; None without stored pairs."""
    if not comparison.path.exists():
        return None
    runs = json.loads(comparison.path.read_text())["runs"]
    steps = comparison.steps or STEPS[comparison.workload]
    sides = ([run["startup_s"] + steps / run["sps"] for run in runs[side::2]] for side in (0, 1))
    return sum(statistics.median(side) for side in sides)


def compare(comparison: Comparison) -> dict[str, Any]:
    """Run the missing pairs with seeds 1, 2, …, store each at once, and return all pairs."""
    provenance = source()
    runs = done_before(comparison, provenance["package_sha256"])
    python = str(interpreter(comparison.peer))
    for seed in range(len(runs) // 2 + 1, comparison.pairs + 1):
        pair = [run(command) for command in comparison.commands(seed, python)]
        print(f"{comparison.path.stem} seed {seed}: {pair[0]['sps_cpu']} / {pair[1]['sps_cpu']}", file=sys.stderr)
        runs += pair
        result = summary(comparison, runs)
        result |= {"source": provenance, "versions": versions(), "hardware": hardware()}
        write_json(comparison.path, result)
    kept: dict[str, Any] = json.loads(comparison.path.read_text())
    return kept


def summary(comparison: Comparison, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return medians and ratios of runs of this package and the peer in alternation."""
    ours, theirs = runs[::2], runs[1::2]
    result: dict[str, Any] = {
        "workload": comparison.workload,
        "peer": comparison.peer,
        "peer_version": theirs[0]["version"],
        "variant": comparison.variant,
        "steps": comparison.steps or STEPS[comparison.workload],
    }
    for unit in ("sps_cpu", "sps_cpu_quiet", "sps"):
        ratios = [mine[unit] / other[unit] for mine, other in zip(ours, theirs, strict=True)]
        result[unit] = {
            "ours": statistics.median(one[unit] for one in ours),
            "theirs": statistics.median(one[unit] for one in theirs),
            "ratio": round(statistics.median(ratios), 3),
            "ratios": [round(ratio, 3) for ratio in ratios],
        }
    return result | {"runs": runs}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=sorted(STEPS))
    parser.add_argument("peer", choices=sorted(PEERS))
    parser.add_argument("--backend", choices=["sync", "native", "torch", "envpool"], default="sync")
    parser.add_argument("--compiled", action="store_true", help="compile the losses of this package")
    parser.add_argument("--plain", action="store_true", help="disable the fast paths of this package")
    parser.add_argument("--steps", type=int, help="environment steps of each run")
    parser.add_argument("--pairs", type=int, default=5)
    asked = Comparison(**vars(parser.parse_args()))
    if asked.workload not in PEERS[asked.peer][0]:
        parser.error(f"peer={asked.peer!r} has no driver for {asked.workload}: expected one of {PEERS[asked.peer][0]}")
    if not interpreter(asked.peer).exists():
        parser.error(f"peer={asked.peer!r}: expected a virtual environment with {interpreter(asked.peer)}")
    found = compare(asked)
    print(json.dumps({key: found[key] for key in ("workload", "peer", "variant", "sps_cpu", "sps")}))

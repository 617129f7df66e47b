"""Time this package and a peer in alternation on one thread, and keep every pair.

    python benchmarks/compare.py W1 sb3

Ours, theirs, ours, theirs …: what else the machine does meanwhile meets both. Each run is a process of its own; the
ratio of each pair is ours / theirs, and the median over pairs is what is reported. The peer runs in the virtual
environment `$PEERS_VENVS/<peer>` (default `~/peers-venvs`), which has `benchmarks/peers/requirements-<peer>.txt`
installed. The result goes to `benchmarks/results/throughput/<workload>-<peer>.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from record import RESULTS, ROOT, hardware, source, versions, write_json

PEERS = ("sb3", "skrl")
# Long enough for rates that differ by a few per cent between runs, short enough for five pairs in minutes.
STEPS = {"W1": 100_000, "W2": 24_576, "W3": 4_096}


def run(python: str, script: str, workload: str, steps: int, seed: int) -> dict[str, Any]:
    """Run a driver on one thread and return its last line.

    Raises:
        RuntimeError: It failed; with what it wrote.
    """
    command = [python, str(ROOT / "benchmarks" / script), workload, "--steps", str(steps), "--seed", str(seed)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(f"{script} {workload} ended with status {done.returncode}:\n{done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def compare(workload: str, peer: str, steps: int, pairs: int, python: str) -> dict[str, Any]:
    """Run the pairs, with seeds 1, 2, …, and return everything."""
    provenance = source()
    results = []
    for seed in range(1, pairs + 1):
        ours = run(sys.executable, "throughput.py", workload, steps, seed)
        theirs = run(python, f"peers/{peer}_ppo.py", workload, steps, seed)
        results.append({"ours": ours, "theirs": theirs})
        print(f"{workload} {peer} seed {seed}: {ours['sps_cpu']} / {theirs['sps_cpu']}", file=sys.stderr)
    summary: dict[str, Any] = {"workload": workload, "peer": peer, "peer_version": results[0]["theirs"]["version"]}
    for unit in ("sps_cpu", "sps"):
        ratios = [pair["ours"][unit] / pair["theirs"][unit] for pair in results]
        summary[unit] = {
            "ours": statistics.median(pair["ours"][unit] for pair in results),
            "theirs": statistics.median(pair["theirs"][unit] for pair in results),
            "ratio": round(statistics.median(ratios), 3),
            "ratios": [round(ratio, 3) for ratio in ratios],
        }
    runs = [pair[side] for pair in results for side in ("ours", "theirs")]
    return summary | {"runs": runs, "source": provenance, "versions": versions(), "hardware": hardware()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=sorted(STEPS))
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("--steps", type=int, help="environment steps of each run")
    parser.add_argument("--pairs", type=int, default=5)
    args = parser.parse_args()
    folder = Path(os.environ.get("PEERS_VENVS", Path.home() / "peers-venvs"))
    interpreter = folder / args.peer / "bin" / "python"
    if not interpreter.exists():
        parser.error(
            f"peer={args.peer!r}: expected a virtual environment with {interpreter.name} in {folder / args.peer}"
        )
    result = compare(args.workload, args.peer, args.steps or STEPS[args.workload], args.pairs, str(interpreter))
    write_json(RESULTS / "throughput" / f"{args.workload}-{args.peer}.json", result)
    print(json.dumps({key: result[key] for key in ("workload", "peer", "sps_cpu", "sps")}))

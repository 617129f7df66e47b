"""Measure the time to a mean return of 475 on CartPole, here and in other libraries.

    python benchmarks/time_to_return.py

Runs W1 in alternation on one thread, seed by seed. The time is CPU time from the end of the imports, compiling
included; wall time is given too. The result is `benchmarks/results/time_to_return.json`, stored after each run; stored
runs are not repeated. Peers without a virtual environment `$PEERS_VENVS/<peer>` are skipped.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from compare import PEERS, Comparison, interpreter, run
from record import RESULTS, save

RESULT = RESULTS / "time_to_return.json"
STEPS = 300_000
OURS: dict[str, dict[str, Any]] = {
    "lightning_rl": {},
    "lightning_rl, native": {"backend": "native"},
    "lightning_rl, torch, compiled": {"backend": "torch", "compiled": True},
}


def commands(seed: int, steps: int) -> dict[str, list[str]]:
    """Return the command lines of all libraries that are installed."""
    found = {name: Comparison("W1", "sb3", steps=steps, **how).commands(seed, "")[0] for name, how in OURS.items()}
    for peer, (workloads, _) in PEERS.items():
        if "W1" in workloads and interpreter(peer).exists():
            found[peer] = Comparison("W1", peer, steps=steps).commands(seed, str(interpreter(peer)))[1]
    return found


def summary(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return medians over the seeds that reached the return, with their number."""
    result = {}
    for name, found in runs.items():
        reached = [one["reached"] for one in found if one["reached"] is not None]
        keys = ("env_steps", "cpu_seconds", "seconds") if reached else ()
        medians = {key: statistics.median(one[key] for one in reached) for key in keys}
        rate = statistics.median(one["sps_cpu"] for one in found)
        result[name] = {"version": found[0]["version"], "seeds": len(found), "reached": len(reached), **medians}
        result[name]["sps_cpu"] = rate
    return result


def main() -> None:
    """Run the missing seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=STEPS, help="environment steps of each run")
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    kept = json.loads(args.out.read_text()) if args.out.exists() else {}
    runs: dict[str, list[dict[str, Any]]] = kept.get("runs", {})
    if kept and kept["steps"] != args.steps:
        parser.error(f"--steps {args.steps}: {args.out} has runs of {kept['steps']} steps; expected --out for others")
    for seed in range(1, args.seeds + 1):
        for name, command in commands(seed, args.steps).items():
            done = runs.get(name, [])
            if any(one["seed"] == seed for one in done):
                continue
            try:
                found = run(command)
            except RuntimeError as error:
                print(f"{name}: {error}", file=sys.stderr)
                continue
            runs[name] = sorted([*done, found], key=lambda one: int(one["seed"]))
            print(f"{name}, seed {seed}: {found['reached']}", file=sys.stderr, flush=True)
            result = {
                "workload": "W1",
                "episode_return": 475,
                "steps": args.steps,
                "medians": summary(runs),
                "runs": runs,
            }
            save(result, args.out.parent, args.out.name)


if __name__ == "__main__":
    main()

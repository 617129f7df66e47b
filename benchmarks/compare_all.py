"""Run every comparison of `benchmarks/README.md`, one after another: `python benchmarks/compare_all.py`.

The two fastest peers of a workload meet ours in five pairs, the others in one. What is kept already of the package as
it is now is not run again, so that an interrupted run goes on where it was; a pair that fails is told of and left out.

    python benchmarks/compare_all.py --list             what would be run, and what is kept
    python benchmarks/compare_all.py --workloads W1 W4  some workloads only
    python benchmarks/compare_all.py --pairs 1          a quick look
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from compare import PEERS, STEPS, Comparison, compare, done_before, interpreter
from record import RESULTS, source

# The two that have been seen to be the fastest, per workload; and what else ours are run with against these.
FASTEST = {
    "W1": ("skrl", "sb3"),
    "W2": ("sb3", "skrl"),
    "W3": ("rl_games", "skrl"),
    "W4": ("sb3_contrib",),
    "W5": ("ding",),
}
OTHERWISE = {
    "W1": [{"backend": "native"}, {"backend": "torch"}, {"backend": "envpool"}],
    "W2": [{"backend": "envpool"}],
    "W3": [{"compiled": True}, {"backend": "native"}, {"backend": "envpool"}],
}


def plan(workloads: Sequence[str], pairs: int) -> list[Comparison]:
    """Return the comparisons of these workloads, the most telling first."""
    fastest = [Comparison(workload, peer, pairs=pairs) for workload in workloads for peer in FASTEST[workload]]
    otherwise = [
        Comparison(workload, FASTEST[workload][0], pairs=pairs, **how)
        for workload in workloads
        for how in OTHERWISE.get(workload, [])
    ]
    others = [
        Comparison(workload, peer, pairs=1)
        for workload in workloads
        for peer, (known, _) in PEERS.items()
        if workload in known and peer not in FASTEST[workload]
    ]
    return fastest + otherwise + others


def main() -> int:
    """Run the plan; return 1 if something in it failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=sorted(STEPS), default=sorted(STEPS))
    parser.add_argument("--peers", nargs="+", choices=sorted(PEERS), default=sorted(PEERS))
    parser.add_argument("--pairs", type=int, default=5, help="against the fastest peers")
    parser.add_argument("--steps", type=int, help="environment steps of each run")
    parser.add_argument("--out", type=Path, default=RESULTS / "throughput", help="folder of the results")
    parser.add_argument("--list", action="store_true", help="run nothing")
    args = parser.parse_args()
    digest, failed = source()["package_sha256"], False
    for comparison in plan(args.workloads, args.pairs):
        if comparison.peer not in args.peers:
            continue
        comparison = dataclasses.replace(comparison, steps=args.steps, folder=args.out)
        kept = len(done_before(comparison, digest)) // 2
        print(f"{comparison.path.stem}: {kept} of {comparison.pairs} pairs are there", flush=True)
        if args.list or kept == comparison.pairs:
            continue
        if not interpreter(comparison.peer).exists():
            print(f"{comparison.path.stem}: left out, no {interpreter(comparison.peer)}", file=sys.stderr)
            failed = True
            continue
        try:
            found = compare(comparison)
        except (RuntimeError, json.JSONDecodeError) as error:
            print(f"{comparison.path.stem}: {error}", file=sys.stderr)
            failed = True
            continue
        print(
            f"{comparison.path.stem}: {found['sps_cpu']['ratio']} of CPU, {found['sps']['ratio']} of wall", flush=True
        )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

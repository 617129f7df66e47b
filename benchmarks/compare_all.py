"""Run every comparison of `benchmarks/README.md`, one after another: `python benchmarks/compare_all.py`.

Each workload is compared with its two fastest peers in PyTorch in five pairs, and with other peers in one pair. Stored
results of the current version of the package are not measured again, so an interrupted run can be continued. A pair
that fails is printed and left out.

    python benchmarks/compare_all.py --list             print missing and stored comparisons, and the time they take
    python benchmarks/compare_all.py --workloads W1 W4  some workloads only
    python benchmarks/compare_all.py --pairs 1          a quick comparison
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compare import PEERS, STEPS, Comparison, compare, done_before, interpreter, seconds_of_pair
from record import RESULTS, source

# In pairs: the two fastest peers in PyTorch, and further settings of this package against the first of them. rl_games
# compiles its model on images; in this comparison, this package compiles too.
IN_PAIRS: dict[str, list[dict[str, Any]]] = {
    "W1": [
        {"peer": "skrl"},
        {"peer": "sb3"},
        {"peer": "skrl", "backend": "native"},
        {"peer": "skrl", "backend": "torch"},
    ],
    "W2": [{"peer": "sb3"}, {"peer": "skrl"}, {"peer": "sb3", "backend": "envpool"}],
    "W3": [
        {"peer": "rl_games", "compiled": True},
        {"peer": "skrl"},
        {"peer": "rl_games", "compiled": True, "backend": "native"},
    ],
    "W4": [{"peer": "sb3_contrib"}],
    "W5": [{"peer": "ding"}],
    "W6": [{"peer": "torchbeast"}, {"peer": "torchbeast", "backend": "native"}],
}
# In one pair, besides the other peers.
ONCE: dict[str, list[dict[str, Any]]] = {
    "W1": [{"peer": "skrl", "backend": "envpool"}, {"peer": "jax", "backend": "torch", "compiled": True}],
    "W3": [{"peer": "rl_games"}, {"peer": "rl_games", "compiled": True, "backend": "envpool"}],
}


def plan(workloads: Sequence[str], pairs: int) -> list[Comparison]:
    """Return the comparisons of these workloads, the most important first."""
    in_pairs = [Comparison(workload, pairs=pairs, **how) for workload in workloads for how in IN_PAIRS[workload]]
    met = {(comparison.workload, comparison.peer) for comparison in in_pairs}
    others = [
        {"workload": workload, "peer": peer}
        for workload in workloads
        for peer, (known, _) in PEERS.items()
        if workload in known and (workload, peer) not in met
    ]
    others += [{"workload": workload, **how} for workload in workloads for how in ONCE.get(workload, [])]
    return in_pairs + [Comparison(pairs=1, **how) for how in others]


def main() -> int:
    """Run the plan; return 1 if a comparison failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=sorted(STEPS), default=sorted(STEPS))
    parser.add_argument("--peers", nargs="+", choices=sorted(PEERS), default=sorted(PEERS))
    parser.add_argument("--pairs", type=int, default=5, help="pairs with the fastest peers")
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
        seconds = (comparison.pairs - kept) * (seconds_of_pair(comparison) or 0)
        expected = f", about {seconds / 60:.1f} minutes for the others" if seconds else ""
        print(f"{comparison.path.stem}: {kept} of {comparison.pairs} pairs are stored{expected}", flush=True)
        if args.list or kept == comparison.pairs:
            continue
        if not interpreter(comparison.peer).exists():
            print(f"{comparison.path.stem}: skipped, no {interpreter(comparison.peer)}", file=sys.stderr)
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

"""Train every shipped configuration, then write the pages with the results: `python benchmarks/reproduce_all.py`.

Existing results are kept, so an interrupted command can be repeated. Configurations that need a missing package or more
devices are listed and skipped.

    python benchmarks/reproduce_all.py --list                 print existing and missing results
    python benchmarks/reproduce_all.py ppo/taxi a2c/cartpole  some configurations only
    python benchmarks/reproduce_all.py --seeds 3              seeds 0, 1, 2; default: seeds with a result, or 0
    python benchmarks/reproduce_all.py --again                train existing results again
    python benchmarks/reproduce_all.py --pages                run nothing, write the pages and figures of what is there
    python benchmarks/reproduce_all.py --queue                long runs in the background, see training_queue.py
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import training_queue

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
PAGES = ("table.py", "curves.py", "pages.py")


def plan(names: Sequence[str], seeds: int | None, results: Path) -> Iterator[tuple[str, int, bool]]:
    """Yield name and seed of each run, and whether its result exists.

    Args:
        names: Names of configurations, `<algorithm>/<name>`.
        seeds: Number of seeds of each; None: as many as have results, at least one.
        results: Folder of the results.
    """
    for name in names:
        there = {path.name for path in (results / name).glob("seed*.json")}
        for seed in range(seeds or max(1, len(there))):
            yield name, seed, f"seed{seed}.json" in there


def script(name: str, *arguments: str) -> bool:
    """Run another script of this folder in a separate process; return whether it succeeded."""
    return subprocess.run([sys.executable, str(HERE / name), *arguments]).returncode == 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the plan and write the pages; return 1 if a run failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="configurations; default: all shipped ones")
    parser.add_argument("--seeds", type=int, help="number of seeds of each")
    parser.add_argument("--again", action="store_true", help="train existing results again")
    parser.add_argument("--list", action="store_true", help="run nothing")
    parser.add_argument("--pages", action="store_true", help="run nothing, but write all pages and figures")
    parser.add_argument("--out", type=Path, help="another folder of results, without pages")
    training_queue.add_arguments(parser)
    args = parser.parse_args(arguments)
    if args.queue or args.status or args.pause or args.resume:
        return training_queue.main(args, args.out or RESULTS)
    # Imported late: it takes seconds, and --pause must act at once.
    from lightning_rl.tools.trained import shipped_configs

    known = list(shipped_configs())
    if unknown := sorted(set(args.names) - set(known)):
        parser.error(f"{', '.join(unknown)}: expected names of shipped configurations, such as ppo/cartpole")
    if args.seeds is not None and args.seeds < 1:
        parser.error(f"--seeds {args.seeds}: expected at least 1")
    results, failed = args.out or RESULTS, []
    for name, seed, there in () if args.pages else plan(args.names or known, args.seeds, results):
        wanted = args.again or not there
        print(f"{name}, seed {seed}: {'to be run' if wanted else 'there'}", flush=True)
        if not wanted or args.list:
            continue
        config = str(HERE.parent / "configs" / f"{name}.yaml")
        if not script("reproduce.py", config, "--seed", str(seed), "--out", str(results)):
            failed.append(f"{name}, seed {seed}")
    pages = () if args.list or args.out else PAGES
    failed += [page for page in pages if not script(page)]
    if failed:
        print(f"could not be run: {'; '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())

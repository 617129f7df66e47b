"""Train PPO here and in Stable-Baselines3 with the same settings: `python benchmarks/equal_settings.py`.

The workloads E1 to E3 are CartPole, LunarLander and HalfCheetah. Both libraries run in alternation, seed by seed, on
one thread. Each result is stored at once in `benchmarks/results/equal_settings/`; stored results are not repeated.

    python benchmarks/equal_settings.py E1 --seeds 10
    python benchmarks/equal_settings.py --list

The score is the mean return of the last 100 training episodes, in both libraries, and `reached` the cost of a mean
return of the workload's goal. Stable-Baselines3 runs in `$PEERS_VENVS/sb3`, as for `compare.py`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import measure
from compare import Comparison, interpreter, run
from record import RESULTS, hardware, source, versions, write_json

FOLDER = RESULTS / "equal_settings"
TASKS = ("E1", "E2", "E3")
LIBRARIES = ("lightning_rl", "sb3")


def path_of(task: str, library: str, seed: int, folder: Path = FOLDER) -> Path:
    """Return the file of a run."""
    return folder / task / f"{library}-seed{seed}.json"


def load(task: str, library: str, folder: Path = FOLDER) -> list[dict[str, Any]]:
    """Return the stored runs, by seed."""
    runs = [json.loads(path.read_text()) for path in (folder / task).glob(f"{library}-seed*.json")]
    return sorted(runs, key=lambda run: int(run["seed"]))


def main() -> None:
    """Run the missing seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", metavar="TASK", default=TASKS, help=f"tasks: {', '.join(TASKS)}")
    parser.add_argument("--seeds", type=int, default=10, help="number of seeds of each task")
    parser.add_argument("--steps", type=int, help="environment steps of each run, for trials with --out")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the results")
    parser.add_argument("--list", action="store_true", help="run nothing")
    args = parser.parse_args()
    if unknown := set(args.tasks) - set(TASKS):
        parser.error(f"{', '.join(sorted(unknown))}: expected tasks of {', '.join(TASKS)}")
    if args.steps is not None and args.out == FOLDER:
        parser.error("--steps changes the experiment: expected --out with another folder")
    if not (args.list or interpreter("sb3").exists()):
        parser.error(f"expected a virtual environment of Stable-Baselines3 with {interpreter('sb3')}")
    for seed in range(args.seeds):
        for task in args.tasks:
            steps = args.steps or measure.WORKLOADS[task]["steps"]
            commands = Comparison(task, "sb3", steps=steps).commands(seed, str(interpreter("sb3")))
            for library, command in zip(LIBRARIES, commands, strict=True):
                path = path_of(task, library, seed, args.out)
                print(f"{task}, {library}, seed {seed}: {'done' if path.exists() else 'missing'}", flush=True)
                if not (args.list or path.exists()):
                    provenance = source()
                    found = run(command)
                    more = {"source": provenance, "hardware": hardware()}
                    write_json(path, found | more | ({"versions": versions()} if library == LIBRARIES[0] else {}))


if __name__ == "__main__":
    main()

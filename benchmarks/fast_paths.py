"""Measure the gain of each part of `lightning_rl/fast/`: run workloads with one part after another disabled.

    OMP_NUM_THREADS=1 python benchmarks/fast_paths.py W1 --backend native --steps 60000 --repeats 3
    OMP_NUM_THREADS=1 python benchmarks/fast_paths.py W2 --steps 30720 --repeats 3 --save
    OMP_NUM_THREADS=1 python benchmarks/fast_paths.py W5 --variants all "fast_paths: none" "fast_paths: compiled"

Each run is a separate process. The variants alternate and are repeated, so that other load on the machine affects all
of them. `--variants` selects variants; `all` must be among them. The result of a run is microseconds of CPU time per
environment step in the fastest quarter of its rollouts, and the result of a variant is the minimum over its runs.
`--save` writes the table to `benchmarks/results/throughput/`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import measure
import throughput
import torch
from record import RESULTS, save

from lightning_rl import fast


def without_closed_form() -> None:
    """Compute the loss and its gradient by autograd."""
    fast.PPOLoss.of = classmethod(lambda *_: "switched off")  # type: ignore[method-assign, assignment]


def with_hooks() -> None:
    """Call Lightning's hooks around backward passes and steps, as `EagerEngine` does."""
    backward = fast.FastEngine.backward

    def backward_with_hooks(engine: fast.FastEngine, model: Any, loss: torch.Tensor) -> None:
        precision = model.trainer.strategy.precision_plugin
        precision.pre_backward(loss, model)
        backward(engine, model, loss)
        precision.post_backward(loss, model)

    def step(engine: fast.FastEngine, model: Any, optimizer: Any, counts: bool) -> None:
        optimizer.step()

    fast.FastEngine.backward = backward_with_hooks  # type: ignore[method-assign]
    fast.FastEngine.step = step  # type: ignore[method-assign]


def without_actor() -> None:
    """Choose actions by PyTorch."""
    fast.actor = lambda policy: None  # type: ignore[assignment]


def without_flat_adam() -> None:
    """Step with PyTorch's fused Adam, one tensor per parameter."""
    fast.FlatAdam.vectors = lambda optimizer: []  # type: ignore[method-assign]


VARIANTS: dict[str, Callable[[], None] | None] = {
    "all": None,
    "without the closed form": without_closed_form,
    "with Lightning's hooks": with_hooks,
    "without acting by NumPy": without_actor,
    "without FlatAdam": without_flat_adam,
    "fast_paths: none": None,
    "fast_paths: compiled": None,
}


def run_here(args: argparse.Namespace) -> None:
    """Run one variant, and print its microseconds per step."""
    torch.set_num_threads(measure.THREADS)
    asked = args.only.removeprefix("fast_paths: ")
    workload = measure.workload(args) | {"fast_paths": asked if asked in ("none", "compiled") else "auto"}
    if (change := VARIANTS[args.only]) is not None:
        change()
    clock = measure.Clock()
    throughput.fit(args, workload, clock, "plain")
    rate = clock.quiet_rate(measure.WORKLOADS[args.workload].get("policy_iterations", 1))
    print(f"\n{1e6 / rate:.3f}", flush=True)


def run(args: argparse.Namespace, variant: str, seed: int) -> float:
    """Run one variant in a separate process, and return its microseconds per step.

    Raises:
        RuntimeError: The run failed.
    """
    command = [sys.executable, __file__, args.workload, "--backend", args.backend, "--seed", str(seed)]
    command += ["--only", variant, *(["--steps", str(args.steps)] if args.steps else [])]
    environment = os.environ | {"OMP_NUM_THREADS": str(measure.THREADS)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(f"{variant} ended with status {done.returncode}:\n{done.stderr[-2000:]}")
    return float(done.stdout.splitlines()[-1])


def table(found: dict[str, list[float]]) -> dict[str, dict[str, Any]]:
    """Return the minimum of each variant's runs, and its difference from the variant with all fast paths."""
    least = {name: min(runs) for name, runs in found.items()}
    return {
        name: {"microseconds_per_step": best, "more": round(best / least["all"] - 1, 3), "runs": found[name]}
        for name, best in least.items()
    }


def parse(args: list[str] | None = None) -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    measure.add_arguments(parser)
    parser.add_argument("--backend", choices=["sync", "native"], default="sync")
    parser.add_argument("--repeats", type=int, default=2, help="runs of each variant")
    parser.add_argument(
        "--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS), help="variants to compare"
    )
    parser.add_argument("--only", choices=list(VARIANTS), help="run one variant once, in this process")
    parser.add_argument("--save", action="store_true", help="keep the result")
    parsed = parser.parse_args(args)
    if "all" not in parsed.variants:
        parser.error("--variants: expected 'all' among them, with which the others are compared")
    return parsed


if __name__ == "__main__":
    arguments = parse()
    if arguments.only:
        run_here(arguments)
        sys.exit()
    times: dict[str, list[float]] = {name: [] for name in arguments.variants}
    for repeat in range(arguments.repeats):
        for name in arguments.variants:
            times[name].append(run(arguments, name, arguments.seed + repeat))
            print(f"{times[name][-1]:8.2f} us/step  {name}", file=sys.stderr, flush=True)
    result = {"workload": arguments.workload, "backend": arguments.backend, "variants": table(times)}
    print(f"\n| {arguments.workload}, {arguments.backend} | CPU time per step | more |\n| --- | --- | --- |")
    for name, row in result["variants"].items():
        print(f"| {name} | {row['microseconds_per_step']:.1f} µs | {row['more']:+.0%} |")
    place = f"throughput/fast-paths-{arguments.workload}-{arguments.backend}.json"
    save(result, RESULTS if arguments.save else None, place)
    print(json.dumps(result))

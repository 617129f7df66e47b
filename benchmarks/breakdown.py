"""Measure where the time of a workload goes: `OMP_NUM_THREADS=1 python benchmarks/breakdown.py W1 --steps 100000`.

Runs the workload under the plain Trainer with timers around the parts of collecting and learning, in CPU time. The time
of a part excludes the timed parts that it calls. A timer costs about a microsecond per call, which counts for the part
around it. `--save after` writes the result to `benchmarks/results/throughput/`, for the table in README.md.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeAlias

import measure
import throughput
import torch
from record import RESULTS, save
from workload_models import make_data, make_model

from lightning_rl import PPO
from lightning_rl.data.collector import Collector
from lightning_rl.environments import EnvironmentBatch
from lightning_rl.fast import Actor, FastEngine, FlatAdam, PPOLoss
from lightning_rl.fast.engine import closed_form_of
from lightning_rl.fast.numpy_mlp import NumpyMLP
from lightning_rl.policies.actor_critic import ActorCritic
from lightning_rl.training.advantages import AdvantageEstimator
from lightning_rl.training.gradient_steps import GradientSteps
from lightning_rl.training.metrics import RolloutMetrics

Part: TypeAlias = tuple[type[Any], str, str]
"""Class, method, and what it is called in the report: a part is charged for what the others inside it are not."""

PARTS: list[Part] = [
    (Collector, "collect", "collect: storing, checks, putting together"),
    (EnvironmentBatch, "step", "collect: environments"),
    (Actor, "__call__", "collect: acting"),
    (ActorCritic, "act", "collect: acting"),
    (ActorCritic, "value", "collect: values of the rollout"),
    (ActorCritic, "log_prob", "collect: log-probabilities of the rollout"),
    (PPO, "training_step", "update: diagnostics, cutting minibatches, the rest"),
    (AdvantageEstimator, "gae", "update: advantages"),
    (FastEngine, "step", "update: Lightning around the optimiser"),
    (FlatAdam, "step_alone", "update: optimiser"),
    (RolloutMetrics, "add_rollout", "logging"),
]
# For losses with an autograd graph.
WITH_GRAPH: list[Part] = [
    (PPO, "loss", "update: loss"),
    (ActorCritic, "forward", "update: forward pass"),
    (FastEngine, "backward", "update: backward pass"),
    (GradientSteps, "take", "update: zeroing, clipping, finiteness"),
]
IN_CLOSED_FORM: list[Part] = [
    (PPOLoss, "__call__", "update: loss"),
    (NumpyMLP, "forward", "update: forward pass"),
    (NumpyMLP, "backward", "update: backward pass"),
    (GradientSteps, "take", "update: zeroing, clipping, finiteness"),
]


class Timers:
    """Exclusive seconds and calls by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.calls: dict[str, int] = defaultdict(int)
        self._inner = [0.0]

    def wrap(self, owner: Any, attribute: str, name: str) -> None:
        """Replace a method of a class by a timed one."""
        method: Callable[..., Any] = getattr(owner, attribute)

        @functools.wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            start = time.process_time()
            try:
                return method(*args, **kwargs)
            finally:
                elapsed = time.process_time() - start
                self.seconds[name] += elapsed - self._inner.pop()
                self.calls[name] += 1
                self._inner[-1] += elapsed

        setattr(owner, attribute, timed)


class TimedPart(measure.Clock):
    """Resets the timers after the untimed rollouts."""

    def __init__(self, timers: Timers) -> None:
        super().__init__()
        self.timers = timers

    def tick(self, env_steps: int) -> None:
        super().tick(env_steps)
        if len(self.marks) == measure.WARM_UP:
            self.timers.seconds.clear()
            self.timers.calls.clear()


def breakdown(args: argparse.Namespace) -> dict[str, Any]:
    """Run the workload and return microseconds per environment step and calls, by part."""
    workload, timers = measure.workload(args), Timers()
    model = make_model(workload, make_data(workload, args.backend, args.seed))
    is_closed = not isinstance(closed_form_of(model), str)
    for owner, method, name in PARTS + (IN_CLOSED_FORM if is_closed else WITH_GRAPH):
        timers.wrap(owner, method, name)
    clock = TimedPart(timers)
    throughput.fit(args, workload, clock, "plain")
    steps, _, elapsed = clock.interval()
    timers.seconds["Trainer: loop and hooks"] = elapsed - sum(timers.seconds.values())
    per_step = 1e6 / steps
    parts = sorted(timers.seconds.items(), key=lambda part: -part[1])
    return {
        "workload": args.workload,
        "microseconds_per_step": round(elapsed * per_step, 2),
        "parts": {
            name: {
                "microseconds_per_step": round(seconds * per_step, 2),
                "share": round(seconds / elapsed, 3),
                "calls": timers.calls[name],
            }
            for name, seconds in parts
        },
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    measure.add_arguments(parser)
    parser.add_argument("--save", choices=["before", "after"], help="write the result for this column of the table")
    arguments = parser.parse_args()
    if "actors" in measure.WORKLOADS[arguments.workload]:
        parser.error(f"workload={arguments.workload!r}: expected one that runs in a single process")
    arguments.backend = "sync"
    torch.set_num_threads(measure.THREADS)
    result = breakdown(arguments)
    for name, part in result["parts"].items():
        print(f"{part['microseconds_per_step']:8.2f} us/step {part['share']:6.1%} {part['calls']:8d} calls  {name}")
    place = f"throughput/breakdown-{arguments.workload}-{arguments.save}.json"
    save(result, RESULTS if arguments.save else None, place)
    print(json.dumps(result))

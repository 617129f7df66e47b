"""Measure the speed-up of `backend: async` over `sync`.

    OMP_NUM_THREADS=1 python benchmarks/workers.py --save

Two workloads: 8 environments that compute for two milliseconds per step, and 64 CartPole environments. One process
collects a rollout of `sync`, one of `async` and one of `async` without acting ahead (`ahead: false`), and repeats this
`--pairs` times. The policy has the default networks and does not learn. Times are wall times and need idle cores. The
time of a variant is the time of its fastest rollout; the speed-up is the ratio of these times. `speed_ups_of_pairs` has
the ratios of neighboring rollouts. `--save` writes the result to `benchmarks/results/throughput/workers.json`.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import gymnasium
import measure
import numpy as np
import torch
from gymnasium import spaces
from record import add_saving, save

from lightning_rl.data import collector as collectors
from lightning_rl.data.collector import Collector
from lightning_rl.environments import Backend, EnvConfig, EnvironmentSpec, make_environments
from lightning_rl.policies.actor_critic import ActorCritic

LENGTH = 32
"""Vector steps of a rollout."""
WORKLOADS: dict[str, dict[str, Any]] = {
    "busy": {"env_id": "workers:Busy-v0", "num_envs": 8, "milliseconds": 2.0},
    "cartpole": {"env_id": "CartPole-v1", "num_envs": 64},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "sync": {"backend": "sync", "ahead": False},
    "async": {"backend": "async", "ahead": True},
    "async, ahead: false": {"backend": "async", "ahead": False},
}


def compute(additions: int) -> int:
    """Do a fixed amount of work, independent of the number of processes that share the core."""
    total = 0
    for number in range(additions):
        total += number
    return total


def additions_in(milliseconds: float) -> int:
    """Return the number of additions that an idle core computes in that time."""
    seconds = []
    for _ in range(100):
        begun = time.perf_counter()
        compute(20_000)
        seconds.append(time.perf_counter() - begun)
    return round(20_000 * milliseconds / 1000 / min(seconds))


class Busy(gymnasium.Env[np.ndarray[Any, Any], np.ndarray[Any, Any]]):
    """Computes in each step; episodes have 500 steps.

    Args:
        additions: Additions per step.
    """

    observation_space = spaces.Box(-1.0, 1.0, (17,), np.float32)
    action_space = spaces.Box(-1.0, 1.0, (6,), np.float32)

    def __init__(self, additions: int) -> None:
        self.additions, self.count = additions, 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray[Any, Any], dict[str, Any]]:
        """Begin an episode."""
        super().reset(seed=seed)
        self.count = 0
        return np.zeros(17, np.float32), {}

    def step(self, action: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], float, bool, bool, dict[str, Any]]:
        """Compute."""
        compute(self.additions)
        self.count += 1
        return np.full(17, self.count / 500, np.float32), 1.0, False, self.count == 500, {}


if "Busy-v0" not in gymnasium.registry:
    gymnasium.register("Busy-v0", "workers:Busy")


def make_collector(spec: EnvironmentSpec, num_envs: int) -> tuple[Collector, ActorCritic]:
    """Return a collector and a policy."""
    environments = make_environments(spec, num_envs, list(range(num_envs)))
    space_pair = environments.single_observation_space, environments.single_action_space
    torch.manual_seed(0)
    return Collector(environments, LENGTH, torch.Generator().manual_seed(0)), ActorCritic(*space_pair)


def measure_workload(workload: dict[str, Any], pairs: int) -> dict[str, Any]:
    """Return the milliseconds per vector step of each variant, acting included, and the speed-ups over `sync`."""
    kwargs = {"additions": additions_in(workload["milliseconds"])} if "milliseconds" in workload else {}
    env = EnvConfig(kwargs=kwargs)
    backends: tuple[Backend, ...] = ("sync", "async")
    made = {
        backend: make_collector(EnvironmentSpec(workload["env_id"], env, backend), workload["num_envs"])
        for backend in backends
    }
    found: dict[str, list[float]] = {name: [] for name in VARIANTS}
    always = collectors.AHEAD_FROM
    for pair in range(pairs + 1):
        for name, variant in VARIANTS.items():
            collectors.AHEAD_FROM = always if variant["ahead"] else float("inf")
            collector, policy = made[variant["backend"]]
            begun = time.perf_counter()
            collector.collect(policy)
            if pair:  # the first rollout resets the environments
                found[name].append(round(1000 * (time.perf_counter() - begun) / LENGTH, 3))
    collectors.AHEAD_FROM = always
    for collector, _ in made.values():
        collector.environments.close()
    return workload | {
        "milliseconds_per_vector_step": {name: min(times) for name, times in found.items()},
        "speed_up": {name: round(min(found["sync"]) / min(times), 3) for name, times in found.items()},
        "speed_ups_of_pairs": {
            name: [round(one / other, 3) for one, other in zip(found["sync"], times, strict=True)]
            for name, times in found.items()
        },
    }


def parse(args: list[str] | None = None) -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20, help="timed rollouts of each variant")
    add_saving(parser)
    return parser.parse_args(args)


if __name__ == "__main__":
    arguments = parse()
    torch.set_num_threads(measure.THREADS)
    result = {name: measure_workload(workload, arguments.pairs) for name, workload in WORKLOADS.items()}
    save(result, arguments.save, "throughput/workers.json")
    print(json.dumps(result), flush=True)

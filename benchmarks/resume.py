"""Measure the cost of exact resuming: recording episodes during training, and replaying them when a run resumes.

    OMP_NUM_THREADS=1 python benchmarks/resume.py [--save]

The reported share is the recording time per step divided by the time per step of workload W1. The result is
`benchmarks/results/resume/cost.json` with `--save`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import gymnasium
import measure
import numpy as np
import throughput
import torch
from record import add_saving, save

from lightning_rl.environments import EnvironmentBatch, EnvironmentSpec, make_environments
from lightning_rl.environments.episodes import SeededEpisodes

REPEATS, STEPS = 9, 20_000
GAMES, GAME_STEPS = 8, 1_000


def nanoseconds_per_step(env: gymnasium.Env[Any, Any]) -> float:
    """Return the time of a step of CartPole, with a controller that balances the pole like a trained policy."""
    observation, _ = env.reset(seed=0)
    start = time.perf_counter_ns()
    for _ in range(STEPS):
        observation, _, terminated, truncated, _ = env.step(int(observation[2] + observation[3] > 0))
        if terminated or truncated:
            observation, _ = env.reset()
    return (time.perf_counter_ns() - start) / STEPS


class Unrecorded(SeededEpisodes):
    """Seeds episodes like `SeededEpisodes`, without the log of actions and the checks of returned values."""

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step."""
        self.step_count += 1
        return self.env.step(action)


def recording() -> dict[str, float]:
    """Measure the time that logging actions, and the checks, add to a step of CartPole, in alternation."""
    without, recorded = (kind(gymnasium.make("CartPole-v1")) for kind in (Unrecorded, SeededEpisodes))
    pairs = [(nanoseconds_per_step(without), nanoseconds_per_step(recorded)) for _ in range(REPEATS)]
    added = statistics.median(after - before for before, after in pairs)
    args = throughput.parse(["W1", "--steps", "100000"])
    clock = measure.Clock()
    throughput.fit(args, measure.workload(args), clock, "plain")
    steps, seconds, _ = clock.interval()
    run = 1e9 * seconds / steps
    return {"added_ns_per_step": round(added), "run_ns_per_step": round(run), "share": round(added / run, 4)}


def restoring() -> dict[str, float]:
    """Measure the time to replay `GAMES` games of Pong in this process up to the middle of an episode."""

    def games() -> EnvironmentBatch:
        return make_environments(EnvironmentSpec("ALE/Pong-v5"), GAMES, list(range(GAMES)))

    first = games()
    first.reset()
    actions = np.random.default_rng(0).integers(0, 6, (GAME_STEPS, GAMES))
    for row in actions:
        step = first.step(row)
    state = first.state_dict()
    assert state is not None
    again = games()
    start = time.perf_counter()
    restored = again.load_state_dict(state)
    seconds = time.perf_counter() - start
    assert restored is not None and restored[0].all() and np.array_equal(restored[1], step.observations)
    recorded = sum(len(record["actions"]) for record in state["environments"])
    return {"games": GAMES, "recorded_steps": recorded, "seconds": round(seconds, 2)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_saving(parser)
    folder = parser.parse_args().save
    torch.set_num_threads(measure.THREADS)
    result = {"recording CartPole-v1": recording(), "restoring ALE/Pong-v5": restoring()}
    save(result, folder, "resume/cost.json")
    print(json.dumps(result))

"""Measure how much of a first task is forgotten after training on others: CLEAR against IMPALA.

    OMP_NUM_THREADS=1 python benchmarks/retention.py [--seeds 3] [--save]

One model is trained on three tasks in turn, for `STEPS` environment steps each, and evaluated on all three tasks after
each stage. The tasks have the same spaces, but need different actions in the same states. A part of the observation
identifies the task, as the picture identifies a game. The result is `benchmarks/results/retention/mappings.json`.
"""

from __future__ import annotations

import statistics
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from lightning.pytorch import seed_everything
from short_runs import main, quiet_trainer

from lightning_rl import CLEAR, IMPALA, EnvStepLimit, RolloutDataModule

TASKS, STATES, LENGTH = 3, 8, 16
STEPS = 30_000
EPISODES = 50
SETTINGS: dict[str, Any] = {
    "learning_rate": 5e-3,
    "optimizer": {"name": "torch.optim.Adam"},
    "gamma": 0.9,
    "entropy_coef": 0.02,
}
DATA: dict[str, Any] = {
    "num_envs": 8,
    "rollout_length": LENGTH,
    "rollouts_per_epoch": 100,
    "evaluation": {"episodes": EPISODES},
}


class Mapping(gymnasium.Env[np.ndarray, int]):
    """Shows random states. One action is correct in each state and task, and earns an equal share of the return 1.

    Args:
        task: Number of the task, from 0.
    """

    observation_space = spaces.Box(0, 1, (STATES + TASKS,), np.float32)
    action_space = spaces.Discrete(STATES)

    def __init__(self, task: int) -> None:
        self.task = task

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return self._show(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        right = (self.state + 1 + 2 * self.task) % STATES
        self.steps += 1
        return self._show(), float(action == right) / LENGTH, self.steps == LENGTH, False, {}

    def _show(self) -> np.ndarray:
        self.state = int(self.np_random.integers(STATES))
        shown = np.zeros(STATES + TASKS, np.float32)
        shown[[self.state, STATES + self.task]] = 1
        return shown


for number in range(TASKS):
    gymnasium.register(f"Mapping{number}-v0", Mapping, kwargs={"task": number})


def scores(algorithm: type[IMPALA], seed: int) -> list[list[float]]:
    """Return the mean returns of all tasks, with a row after each stage."""
    seed_everything(seed)
    tasks = [RolloutDataModule(f"Mapping{number}-v0", seed=seed, **DATA) for number in range(TASKS)]
    model = algorithm(tasks[0].observation_space, tasks[0].action_space, **SETTINGS)
    rows = []
    for number, task in enumerate(tasks):
        limit = EnvStepLimit((number + 1) * STEPS)
        quiet_trainer(limit, max_epochs=-1, check_val_every_n_epoch=10**9).fit(model, task)
        rows.append([quiet_trainer().validate(model, each, verbose=False)[0]["val/episode_return"] for each in tasks])
    return rows


def compare(seeds: int) -> dict[str, Any]:
    """Return the scores of both algorithms with every seed, and the remaining share of the first task's score."""
    result: dict[str, Any] = {"steps_of_each_task": STEPS, "settings": SETTINGS, "data": DATA}
    for algorithm in (IMPALA, CLEAR):
        runs = [scores(algorithm, seed) for seed in range(seeds)]
        retention = [run[-1][0] / run[0][0] for run in runs]
        result[algorithm.__name__] = {
            "retention": round(statistics.fmean(retention), 4),
            "retention_of_each_seed": [round(kept, 4) for kept in retention],
            "learned": [round(statistics.fmean(run[task][task] for run in runs), 4) for task in range(TASKS)],
            "scores": [[[round(score, 4) for score in row] for row in run] for run in runs],
        }
    return result


if __name__ == "__main__":
    main(__doc__, "retention/mappings", compare)

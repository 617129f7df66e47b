"""Draw the learning curves behind the scores, from the JSON under `benchmarks/results/`.

    python benchmarks/curves.py

writes `curves.svg`, `compared.svg`, `starpilot.svg`, `three_tasks.svg` and `results.svg` in `docs/figures/`.
Needs matplotlib.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import results_page
from table import GOALS, HERE, RESULTS, load_scores
from zoo import environment

from lightning_rl.tools import plots
from lightning_rl.tools.curves import Series

FIGURE = HERE.parent / "docs/figures/curves.svg"
COMPARED = HERE.parent / "docs/figures/compared.svg"
STARPILOT = HERE.parent / "docs/figures/starpilot.svg"
THREE_TASKS = HERE.parent / "docs/figures/three_tasks.svg"
CURVES = {
    "rollout/episode_return": "training, sampled actions",
    "val/episode_return": "evaluation, mode of the policy",
}


def draw(path: Path = FIGURE, results: Path = RESULTS, algorithm: str = "*") -> None:
    """Write a figure with a panel for each configuration: training and evaluation returns against steps."""
    goals: dict[str, float] = json.loads(GOALS.read_text())
    panels = [panel(name, runs, goals.get(name)) for name, runs in sorted(load_scores(results, algorithm).items())]
    plots.draw(panels, [path], statistic="iqm", columns=min(4, len(panels)), shared_legend=True)


def compare(path: Path, task: str, *names: str, results: Path = RESULTS) -> None:
    """Write a figure of algorithms on one environment, as `lightning-rl plot` draws it."""
    scores, key = load_scores(results), "rollout/episode_return"
    found = {name: scores[f"{name.lower()}/{task}"] for name in names}
    compared = [
        plots.Curve(name, [Series(*np.array(run["curve"][key], float).T) for run in runs])
        for name, runs in found.items()
    ]
    title = environment(found[names[0]][0]["settings"])
    plots.draw([plots.Panel(title, compared, "episode return (training)")], [path])


def three_tasks(path: Path = THREE_TASKS, results: Path = RESULTS) -> None:
    """Write the figure of the README: training returns of PPO on CartPole, LunarLander and HalfCheetah."""
    scores, key = load_scores(results, "ppo"), "rollout/episode_return"
    panels = [
        plots.Panel(
            f"{environment(runs[0]['settings'])}, {len(runs)} seeds",
            [plots.Curve("PPO", [Series(*np.array(run["curve"][key], float).T) for run in runs])],
        )
        for runs in (scores[f"ppo/{name}"] for name in ("cartpole", "lunarlander", "mujoco_halfcheetah"))
    ]
    plots.draw(panels, [path], statistic="iqm", columns=3, shared_legend=True)


def panel(name: str, runs: list[dict[str, Any]], goal: float | None) -> plots.Panel:
    """Return the panel of one configuration."""
    logged = {label: [run["curve"][key] for run in runs if key in run["curve"]] for key, label in CURVES.items()}
    curves = [
        plots.Curve(label, [Series(*np.array(rows, float).T) for rows in found])
        for label, found in logged.items()
        if found
    ]
    seeds = "1 seed" if len(runs) == 1 else f"{len(runs)} seeds"
    return plots.Panel(f"{name}\n{environment(runs[0]['settings'])}, {seeds}", curves, goal=goal)


if __name__ == "__main__":
    draw()
    compare(COMPARED, "cartpole", "PPO", "A2C")
    compare(STARPILOT, "procgen_starpilot_5m", "PPG", "PPO")
    three_tasks()
    results_page.draw(load_scores())

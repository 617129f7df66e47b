"""Draw the learning curves behind the scores, from the JSON under `benchmarks/results/`.

    python benchmarks/curves.py

writes `docs/figures/curves.svg`. Needs matplotlib.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from table import GOALS, HERE, RESULTS, load_scores

FIGURE = HERE.parent / "docs/figures/curves.svg"
COLUMNS = 4
_TRAINING, _EVALUATION, _GOAL = "#0072b2", "#d55e00", "#555555"


def draw(path: Path = FIGURE, results: Path = RESULTS, algorithm: str = "*") -> None:
    """Write a figure with a panel for each configuration: returns of training and of evaluation against steps."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    # The same file from the same results.
    mpl.rcParams |= {"svg.hashsalt": "curves", "svg.fonttype": "none", "font.size": 8}
    goals: dict[str, float] = json.loads(GOALS.read_text())
    scores = sorted(load_scores(results, algorithm).items())
    columns = min(COLUMNS, len(scores))
    rows = -(-len(scores) // columns)
    size = (max(5.5, 3 * columns), 2.3 * rows + 0.4 * (rows == 1))
    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    for axis in axes.flat[len(scores) :]:
        axis.set_axis_off()
    for axis, (name, runs) in zip(axes.flat, scores, strict=False):
        _draw_runs(axis, runs)
        if name in goals:
            axis.axhline(goals[name], color=_GOAL, linestyle=":", linewidth=1, label="goal")
        seeds = "1 seed" if len(runs) == 1 else f"{len(runs)} seeds"
        axis.set_title(f"{name}\n{runs[0]['settings']['data']['env_id']}, {seeds}", fontsize=8)
        axis.xaxis.set_major_formatter(lambda steps, _: f"{steps / 1e6:g}M" if steps >= 1e6 else f"{steps / 1e3:g}k")
        axis.locator_params(nbins=5)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in axes[:, 0]:
        axis.set_ylabel("episode return")
    for axis in axes.flat[max(0, len(scores) - columns) : len(scores)]:
        axis.set_xlabel("environment steps")
    handles = {
        label: handle for axis in axes.flat for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=3, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _draw_runs(axis: Any, runs: list[dict[str, Any]]) -> None:  # noqa: ANN401 - matplotlib has no types
    for key, color, label in (
        ("rollout/episode_return", _TRAINING, "training, sampled actions"),
        ("val/episode_return", _EVALUATION, "evaluation, mode of the policy"),
    ):
        curves = [run["curve"].get(key, []) for run in runs]
        faint = 0.35 if len(runs) > 1 else 1.0
        for curve in curves:
            axis.plot(*_columns(curve), color=color, alpha=faint, linewidth=0.8, label=None if len(runs) > 1 else label)
        if len(runs) > 1:  # seeds of one configuration log at the same steps, but for the last ones
            together = [rows for rows in zip(*curves, strict=False) if len({step for step, _ in rows}) == 1]
            mean = [(rows[0][0], statistics.fmean(value for _, value in rows)) for rows in together]
            axis.plot(*_columns(mean), color=color, linewidth=1.4, label=label)


def _columns(curve: list[Any]) -> tuple[list[float], list[float]]:
    return [step for step, _ in curve], [value for _, value in curve]


if __name__ == "__main__":
    draw()

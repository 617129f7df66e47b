"""The page `docs/results.md`: scores beside published ones, equal settings, and the time to a return.

`python benchmarks/table.py` writes the page, `python benchmarks/curves.py` its figure, and
`python benchmarks/reproduce_all.py --pages` both.
"""

from __future__ import annotations

import functools
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import equal_settings
import numpy as np
import zoo

from lightning_rl.tools.curves import interquartile_mean, interval

PAGE = zoo.HERE.parent / "docs" / "results.md"
FIGURE = zoo.HERE.parent / "docs/figures/results.svg"
RANDOM = zoo.HERE / "random_scores.json"
LAST = 5
"""Number of last logged training returns that are averaged."""
METRICS = {
    "final": "final policy",
    "maximum": "evaluation with the best mean",
    "training": "last training returns",
    "training_maximum": "best training returns",
}

INTRODUCTION = f"""# Results

![Scores between random actions and the published scores](figures/results.svg)

0 is the score of random actions and 1 the published score. Points are means over seeds, and lines 95 % bootstrap
intervals of the mean. The row at the top is the interquartile mean (IQM) over all seeds and tasks of the figure,
with a stratified bootstrap interval. The figure leaves out rows with fewer than three seeds, rows with "more steps",
and rows whose published score is not above random actions.

Each row of the table compares scores of the same kind. A published maximum over training of the mean over seeds is
compared with the evaluation that has the best mean over the seeds; published maxima of the training returns of each run
are compared with the best logged training returns of each run, and published training returns with the last {LAST}
logged training returns. Other published scores are compared with the final policy over 100 episodes ("as before": the
score in the column before). Scores here are rounded to the decimals of the published mean before they are compared.
Bootstrap intervals of few seeds are too narrow: three seeds give the range of the seeds. If scores have a normal
distribution, it contains the true mean in 75 % of cases; the interval of ten seeds does in 90 %. In the last column:

* **beats**: the lower bound of the interval is at or above the published mean
* **matches**: the interval contains the published mean, and the mean here is at least 90 % of the published mean
* **below**: everything else
* "one run": the source trained a single agent, so its score says little about another seed
* "more steps": trained for over 5 % more environment steps than the published run
* "equal": the mean here is the published mean, which is often the highest possible return

"""
ENDING = """
The [model zoo](zoo.md) has all configurations, also those without a published mean, and runs that were stopped early.
All runs use the hyper-parameters of the shipped configurations.

## Same update as other libraries

[Presets for five libraries](same_update.md) give the same parameters after an update as these libraries, to 1e-6.
"""


@dataclass(frozen=True)
class Row:
    """One comparison.

    Attributes:
        name: Name of the configuration.
        values: Own score of each seed, by the metric of the source.
        final: Own score of each seed by the final policy.
        steps: Own environment steps.
        published: Entry of `published.json`.
        source: Its source.
    """

    name: str
    values: list[float]
    final: list[float]
    steps: int
    published: Mapping[str, str]
    source: Mapping[str, Any]

    @property
    def mean(self) -> float:
        """Published mean."""
        return float(self._published_mean)

    @property
    def outcome(self) -> str:
        """How the scores of the seeds compare with the published mean."""
        return verdict(self.values, self.mean, self._decimals)

    @property
    def is_equal(self) -> bool:
        """Whether the own mean, rounded as the published one, is the published mean."""
        return round(statistics.fmean(self.values), self._decimals) == self.mean

    @property
    def _published_mean(self) -> str:
        return self.published["score"].partition(" ")[0]

    @property
    def _decimals(self) -> int:
        return len(self._published_mean.partition(".")[2])

    @property
    def has_more_steps(self) -> bool:
        """Whether the own runs are longer by more than 5 %."""
        return self.steps > 1.05 * int(self.published["steps"].replace(",", ""))

    @property
    def verdict(self) -> str:
        """Outcome, with the warnings that it needs."""
        warnings = {"one run": self.source["seeds"] == 1, "more steps": self.has_more_steps, "equal": self.is_equal}
        return ", ".join([f"**{self.outcome}**", *(name for name, applies in warnings.items() if applies)])


def verdict(values: Sequence[float], published: float, decimals: int = 6) -> str:
    """Return how the scores of seeds compare with a published mean that is rounded to some decimals."""
    if len(values) < 3:
        return "fewer than three seeds"
    mean, low, high = (round(x, decimals) for x in (statistics.fmean(values), *zoo.interval(values)))
    if low >= published:
        return "beats"
    is_close = mean >= published - 0.1 * abs(published)
    return "matches" if high >= published and is_close else "below"


def scores(runs: Sequence[Mapping[str, Any]], metric: str) -> list[float]:
    """Return the score of each seed by the metric of a source."""
    if metric != "maximum":
        return [_score(run, metric) for run in runs]
    curves = [dict(run["curve"]["val/episode_return"]) for run in runs]
    shared = sorted(set.intersection(*map(set, curves)))
    best = max(shared, key=lambda step: statistics.fmean(curve[step] for curve in curves))
    return [curve[best] for curve in curves]


def _score(run: Mapping[str, Any], metric: str) -> float:
    if metric in ("training", "training_maximum"):
        curve = run["curve"]  # published returns are of whole games, also where a lost life ends a training episode
        returns = [value for _, value in curve.get("rollout/game_return", curve["rollout/episode_return"])]
        return max(returns) if metric == "training_maximum" else statistics.fmean(returns[-LAST:])
    return float(run["evaluation"]["mean"])


def rows(runs: Mapping[str, Sequence[dict[str, Any]]]) -> list[Row]:
    """Return the configurations with results and a published mean."""
    published = json.loads(zoo.PUBLISHED.read_text())
    found = []
    for name, entry in sorted(published["scores"].items()):
        source = published["sources"][entry["source"]]
        if name in runs and source["metric"] in METRICS:
            values, final = (scores(runs[name], metric) for metric in (source["metric"], "final"))
            found.append(Row(name, values, final, max(run["env_steps"] for run in runs[name]), entry, source))
    return found


def page(runs: Mapping[str, Sequence[dict[str, Any]]], results: Path = zoo.RESULTS) -> str:
    """Return the page from the results of every configuration, by seed."""
    found = rows(runs)
    head = ["configuration", "seeds", "steps", "final policy", "compared", "published", "outcome"]
    table = [head, ["---"] * len(head), *map(_cells, found)]
    return INTRODUCTION + _summary(found) + _markdown(table) + ENDING + _equal(results) + _times(results)


def _summary(found: Sequence[Row]) -> str:
    names: dict[str, list[str]] = {}
    for row in found:
        names.setdefault(row.outcome, []).append(f"`{row.name}`")
    order = ("beats", "matches", "below", "fewer than three seeds")
    lines = [
        f"* {outcome}, {len(names[outcome])}: {', '.join(names[outcome])}\n" for outcome in order if outcome in names
    ]
    return f"Of {len(found)} rows:\n\n" + "".join(lines) + "\n"


def _cells(row: Row) -> list[str]:
    theirs, source = row.published, row.source
    of = f", {theirs['of']}" if "of" in theirs else ""
    seeds = "1 run" if source["seeds"] == 1 else f"{source['seeds']} seeds"
    return [
        f"[`{row.name}`](../configs/{row.name}.yaml)",
        str(len(row.values)),
        f"{row.steps:,}",
        _with_interval(row.final),
        "as before" if source["metric"] == "final" else f"{_with_interval(row.values)}, {METRICS[source['metric']]}",
        f"{theirs['score']} after {theirs['steps']} on {theirs['environment']}, {seeds}, "
        f"[{source['title']}]({source['url']}){of}",
        row.verdict,
    ]


def _with_interval(values: Sequence[float]) -> str:
    mean = statistics.fmean(values)
    digits = 1 if abs(mean) >= 5 else 3
    if len(values) == 1:
        return f"{mean:.{digits}f}"
    low, high = zoo.interval(values)
    middle = float(interquartile_mean(np.array(values)))
    iqm = f", IQM {middle:.{digits}f}" if len(values) >= 4 else ""
    return f"{mean:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]{iqm}"


def _equal(results: Path) -> str:
    """Return the section on equal settings; empty without results."""
    table = []
    for task in equal_settings.TASKS:
        pair = [equal_settings.load(task, name, results / "equal_settings") for name in equal_settings.LIBRARIES]
        if not all(pair):
            continue
        seeds = min(map(len, pair))
        scores = [[run["last_100"] for run in runs[:seeds]] for runs in pair]
        (low, high), (their_low, their_high) = (zoo.interval(values) for values in scores)
        goal, env_id = (equal_settings.measure.WORKLOADS[task][key] for key in ("goal", "env_id"))
        overlap = "yes" if low <= their_high and their_low <= high else "no"
        costs = [_reached([run["reached"] for run in runs[:seeds]]) for runs in pair]
        table.append([env_id, str(seeds), *map(_with_interval, scores), overlap, str(goal), *costs])
    if not table:
        return ""
    head = ["task", "seeds", "lightning-rl", "Stable-Baselines3", "intervals overlap", "goal"]
    head += ["CPU s to the goal", "CPU s of Stable-Baselines3"]
    return _EQUAL_SETTINGS + _markdown([head, ["---"] * len(head), *table])


_EQUAL_SETTINGS = """
## Equal settings

PPO here and in Stable-Baselines3 with the same hyper-parameters: mean return of the last 100 training episodes, and the
median CPU seconds of the seeds that reach the goal. The two libraries ran in turns on one thread of a busy machine,
hence CPU time. `python benchmarks/equal_settings.py` runs what is missing.

"""


def _reached(found: Sequence[Mapping[str, float] | None]) -> str:
    costs = [one["cpu_seconds"] for one in found if one is not None]
    if not costs:
        return "not reached"
    return f"{statistics.median(costs):.1f}" + (
        f", {len(costs)} of {len(found)} seeds" if len(costs) < len(found) else ""
    )


def _times(results: Path) -> str:
    """Return the section on the time to a return; empty without results."""
    path = results / "time_to_return.json"
    if not path.exists():
        return ""
    found = json.loads(path.read_text())
    medians = found["medians"]
    names = sorted(medians, key=lambda name: medians[name].get("cpu_seconds", float("inf")))
    table = [
        [
            name,
            medians[name]["version"],
            f"{medians[name]['cpu_seconds']:.1f}" if "cpu_seconds" in medians[name] else "not reached",
            f"{medians[name]['env_steps']:,.0f}" if "env_steps" in medians[name] else "",
            f"{medians[name]['reached']} of {medians[name]['seeds']}",
            f"{medians[name]['sps_cpu']:,.0f}",
        ]
        for name in names
    ]
    head = ["library", "version", "CPU s to 475", "environment steps", "seeds", "steps per CPU second"]
    return _TIMES.format(steps=found["steps"]) + _markdown([head, ["---"] * len(head), *table]) + _REMARKS


_TIMES = """
## Time to a return of 475 on CartPole

PPO with the same hyper-parameters (workload W1 of the [benchmarks](../benchmarks/README.md)), {steps:,} environment
steps, one thread. CPU seconds from the end of the imports until the mean return of 20 episodes reaches 475, and steps
until then: medians over the seeds that reach it. Building environments and compiling count. The libraries ran in turns
on a busy machine.

"""
_REMARKS = """
* `jax` is a whole-program PPO in JAX: environment, rollout and update are one compiled program. Once compiled, it has
  the most steps per second of all rows; most of its time to the return is compiling.
* `lightning_rl, native` steps Gymnasium's own vectorized CartPole; `torch, compiled` compiles environment and update.
* `pufferlib` steps Gymnasium's CartPole: `pufferlib-core` has none of PufferLib's environments in C, which are faster.
* `rsl_rl` has continuous actions only: the sign of a Gaussian is the action.
"""


def _markdown(table: Sequence[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(cells)} |\n" for cells in table)


def normalized(found: Sequence[Row]) -> dict[str, np.ndarray[Any, Any]]:
    """Return the scores of each seed with 0 for random actions and 1 for the published mean.

    Rows without a better published score than random actions are left out.
    """
    low = json.loads(RANDOM.read_text())
    shown = [row for row in found if len(row.values) >= 3 and row.mean > low.get(row.name, math.inf)]
    shown = [row for row in shown if not row.has_more_steps]
    return {row.name: (np.array(row.values) - low[row.name]) / (row.mean - low[row.name]) for row in shown}


def draw(runs: Mapping[str, Sequence[dict[str, Any]]], path: Path = FIGURE) -> None:
    """Write the figure."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    from lightning_rl.tools.plots import COLORS

    scores = normalized(rows(runs))

    def middle(*tasks: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return interquartile_mean(np.concatenate(tasks))

    lines = {
        f"all {len(scores)} tasks (IQM)": (
            float(middle(*scores.values())),
            interval(middle, *scores.values()),
        )
    }
    mean = functools.partial(np.mean, axis=None)
    lines |= {name: (float(mean(values)), zoo.interval(values.tolist())) for name, values in scores.items()}
    with mpl.rc_context({"svg.hashsalt": "results", "svg.fonttype": "none", "font.size": 8}):
        figure = Figure(figsize=(6.5, 0.9 + 0.22 * len(lines)), layout="constrained")
        axis = figure.subplots()
        for row, (center, (low, high)) in enumerate(lines.values()):
            style = {"color": COLORS[1 if row == 0 else 0], "linewidth": 3.0 if row == 0 else 1.6}
            axis.hlines(row, low, high, **style)
            axis.plot(center, row, "o", color=style["color"], markersize=5 if row == 0 else 3.5)
        axis.axvline(1, color="#555555", linestyle=":", linewidth=1)
        axis.set(yticks=range(len(lines)), xlabel="score: 0 random actions, 1 published")
        axis.set_yticklabels(list(lines))
        axis.set_xlim(min(0, axis.get_xlim()[0]), axis.get_xlim()[1])
        axis.invert_yaxis()
        axis.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, metadata={"Date": None})

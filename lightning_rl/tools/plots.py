"""Figures of learning curves."""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from lightning_rl.files import relative
from lightning_rl.tools.curves import (
    Array,
    Log,
    Series,
    Statistic,
    by_experiment,
    find_logs,
    interval,
    joined,
    min_max_normalized,
    performance_profile,
    probability_of_improvement,
    same_seed,
    summarize,
)
from lightning_rl.validation import ConfigurationError, as_list, check, check_installed, check_positive_int

# By Okabe and Ito, for color-blind readers.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
_STAGES = {"rollout": "training", "val": "validation", "test": "test"}
_SUFFIXES = (".png", ".svg")
_WITHOUT_DATE = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
_GOAL = "#555555"
_MAX_SINGLE_RUNS = 10
_LABEL_WIDTH = 48  # characters
_THRESHOLDS = 201
Kind = Literal["curves", "profiles", "improvement"]


@dataclass
class Curve:
    """One curve of a panel, with one series per seed."""

    label: str
    runs: Sequence[Series]


@dataclass
class Panel:
    """One pair of axes; `goal` is the height of a dotted line."""

    title: str
    curves: Sequence[Curve]
    ylabel: str = "episode return"
    goal: float | None = None


def draw(
    panels: Sequence[Panel],
    paths: Sequence[Path],
    *,
    statistic: Statistic = "iqm",
    confidence: float = 0.95,
    columns: int = 4,
    shared_legend: bool = False,
) -> None:
    """Write a figure of learning curves into `.png`, `.svg` or `.pdf` files; equal runs give equal files.

    A line is the statistic over the seeds of a curve, and a band its bootstrap interval at level `confidence`
    (`lightning_rl.tools.curves.summarize`). Up to ten single seeds are thin lines. `columns` panels are side by side.
    `shared_legend` draws one legend for all panels, which must have the same curves, instead of one legend per panel.
    A missing Matplotlib, or seeds of a curve without common steps, raise a `ConfigurationError`.
    """
    check_positive_int("columns", columns)
    columns = min(columns, len(panels))
    width, height = (3.0, 2.3) if columns > 2 else (5.0, 3.4)
    rows = -(-len(panels) // columns)
    caption = _caption(panels, statistic, confidence)
    with _figure((width * columns, height * rows), paths, caption, shared_legend) as figure:
        axes = figure.subplots(rows, columns, squeeze=False).flatten()
        for axis in axes[len(panels) :]:
            axis.set_axis_off()
        for number, (axis, panel) in enumerate(zip(axes, panels, strict=False)):
            _draw_panel(axis, panel, statistic, confidence, counts=not shared_legend)
            if number >= len(panels) - columns:
                axis.set_xlabel("environment steps")
            if number % columns == 0 or panel.ylabel != panels[number - 1].ylabel:
                axis.set_ylabel(panel.ylabel)
            if not shared_legend:
                # Outside of the layout, so that long labels do not shrink the curves.
                axis.legend(fontsize=7).set_in_layout(False)


@contextlib.contextmanager
def _figure(size: tuple[float, float], paths: Sequence[Path], caption: str, shared: bool = False) -> Iterator[Any]:
    """Yield an empty figure, and write what was drawn into files, with a caption; equal drawings give equal files."""
    check_installed("a plot", "plot", "matplotlib")
    import matplotlib as mpl
    from matplotlib.figure import Figure

    settings: Any = {"svg.hashsalt": "curves", "svg.fonttype": "none", "font.size": 8, "savefig.dpi": 200}
    settings |= dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False)
    with mpl.rc_context(settings):
        figure = Figure(figsize=size, layout="constrained")
        yield figure
        handles = [axis.get_legend_handles_labels() for axis in figure.axes if shared]
        lines = {label: line for pair in handles for line, label in zip(*pair, strict=True)}
        options: Any = {"loc": "outside lower center", "ncols": max(1, len(lines)), "title": caption}
        figure.legend([*lines.values()], [*lines], **options)
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # saving one file must not change the layout of the next
        for path in paths:
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, metadata=_WITHOUT_DATE.get(path.suffix))


def draw_profiles(scores: Mapping[str, Array], paths: Sequence[Path], *, label: str, confidence: float = 0.95) -> None:
    """Write a figure of performance profiles: the share of runs with a score above each threshold.

    Scores are `[runs, environments]` by algorithm; `confidence` is the level of the bands.
    """
    everything = np.concatenate([one.ravel() for one in scores.values()])
    thresholds = np.linspace(everything.min(), everything.max(), _THRESHOLDS)
    with _figure((5.0, 3.6), paths, f"band: {100 * confidence:.4g}% stratified bootstrap interval") as figure:
        axis = figure.subplots()
        for number, (name, one) in enumerate(scores.items()):
            color = COLORS[number % len(COLORS)]
            profile = functools.partial(performance_profile, thresholds=thresholds)
            low, high = interval(profile, one, confidence=confidence)
            axis.plot(thresholds, profile(one), color=color, linewidth=1.4, label=f"{name}, {len(one)} seeds")
            axis.fill_between(thresholds, low, high, color=color, alpha=0.2, linewidth=0)
        axis.set(xlabel=f"{label} τ", ylabel="share of runs with a score above τ", ylim=(0, 1.02))
        axis.legend()


def draw_improvement(scores: Mapping[str, Array], paths: Sequence[Path], *, confidence: float = 0.95) -> None:
    """Write a figure of the probability of improvement of each algorithm over each later one.

    Scores are `[runs, environments]` by algorithm; `confidence` is the level of the bars.
    """
    pairs = list(itertools.combinations(scores, 2))
    size = 5.0, 1.2 + 0.4 * len(pairs)
    with _figure(size, paths, f"line: estimate; bar: {100 * confidence:.4g}% stratified bootstrap interval") as figure:
        axis = figure.subplots()
        for row, (first, second) in enumerate(pairs):
            both = scores[first], scores[second]
            low, high = interval(probability_of_improvement, *both, confidence=confidence)
            axis.barh(row, high - low, left=low, height=0.6, color=COLORS[row % len(COLORS)], alpha=0.4)
            axis.vlines(probability_of_improvement(*both), row - 0.3, row + 0.3, color="black", linewidth=1.4)
        axis.axvline(0.5, color=_GOAL, linestyle=":", linewidth=1)
        axis.set(xlabel="P(a run of the first > a run of the second)", xlim=(0, 1), yticks=range(len(pairs)))
        axis.set_yticklabels([textwrap.fill(f"{first} > {second}", _LABEL_WIDTH) for first, second in pairs])
        axis.invert_yaxis()


def _draw_panel(axis: Any, panel: Panel, statistic: Statistic, confidence: float, counts: bool) -> None:
    from matplotlib.ticker import EngFormatter

    for number, curve in enumerate(panel.curves):
        color = COLORS[number % len(COLORS)]
        found = summarize(curve.runs, statistic, confidence)
        seeds = "1 seed" if len(curve.runs) == 1 else f"{len(curve.runs)} seeds"
        label = textwrap.fill(f"{curve.label}, {seeds}", _LABEL_WIDTH) if counts else curve.label
        marker = "o" if len(found.steps) == 1 else None  # a single point gives no line
        axis.plot(found.steps, found.center, color=color, linewidth=1.4, marker=marker, markersize=3, label=label)
        if found.low is None:
            continue
        axis.fill_between(found.steps, found.low, found.high, color=color, alpha=0.2, linewidth=0)
        for run in curve.runs if len(curve.runs) <= _MAX_SINGLE_RUNS else ():
            axis.plot(*run, color=color, alpha=0.4, linewidth=0.5)
    if panel.goal is not None:
        axis.axhline(panel.goal, color=_GOAL, linestyle=":", linewidth=1, label="goal")
    axis.set_title(panel.title, fontsize=8)
    axis.xaxis.set_major_formatter(EngFormatter(sep=""))
    axis.locator_params(nbins=5)


def _caption(panels: Sequence[Panel], statistic: Statistic, confidence: float) -> str:
    counts = {len(curve.runs) for panel in panels for curve in panel.curves} - {1}
    if not counts:
        return "one seed each: no interval"
    name = "interquartile mean" if statistic == "iqm" and max(counts) >= 4 else "mean"
    few = " (mean of fewer than four)" if name != "mean" and min(counts) < 4 else ""
    return f"line: {name} over seeds{few}; band: its {100 * confidence:.4g}% bootstrap interval; thin: each seed"


def draw_runs(
    runs: Sequence[str],
    metric: str | list[str] = "rollout/episode_return",
    statistic: Statistic = "iqm",
    confidence: float = 0.95,
    columns: int = 3,
    kind: Kind = "curves",
    out: str = "curves",
) -> str:
    """Run the command `lightning-rl plot` and return the names of the files.

    Each metric and environment has a panel. Warns of repeated seeds, and of runs that were resumed with other settings.

    Args:
        runs: Folders of runs or of several runs, each as `RUN` or `NAME=RUN`.
        metric: Key of the metric in the log, or several as [a, b].
        statistic: Interquartile mean or mean over seeds.
        confidence: Confidence of the bootstrap interval over seeds.
        columns: Maximum number of panels side by side.
        kind: curves; or, of the last value of each run, profiles: the share of runs above each score, or improvement:
            the probability that a run of one algorithm beats one of another.
        out: File to write, .png, .svg or .pdf; without an ending both .png and .svg.
    """
    paths, metrics = _files(out), as_list(metric)  # before logs are read, which takes a while
    files = ", ".join(map(relative, paths))
    check(kind == "curves" or len(metrics) == 1, "metric", metrics, f"one metric with kind={kind}")
    experiments = _experiments(runs)
    for warning in _warnings(experiments, metrics):
        print(f"WARNING: {warning}", file=sys.stderr)
    if kind != "curves":
        scores, environments = _final_scores(experiments, metrics[0])
        if kind == "improvement":
            check(len(scores) > 1, "runs", list(scores), "runs of at least two algorithms with kind=improvement")
            draw_improvement(scores, paths, confidence=confidence)
        else:
            label = _axis_label(metrics[0])
            if len(environments) > 1:
                scores, label = min_max_normalized(scores), f"{label}, 0 and 1 the extremes of each environment"
            draw_profiles(scores, paths, label=label, confidence=confidence)
        return files
    panels = [panel for metric in metrics for panel in _panels(experiments, metric)]
    draw(panels, paths, statistic=statistic, confidence=confidence, columns=columns)
    return files


def _files(out: str) -> list[Path]:
    path = Path(out)
    if path.suffix in (*_SUFFIXES, ".pdf"):
        return [path]
    # In `v1.5`, `.5` is not a suffix.
    known = f"{', '.join(_SUFFIXES)} or .pdf, or none, which writes {' and '.join(_SUFFIXES)}"
    check(not re.fullmatch(r"\.[a-zA-Z]\w*", path.suffix), "out", out, f"a file that ends in {known}")
    return [path.with_name(path.name + suffix) for suffix in _SUFFIXES]


def _experiments(runs: Sequence[str]) -> dict[str, list[Log]]:
    named: dict[str, list[Log]] = {}
    unnamed: list[Log] = []
    for argument in runs:
        name, equals, path = argument.partition("=")
        if equals and not Path(argument).exists():
            named.setdefault(name, []).extend(find_logs(path))
        else:
            unnamed += find_logs(argument)
    # Overlapping folders name the same run twice.
    once = {log.folder.resolve(): log for log in unnamed}
    return {name: joined(logs) for name, logs in named.items()} | by_experiment(joined(once.values()))


def _warnings(experiments: dict[str, list[Log]], metrics: Sequence[str]) -> Iterator[str]:
    """Yield warnings of runs that lack a metric, repeat a seed of their curve or were resumed with other settings."""
    everything = [log for logs in experiments.values() for log in logs]
    for metric in metrics:
        without = [str(log.folder) for log in everything if metric not in log.scalars]
        if 0 < len(without) < len(everything):  # a metric that no log has is an error
            yield f"{metric} is not in the logs of these runs, which are left out: {', '.join(without)}"
    for name, logs in experiments.items():
        if repeated := same_seed(log for log in logs if any(metric in log.scalars for metric in metrics)):
            folders = ", ".join(str(log.folder) for log in repeated)
            yield (
                f"{name}: counted as further seeds, although another run of this curve has the same settings and "
                f"seed: {folders}; name the folders of the runs to draw"
            )
        for log in logs:
            if log.changes:
                yield f"{log.folder}: resumed with other settings: {'; '.join(log.changes)}"


def _panels(experiments: dict[str, list[Log]], metric: str) -> list[Panel]:
    panels: dict[str, list[Curve]] = {}
    for name, logs in experiments.items():
        for environment in dict.fromkeys(log.environment for log in logs):
            here = [log.scalars for log in logs if log.environment == environment]
            if found := [scalars[metric] for scalars in here if metric in scalars]:
                curves, label = panels.setdefault(environment, []), name.removesuffix(f" ({environment})")
                is_new = label not in [curve.label for curve in curves]
                check(is_new, "runs", f"{label}=...", "another name, since other runs have this one by default")
                curves.append(Curve(label, found))
    if not panels:
        known = ", ".join(sorted({key for logs in experiments.values() for log in logs for key in log.scalars}))
        expected = f"one of {known}" if known else "runs that have logged values; all of these logs are empty"
        raise ConfigurationError(f"metric={metric!r} is in no log: expected {expected}")
    return [Panel(environment, curves, _axis_label(metric)) for environment, curves in panels.items()]


def _final_scores(experiments: dict[str, list[Log]], metric: str) -> tuple[dict[str, Array], list[str]]:
    """Return the last values of a metric by algorithm, `[runs, environments]`, and the environments.

    An algorithm with missing environments or unequal numbers of runs raises a `ConfigurationError`.
    """
    found: dict[str, dict[str, list[float]]] = {}
    for panel in _panels(experiments, metric):
        for curve in panel.curves:
            found.setdefault(curve.label, {})[panel.title] = [float(run.values[-1]) for run in curve.runs]
    environments = sorted({environment for scores in found.values() for environment in scores})
    for name, scores in found.items():
        counts = {environment: len(scores.get(environment, ())) for environment in environments}
        expected = "at least one run, and the same number, in each environment"
        check(len({*counts.values()}) == 1, name, counts, expected)
    return {name: np.array([one[key] for key in environments]).T for name, one in found.items()}, environments


def _axis_label(metric: str) -> str:
    stage, _, name = metric.partition("/")
    words = name.replace("_", " ") if name else stage
    return f"{words} ({_STAGES[stage]})" if name and stage in _STAGES else words

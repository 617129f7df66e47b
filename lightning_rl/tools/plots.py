"""Figures of learning curves, drawn with matplotlib, and the logs of runs as such figures."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_rl.tools.curves import Log, Series, Statistic, by_experiment, find_logs, joined, same_seed, summarize
from lightning_rl.validation import ConfigurationError, check, check_positive_int, how_to_install

# Of Okabe and Ito: told apart by readers who do not see all colours.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
_STAGES = {"rollout": "training", "val": "validation", "test": "test"}
_SUFFIXES = (".png", ".svg")
_GOAL = "#555555"
_MOST_SINGLE_RUNS = 10
# Characters of a line of a legend.
_LABEL_WIDTH = 48


@dataclass
class Curve:
    """One line of a panel: runs of the same, with different seeds.

    Attributes:
        label: Its name.
        runs: What each of them logged.
    """

    label: str
    runs: Sequence[Series]


@dataclass
class Panel:
    """One pair of axes.

    Attributes:
        title: What is compared.
        curves: What to compare.
        ylabel: What the values are.
        goal: A value to be reached; None: there is none.
    """

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
    """Write a figure of learning curves: the same files from the same runs.

    A line is the statistic over the seeds of a curve and a band its bootstrap interval; each seed is a thin line, where
    there are no more than ten. One seed has no band. See `lightning_rl.tools.curves.summarize`.

    Args:
        panels: What to draw.
        paths: Files, whose suffixes say what they are: `.png`, `.svg`, `.pdf`.
        statistic: `iqm` or `mean`.
        confidence: Of the interval.
        columns: Panels side by side at the most.
        shared_legend: One legend for all panels, which have the same curves, in the place of one with numbers of seeds
            in each.

    Raises:
        ConfigurationError: Matplotlib is not installed, an option is out of range, or the seeds of a curve have no
            steps in common.
    """
    check_positive_int("columns", columns)
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise ConfigurationError(f"plots need matplotlib, which is not installed: {how_to_install('plot')}") from error
    settings: Any = {"svg.hashsalt": "curves", "svg.fonttype": "none", "font.size": 8, "savefig.dpi": 200}
    for path in paths:
        with mpl.rc_context(settings):
            # One for each file: a layout begins with that of the file before.
            figure = _figure(panels, min(columns, len(panels)), shared_legend, statistic, confidence)
            names = _names(figure) if shared_legend else {}
            title = _caption(panels, statistic, confidence)
            below = {"loc": "outside lower center", "frameon": False, "ncols": max(1, len(names)), "title": title}
            figure.legend(list(names.values()), list(names), **below)
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, **({"metadata": {"Date": None}} if path.suffix == ".svg" else {}))


def _figure(panels: Sequence[Panel], columns: int, shared_legend: bool, statistic: Statistic, confidence: float) -> Any:  # noqa: ANN401 - matplotlib is imported where it is used
    from matplotlib.figure import Figure

    rows = -(-len(panels) // columns)
    width, height = (3.0, 2.3) if columns > 2 else (5.0, 3.4)
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
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
            # Curves keep their place, however long the names are.
            axis.legend(frameon=False, fontsize=7).set_in_layout(False)
    return figure


def _names(figure: Any) -> dict[str, Any]:  # noqa: ANN401
    """Return the lines of all panels by their names."""
    return {label: line for axis in figure.axes for line, label in zip(*axis.get_legend_handles_labels(), strict=True)}


def _caption(panels: Sequence[Panel], statistic: Statistic, confidence: float) -> str:
    """Say what lines and bands are, as far as there are such."""
    counts = {len(curve.runs) for panel in panels for curve in panel.curves} - {1}
    if not counts:
        return "one seed each: no interval"
    what = "interquartile mean" if statistic == "iqm" and max(counts) >= 4 else "mean"
    few = " (mean of fewer than four)" if what != "mean" and min(counts) < 4 else ""
    return f"line: {what} over seeds{few}; band: its {confidence:.0%} bootstrap interval; thin: each seed"


def _draw_panel(axis: Any, panel: Panel, statistic: Statistic, confidence: float, counts: bool) -> None:  # noqa: ANN401
    for number, curve in enumerate(panel.curves):
        color = COLORS[number % len(COLORS)]
        found = summarize(curve.runs, statistic, confidence)
        seeds = "1 seed" if len(curve.runs) == 1 else f"{len(curve.runs)} seeds"
        label = textwrap.fill(f"{curve.label}, {seeds}", _LABEL_WIDTH) if counts else curve.label
        marker = "o" if len(found.steps) == 1 else None  # a line needs two
        axis.plot(found.steps, found.center, color=color, linewidth=1.4, marker=marker, markersize=3, label=label)
        if found.low is None:
            continue
        axis.fill_between(found.steps, found.low, found.high, color=color, alpha=0.2, linewidth=0)
        for run in curve.runs if len(curve.runs) <= _MOST_SINGLE_RUNS else ():
            axis.plot(*run, color=color, alpha=0.4, linewidth=0.5)
    if panel.goal is not None:
        axis.axhline(panel.goal, color=_GOAL, linestyle=":", linewidth=1, label="goal")
    axis.set_title(panel.title, fontsize=8)
    axis.xaxis.set_major_formatter(_thousands)
    axis.locator_params(nbins=5)
    axis.spines[["top", "right"]].set_visible(False)


def _thousands(steps: float, _: object) -> str:
    """Write a number of steps as 500, 20k or 1.5M."""
    return f"{steps / 1e6:g}M" if steps >= 1e6 else f"{steps / 1e3:g}k" if steps >= 1e3 else f"{steps:g}"


def draw_runs(
    runs: Sequence[str],
    metrics: Sequence[str],
    out: str,
    *,
    statistic: Statistic = "iqm",
    confidence: float = 0.95,
    columns: int = 3,
) -> list[Path]:
    """Draw the logs of runs, one panel for each metric and environment; warn of runs that are not what they seem.

    Args:
        runs: Folders, or `name=folder`.
        metrics: Keys of the log.
        out: File to write; without an ending both `.png` and `.svg`.
        statistic: Over seeds.
        confidence: Of the interval over seeds.
        columns: Maximum number of panels side by side.

    Returns:
        The files.

    Raises:
        ConfigurationError: There are no such logs, they do not have a metric, or matplotlib is not installed.
    """
    paths = _files(out)  # before logs are read, which takes a while
    experiments = _experiments(runs)
    _warn_of_same_seeds(experiments)
    _warn_of_changes(experiments)
    panels = [panel for metric in metrics for panel in _panels(experiments, metric)]
    draw(panels, paths, statistic=statistic, confidence=confidence, columns=columns)
    return paths


def _files(out: str) -> list[Path]:
    """Return what is written: one file, or where the name has no ending one of each usual kind.

    Raises:
        ConfigurationError: It has an ending that means nothing here.
    """
    path = Path(out)
    if path.suffix in (*_SUFFIXES, ".pdf"):
        return [path]
    # What follows the point of `v1.5` is no ending.
    known = f"{', '.join(_SUFFIXES)} or .pdf, or none, which writes {' and '.join(_SUFFIXES)}"
    check(not re.fullmatch(r"\.[a-zA-Z]\w*", path.suffix), "out", out, f"a file that ends in {known}")
    return [path.with_name(path.name + suffix) for suffix in _SUFFIXES]


def _experiments(runs: Sequence[str]) -> dict[str, list[Log]]:
    """Return the runs of each curve by its name."""
    named: dict[str, list[Log]] = {}
    unnamed: list[Log] = []
    for argument in runs:
        name, equals, path = argument.partition("=")
        if equals and not Path(argument).exists():
            named.setdefault(name, []).extend(find_logs(path))
        else:
            unnamed += find_logs(argument)
    # Folders that overlap name the same run twice.
    once = {log.folder.resolve(): log for log in unnamed}
    return {name: joined(logs) for name, logs in named.items()} | by_experiment(joined(once.values()))


def _warn_of_same_seeds(experiments: dict[str, list[Log]]) -> None:
    """Say which runs a curve takes for seeds of their own, and are not."""
    for name, logs in experiments.items():
        for environment in dict.fromkeys(log.environment for log in logs):
            if again := same_seed(log for log in logs if log.environment == environment):
                folders = ", ".join(str(log.folder) for log in again)
                print(
                    f"WARNING: {name}: counted as further seeds, with the settings and the seed of another run of this "
                    f"curve: {folders}; name the folders of the runs that are to be drawn",
                    file=sys.stderr,
                )


def _warn_of_changes(experiments: dict[str, list[Log]]) -> None:
    """Say which runs were resumed with other settings."""
    for log in (log for logs in experiments.values() for log in logs if log.changes):
        text = f"WARNING: {log.folder}: resumed with other settings: {'; '.join(log.changes)}"
        print(text, file=sys.stderr)


def _panels(experiments: dict[str, list[Log]], metric: str) -> list[Panel]:
    """Return a panel for each environment in which the value was logged.

    Raises:
        ConfigurationError: It was logged nowhere.
    """
    panels: dict[str, list[Curve]] = {}
    for name, logs in experiments.items():
        for environment in dict.fromkeys(log.environment for log in logs):
            found = [log.scalars[metric] for log in logs if log.environment == environment and metric in log.scalars]
            if found:
                panels.setdefault(environment, []).append(Curve(name.removesuffix(f" ({environment})"), found))
    if not panels:
        known = sorted({key for logs in experiments.values() for log in logs for key in log.scalars})
        raise ConfigurationError(f"metric={metric!r} is in no log: expected one of {', '.join(known)}")
    return [Panel(environment, curves, _axis_label(metric)) for environment, curves in panels.items()]


def _axis_label(metric: str) -> str:
    """Return `rollout/episode_return` as words."""
    stage, _, name = metric.partition("/")
    words = name.replace("_", " ") if name else stage
    return f"{words} ({_STAGES[stage]})" if name and stage in _STAGES else words

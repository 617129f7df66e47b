"""`lightning-rl plot RUN…`: learning curves of runs, from their logs."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from lightning_rl.tools.curves import Log, by_experiment, find_logs, joined, same_seed
from lightning_rl.tools.plots import Curve, Panel, draw
from lightning_rl.validation import ConfigurationError, check

_METRIC = "rollout/episode_return"
_STAGES = {"rollout": "training", "val": "validation", "test": "test"}
_SUFFIXES = (".png", ".svg")


def plot(args: list[str]) -> None:
    """Draw the runs that are named in the arguments.

    Raises:
        ConfigurationError: There are no such logs, nothing in them is called so, or matplotlib is not installed.
        SystemExit: The arguments cannot be understood.
    """
    options = plot_parser().parse_args(args)
    paths = _files(options.out)  # before logs are read, which takes a while
    experiments = _experiments(options.runs)
    _warn_of_same_seeds(experiments)
    _warn_of_changes(experiments)
    panels = [panel for metric in options.metric or [_METRIC] for panel in _panels(experiments, metric)]
    draw(panels, paths, statistic=options.statistic, confidence=options.confidence, columns=options.columns)
    print("\n".join(map(str, paths)), flush=True)


def plot_parser() -> argparse.ArgumentParser:
    """Return the parser of its arguments."""
    result = argparse.ArgumentParser(
        "lightning-rl plot", description="Draw learning curves of runs from their TensorBoard or CSV logs."
    )
    result.add_argument(
        "runs",
        nargs="+",
        metavar="[NAME=]RUN",
        help="Folder of a run, or one with runs in it. Those that differ by nothing but their seed are one curve; with "
        "a name, all of them are. Each environment has a panel.",
    )
    result.add_argument(
        "--metric",
        action="append",
        help="What to draw, as it is logged, rollout/episode_return by default; may be given several times.",
    )
    result.add_argument(
        "--statistic", choices=("iqm", "mean"), default="iqm", help="Over seeds: interquartile mean (default) or mean."
    )
    result.add_argument("--confidence", type=float, default=0.95, help="Of the bootstrap interval over seeds (0.95).")
    result.add_argument("--columns", type=int, default=3, help="Panels side by side at the most (3).")
    result.add_argument(
        "--out",
        default="curves",
        help="File to write, .png, .svg or .pdf; without an ending (default: curves) both .png and .svg.",
    )
    return result


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


def _experiments(runs: list[str]) -> dict[str, list[Log]]:
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

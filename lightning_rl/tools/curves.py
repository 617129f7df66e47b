"""Learning curves: read from the logs of runs, put together by what was run, and summed up over seeds."""

from __future__ import annotations

import csv
import json
import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from lightning_rl.checkpointing.run_folders import configurations
from lightning_rl.files import read_yaml
from lightning_rl.training.warning_filters import DropMessages
from lightning_rl.validation import ConfigurationError, check

Array = np.ndarray[Any, Any]
Statistic = Literal["iqm", "mean"]
EVENTS, ROWS = "events.out.tfevents*", "metrics.csv"
RUN_FOLDER = "run_folder.txt"
"""Beside a log that is not in the folder of its run: where that is, from there."""
_SEEDS = ("seed_everything", "data.seed", "data.init_args.seed")
# What does not make another experiment of a run.
_NOT_SETTINGS = (
    *_SEEDS,
    "ckpt_path",
    "num_threads",
    "trainer.logger",
    "trainer.callbacks",
    "trainer.default_root_dir",
    "trainer.enable_progress_bar",
    "trainer.profiler",
)
_RESAMPLES = 1000
_MOST_POINTS = 400
_MOST_SHOWN = 80


class Series(NamedTuple):
    """What one run logged: values against environment steps, both `[N]`."""

    steps: Array
    values: Array


class Summary(NamedTuple):
    """What several runs logged, as one curve: `[N]` each; no interval of one run."""

    steps: Array
    center: Array
    low: Array | None
    high: Array | None


@dataclass
class Log:
    """The log of one run.

    Attributes:
        folder: Where it is.
        settings: What was run, without the seed; empty where there is no configuration beside it.
        scalars: Everything that was logged, by key, less what was not finite.
        seed: What it was seeded with; None where that is not known.
        run: Folder of the run, where that is another one.
        changes: Settings that a restart changed, as `changes` returns them.
    """

    folder: Path
    settings: dict[str, Any]
    scalars: dict[str, Series] = field(default_factory=dict)
    seed: str | None = None
    run: Path | None = None
    changes: list[str] = field(default_factory=list)

    @property
    def algorithm(self) -> str:
        """Name of the algorithm; that of the folder where it is not known."""
        return str(self.settings.get("model.class_path", self.folder.name)).rpartition(".")[2]

    @property
    def environment(self) -> str:
        """Id of the environment, where it is known."""
        return str(self.settings.get("data.env_id") or self.settings.get("data.init_args.env_id", ""))


def find_logs(path: str | Path) -> list[Log]:
    """Read all logs in a folder and those in it: TensorBoard's event files, or else the rows of `CSVLogger`.

    Raises:
        ConfigurationError: There are none.
    """
    root = Path(path)
    folders = sorted({found.parent for kind in (EVENTS, ROWS) for found in root.rglob(kind)})
    if not folders:
        raise ConfigurationError(f"{str(path)!r} has no log: expected a folder with {EVENTS} or {ROWS} in it or below")
    return [_log(folder, root) for folder in folders]


def joined(logs: Iterable[Log]) -> list[Log]:
    """Put the logs of one run together: one that goes on has another folder where its logger cannot add to the first.

    Of steps that were logged by several of them, those of the last count, and its settings.
    """
    parts: dict[Path, list[Log]] = {}
    for log in logs:
        parts.setdefault(log.run or log.folder.resolve(), []).append(log)
    return [_as_one(sorted(found, key=_first_step)) for found in parts.values()]


def _as_one(parts: list[Log]) -> Log:
    scalars: dict[str, Series] = {}
    for log in parts:
        for key, (steps, values) in scalars.items():
            kept = steps < _first_step(log)  # what came after the checkpoint that it went on from was done again
            scalars[key] = Series(steps[kept], values[kept])
        for key, series in log.scalars.items():
            before = scalars.get(key, Series(*np.zeros((2, 0))))
            scalars[key] = Series(*(np.concatenate(pair) for pair in zip(before, series, strict=True)))
    scalars = {key: series for key, series in scalars.items() if len(series.steps)}
    changed = list(dict.fromkeys(change for log in parts for change in log.changes))
    return Log(parts[0].folder, parts[-1].settings, scalars, parts[-1].seed, parts[0].run, changed)


def _first_step(log: Log) -> float:
    return min((float(series.steps[0]) for series in log.scalars.values()), default=0.0)


def same_seed(logs: Iterable[Log]) -> list[Log]:
    """Return the runs with settings and seed of an earlier one: begun anew, or gone on with in another folder."""
    seen: set[str] = set()
    found = []
    for log in logs:
        what = json.dumps([log.seed, log.settings], sort_keys=True, default=str)
        if log.seed is not None and what in seen:
            found.append(log)
        seen.add(what)
    return found


def by_experiment(logs: Iterable[Log]) -> dict[str, list[Log]]:
    """Put together what differs by nothing but its seed, under names that tell the experiments apart.

    Runs without a configuration are one experiment for each folder that they are in.
    """
    groups: dict[str, list[Log]] = {}
    for log in logs:
        groups.setdefault(json.dumps(log.settings or str(log.folder.parent), sort_keys=True, default=str), []).append(
            log
        )
    firsts = [found[0] for found in groups.values()]
    return dict(zip(_names(firsts), groups.values(), strict=True))


def summarize(runs: Sequence[Series], statistic: Statistic = "iqm", confidence: float = 0.95) -> Summary:
    """Return the mean or interquartile mean of runs at each step, with a bootstrap interval over the runs.

    Where runs did not log at the same steps, they are interpolated. The curve is as long as every run is there.

    Args:
        runs: One of each seed.
        statistic: `iqm` leaves out the quarter of the runs that is lowest at a step, and that which is highest (Agarwal
            et al. 2021); of fewer than four runs it is the mean.
        confidence: Of the interval: percentiles of the statistic of runs drawn anew, with replacement.

    Raises:
        ConfigurationError: There is no step at which all of them are.
    """
    check(statistic in ("iqm", "mean"), "statistic", statistic, "iqm or mean")
    check(0 < confidence < 1, "confidence", confidence, "a number between 0 and 1")
    steps = _common_steps(runs)
    values = np.stack([np.interp(steps, *run) for run in runs])
    trim = len(runs) // 4 if statistic == "iqm" else 0
    center = _trimmed_mean(values, trim)
    if len(runs) == 1:
        return Summary(steps, center, None, None)
    drawn = np.random.default_rng(0).integers(len(runs), size=(_RESAMPLES, len(runs)))
    bounds = [(1 - confidence) / 2, (1 + confidence) / 2]
    # A step at a time: all of them at once would be gigabytes.
    at_steps = [np.quantile(_trimmed_mean(column[drawn].T, trim), bounds) for column in values.T]
    low, high = np.array(at_steps).T
    return Summary(steps, center, low, high)


def _trimmed_mean(values: Array, trim: int) -> Array:
    """Return the mean over the first dimension, without so many of the lowest and of the highest."""
    kept = np.sort(values, axis=0)[trim : len(values) - trim] if trim else values
    return np.asarray(kept.mean(axis=0))


def _common_steps(runs: Sequence[Series]) -> Array:
    if all(np.array_equal(run.steps, runs[0].steps) for run in runs):
        return runs[0].steps
    first, last = max(run.steps[0] for run in runs), min(run.steps[-1] for run in runs)
    steps = np.unique(np.concatenate([run.steps for run in runs]))
    steps = steps[(steps >= first) & (steps <= last)]
    if not len(steps):
        raise ConfigurationError(
            f"the {len(runs)} runs of a curve have no environment steps in common: one begins at {first:g}, another "
            f"ends at {last:g}; expected such as overlap"
        )
    return steps if len(steps) <= _MOST_POINTS else np.linspace(first, last, _MOST_POINTS)


def _log(folder: Path, root: Path) -> Log:
    named = folder / RUN_FOLDER
    run = (folder / named.read_text().strip()).resolve() if named.is_file() else None
    starts = _starts(folder, root) if run is None else _starts(run, run)
    settings = dict(_flat(starts[-1])) if starts else {}
    changed = [change for before, after in pairwise(starts) for change in changes(before, after)]
    seeds = {key: seed for key in _SEEDS if (seed := settings.get(key)) is not None and seed is not False}
    others = {key: value for key, value in settings.items() if not key.startswith(_NOT_SETTINGS)}
    return Log(folder, others, _read(folder), json.dumps(seeds, sort_keys=True) if seeds else None, run, changed)


def _read(folder: Path) -> dict[str, Series]:
    points: dict[str, list[tuple[float, float]]] = {}
    rows = _events(folder) if any(folder.glob(EVENTS)) else _rows(folder / ROWS)
    for key, step, value in rows:
        if math.isfinite(value):  # one that is not would pass for the highest of all seeds
            points.setdefault(key, []).append((step, value))
    # A run that goes on from a checkpoint logs some steps again: what it logged last counts.
    return {key: Series(*np.array(sorted(dict(found).items())).T) for key, found in points.items()}


def _events(folder: Path) -> Iterator[tuple[str, float, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    everything, nothing = {"scalars": 0}, dict.fromkeys(("images", "audio", "histograms", "tensors"), 1)
    with _without_purge_messages():
        log = EventAccumulator(str(folder), everything | nothing).Reload()
    for key in log.Tags()["scalars"]:
        for event in log.Scalars(key):
            yield key, float(event.step), float(event.value)


def _rows(path: Path) -> Iterator[tuple[str, float, float]]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            if reader.fieldnames and "step" not in reader.fieldnames:
                raise ConfigurationError(f"{str(path)!r} has no column 'step': expected the rows of CSVLogger")
            for row in reader:
                where = f"{str(path)!r}, line {reader.line_num}"
                for key, value in row.items():
                    if key not in ("step", "epoch") and value:
                        yield key, _number(where, "step", row["step"]), _number(where, key, value)
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigurationError(f"{str(path)!r} cannot be read: expected the rows of CSVLogger: {error}") from error


def _number(where: str, column: str, text: str | list[str] | None) -> float:
    """Return an entry of a table; it is a list beyond the last column, and None where a row is short."""
    try:
        return float(text)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        shown = repr(text) if len(repr(text)) <= _MOST_SHOWN else f"{repr(text)[:_MOST_SHOWN]}…"
        raise ConfigurationError(f"{where}: {column}={shown} is not valid: expected a number") from None


def _starts(folder: Path, root: Path) -> list[dict[str, Any]]:
    """Return the configurations of a run, one of each start, beside a log or in a folder around it, below `root`."""
    for place in (folder, *folder.parents):
        if found := configurations(place):
            return [read_yaml(path, "config") or {} for path in found]
        if place == root:
            break
    return []


def changes(before: dict[str, Any], after: dict[str, Any], of: tuple[str, ...] = ("model", "data")) -> list[str]:
    """Return the settings that differ between two configurations, one text each: `data.num_envs: 8 -> 16`.

    Args:
        before: The earlier configuration.
        after: The later configuration.
        of: Sections to compare.
    """
    old, new = dict(_flat(before)), dict(_flat(after))
    keys = [key for key in {**old, **new} if key.partition(".")[0] in of]
    return [f"{key}: {old.get(key)} -> {new.get(key)}" for key in keys if old.get(key) != new.get(key)]


def _flat(settings: Any, path: str = "") -> Iterator[tuple[str, Any]]:  # noqa: ANN401 - YAML
    if isinstance(settings, dict):
        for key, value in settings.items():
            yield from _flat(value, f"{path}.{key}" if path else str(key))
    else:
        yield path, settings


def _names(logs: Sequence[Log]) -> list[str]:
    """Return a name for each: algorithm and environment, and with equal ones, the settings that differ."""
    names = []
    for log in logs:
        alike = [other for other in logs if (other.algorithm, other.environment) == (log.algorithm, log.environment)]
        keys = sorted({key for other in alike for key in {**log.settings, **other.settings}})
        differing = [key for key in keys if len({str(other.settings.get(key)) for other in alike}) > 1]
        own = [f"{key.rpartition('.')[2]}={log.settings.get(key)}" for key in differing]
        if log.settings:
            names.append(", ".join([log.algorithm, *own]) + f" ({log.environment})")
        else:
            names.append(str(log.folder.parent))
    return names


@contextmanager
def _without_purge_messages() -> Iterator[None]:
    """Drop TensorBoard's message about a "purge of expired events" where a resumed run logged steps again.

    The last value of each step is kept, so no data is lost.
    """
    logger, repeated = logging.getLogger("tensorboard"), DropMessages("Detected out of order event.step")
    logger.addFilter(repeated)
    try:
        yield
    finally:
        logger.removeFilter(repeated)

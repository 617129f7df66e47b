"""Logs of runs: learning curves with statistics over seeds, and comparisons of final scores.

Comparisons of scores `[N, M]` of runs and environments are the ones of `rliable` (Agarwal et al. 2021).
"""

from __future__ import annotations

import csv
import json
import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path, PureWindowsPath
from typing import Any, Literal, NamedTuple

import numpy as np

from lightning_rl.checkpointing.run_folders import configurations
from lightning_rl.files import read_yaml
from lightning_rl.nested import leaves, nested_paths
from lightning_rl.training.warning_filters import drop_messages
from lightning_rl.validation import ConfigurationError, as_list, check

Array = np.ndarray[Any, Any]
Statistic = Literal["iqm", "mean"]
EVENTS, ROWS = "events.out.tfevents*", "metrics.csv"
RUN_FOLDER = "run_folder.txt"
"""File beside a log outside its run folder, with the relative path of that folder."""
_SEEDS = ("seed_everything", "data.seed", "data.init_args.seed")
# Options that do not distinguish experiments.
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
_MAX_POINTS = 400
_MAX_SHOWN = 80


class Series(NamedTuple):
    """Logged values of one run and their environment steps, both `[N]`."""

    steps: Array
    values: Array


class Summary(NamedTuple):
    """A curve over several runs, `[N]` each; `low` and `high` are None for a single run."""

    steps: Array
    center: Array
    low: Array | None
    high: Array | None


@dataclass
class Log:
    """The log of one run."""

    folder: Path
    settings: dict[str, Any]  # the configuration, or a script's hyper-parameters, without seeds; empty if there is none
    scalars: dict[str, Series] = field(default_factory=dict)  # without NaN and infinity
    seed: str | None = None  # None if unknown
    run: Path | None = None  # folder of the run, if it is not that of the log
    changes: list[str] = field(default_factory=list)  # settings that a restart changed

    @property
    def algorithm(self) -> str:
        """Name of the algorithm, or path of the folder around the log if it is unknown."""
        path = self.settings.get("model.class_path")
        return str(self.folder.parent if path is None else path.rpartition(".")[2])

    @property
    def environment(self) -> str:
        return str(self.settings.get("data.env_id") or self.settings.get("data.init_args.env_id", ""))


def find_logs(path: str | Path) -> list[Log]:
    """Read all TensorBoard and `CSVLogger` logs in a folder and below."""
    root = Path(path)
    folders = sorted({found.parent for kind in (EVENTS, ROWS) for found in root.rglob(kind)})
    if not folders:
        expected = f"a folder with {EVENTS} or {ROWS} in it or below; a run with a logger of its own has its log there"
        raise ConfigurationError(f"{str(path)!r} has no log: expected {expected}")
    return [_read_log(folder) for folder in folders]


def joined(logs: Iterable[Log]) -> list[Log]:
    """Merge the logs of each run that was resumed in a new log folder; the last log has precedence."""
    parts: dict[Path, list[Log]] = {}
    for log in logs:
        parts.setdefault(log.run or log.folder.resolve(), []).append(log)
    return [_merge(sorted(found, key=lambda log: (_first_step(log), _numbers(log)))) for found in parts.values()]


def _merge(parts: list[Log]) -> Log:
    scalars: dict[str, Series] = {}
    for log in parts:
        for key, new in log.scalars.items():
            old = scalars.get(key, Series(*np.zeros((2, 0))))
            kept = old.steps < new.steps[0]  # later steps were repeated after the checkpoint
            scalars[key] = Series(*(np.concatenate([x[kept], y]) for x, y in zip(old, new, strict=True)))
    changed = list(dict.fromkeys(change for log in parts for change in log.changes))
    return Log(parts[0].folder, parts[-1].settings, scalars, parts[-1].seed, parts[0].run, changed)


def _numbers(log: Log) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", log.folder.name)]  # version_9 before version_10


def _first_step(log: Log) -> float:
    return min((float(series.steps[0]) for series in log.scalars.values()), default=0.0)


def same_seed(logs: Iterable[Log]) -> list[Log]:
    """Return the runs with the settings and the seed of an earlier one."""
    seen: set[str] = set()
    repeated = []
    for log in logs:
        key = _key([log.seed, log.settings])
        if log.seed is not None and key in seen:
            repeated.append(log)
        seen.add(key)
    return repeated


def by_experiment(logs: Iterable[Log]) -> dict[str, list[Log]]:
    """Group runs that differ only by their seed, under names with the settings that differ between groups.

    Runs of scripts are grouped by their parent folder too.
    """
    groups: dict[str, list[Log]] = {}
    for log in logs:
        groups.setdefault(_key([log.algorithm, log.settings]), []).append(log)
    firsts = [found[0] for found in groups.values()]
    named: dict[str, list[Log]] = {}
    for log, found in zip(firsts, groups.values(), strict=True):
        named.setdefault(_name(log, firsts), []).extend(found)
    return named


def _key(settings: object) -> str:
    return json.dumps(settings, sort_keys=True, default=str)


def _name(log: Log, logs: Sequence[Log]) -> str:
    alike = [other for other in logs if (other.algorithm, other.environment) == (log.algorithm, log.environment)]
    keys = sorted({key for other in alike for key in other.settings})
    differing = [key for key in keys if len({str(other.settings.get(key)) for other in alike}) > 1]
    own = [f"{key.rpartition('.')[2]}={log.settings.get(key)}" for key in differing]
    return ", ".join([log.algorithm, *own]) + (f" ({log.environment})" if log.environment else "")


def summarize(runs: Sequence[Series], statistic: Statistic = "iqm", confidence: float = 0.95) -> Summary:
    """Return the mean or interquartile mean over runs, one per seed, at each step, with a bootstrap interval.

    Runs with different steps are interpolated over the steps that all runs cover; runs without common steps raise a
    `ConfigurationError`. `iqm` excludes the lowest and the highest quarter of the runs at each step (Agarwal et al.
    2021); with fewer than four runs it is the mean. `confidence` is the level of the percentile bootstrap interval.
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
    # Step by step: all steps at once would need gigabytes.
    at_steps = [np.quantile(_trimmed_mean(column[drawn].T, trim), bounds) for column in values.T]
    low, high = np.array(at_steps).T
    return Summary(steps, center, low, high)


def _trimmed_mean(values: Array, trim: int) -> Array:
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
            f"ends at {last:g}; expected runs that overlap"
        )
    return steps if len(steps) <= _MAX_POINTS else np.linspace(first, last, _MAX_POINTS)


def _read_log(folder: Path) -> Log:
    pointer = folder / RUN_FOLDER
    where = pointer.read_text(encoding="utf-8").strip() if pointer.is_file() else None
    run = None if where is None else (folder / PureWindowsPath(where).as_posix()).resolve()  # parses all systems' paths
    configs = [read_yaml(path, "config") or {} for path in configurations(run or folder)]
    if not configs and (logged := folder / "hparams.yaml").is_file():  # of a script
        with suppress(ConfigurationError):  # other programs log Python objects
            options = read_yaml(logged, "hparams.yaml") or {}
            data, algorithm = (options.pop(key, None) for key in ("data", "algorithm"))
            configs = [{"data": data, "model": {"class_path": algorithm, **options}}]
    settings, first = (_flat(configs[at]) if configs else {} for at in (-1, 0))
    changed = [change for before, after in pairwise(configs) for change in changes(before, after)]
    # A resumed run continues with the seed of its first start, whatever the later command says.
    seeds = {key: seed for key in _SEEDS if (seed := first.get(key)) is not None and seed is not False}
    # An option that is null equals one that is missing: a configuration need not name it.
    others = {k: x for k, x in settings.items() if x is not None and not k.startswith(_NOT_SETTINGS)}
    callbacks = (configs[-1].get("trainer") or {}).get("callbacks") if configs else None
    for callback in as_list(callbacks):  # of these, only a curriculum makes another experiment
        if isinstance(callback, dict) and str(callback.get("class_path")).endswith("Curriculum"):
            others["curriculum"] = callback.get("init_args")
    return Log(folder, others, _read_scalars(folder), _key(seeds) if seeds else None, run, changed)


def _read_scalars(folder: Path) -> dict[str, Series]:
    points: dict[str, dict[float, float]] = {}
    rows = _events(folder) if any(folder.glob(EVENTS)) else _rows(folder / ROWS)
    for key, step, value in rows:
        if math.isfinite(value):  # NaN would be sorted as the highest seed
            points.setdefault(key, {})[step] = value  # a resumed run logs some steps again: the last value counts
    return {key: Series(*np.array(sorted(found.items())).T) for key, found in points.items()}


def _events(folder: Path) -> Iterator[tuple[str, float, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    # TensorBoard would warn of the steps that a resumed run has logged again.
    logger, repeated = logging.getLogger("tensorboard"), drop_messages("Detected out of order event.step")
    logger.addFilter(repeated)
    try:
        log = EventAccumulator(str(folder), {"scalars": 0}).Reload()  # all of them
    finally:
        logger.removeFilter(repeated)
    for key in log.Tags()["scalars"]:
        for event in log.Scalars(key):
            yield key, float(event.step), float(event.value)


def _rows(path: Path) -> Iterator[tuple[str, float, float]]:
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        try:
            for row in reader:
                for key, value in row.items():
                    if key not in ("step", "epoch") and value:
                        yield key, float(row["step"]), float(value)
        except (KeyError, TypeError, ValueError, csv.Error) as error:
            why = f"{type(error).__name__}: {str(error)[:_MAX_SHOWN]}"
            where = f"{str(path)!r}, line {reader.line_num}"
            raise ConfigurationError(f"{where}: expected the rows of CSVLogger: {why}") from error


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return the settings of model and data that differ between two configurations: `data.num_envs: 8 -> 16`."""
    old, new = _flat(before), _flat(after)
    keys = [key for key in {**old, **new} if key.partition(".")[0] in ("model", "data")]
    return [f"{key}: {old.get(key)} -> {new.get(key)}" for key in keys if old.get(key) != new.get(key)]


def _flat(settings: dict[str, Any]) -> dict[str, Any]:
    return dict(zip(leaves(nested_paths(settings)), leaves(settings), strict=True))


def performance_profile(scores: Array, thresholds: Array) -> Array:
    """Return the share of runs, `[K]`, with a score above each of the `thresholds`, `[K]` (section 4.2)."""
    return np.asarray((scores[..., None] > thresholds).mean((0, 1)))


def probability_of_improvement(scores: Array, others: Array) -> Array:
    """Return the probability that a run of the first algorithm beats one of the second, averaged over environments.

    This is the Mann-Whitney statistic of scores `[N, M]` and `[L, M]`, in which ties count half.
    """
    differences = scores[:, None] - others[None]
    return np.asarray(((differences > 0) + 0.5 * (differences == 0)).mean())


def interquartile_mean(scores: Array) -> Array:
    """Return the mean of the middle half of the scores of all runs and environments (section 4.3)."""
    return _trimmed_mean(scores.ravel(), scores.size // 4)


def interval(
    statistic: Callable[..., Array], *scores: Array, confidence: float = 0.95, resamples: int = 2000
) -> tuple[Array, Array]:
    """Return the percentile bootstrap interval of a statistic of one or more algorithms' scores, `[N, M]` each.

    The bootstrap is stratified: in each environment, runs are drawn with replacement. The seed is fixed.
    """
    check(0 < confidence < 1, "confidence", confidence, "a number between 0 and 1")
    random = np.random.RandomState(0)  # rliable draws with this generator
    drawn = []
    for _ in range(resamples):
        rows = [np.asarray(random.choice(len(one), one.shape)) for one in scores]
        drawn.append(statistic(*(np.take_along_axis(one, row, 0) for one, row in zip(scores, rows, strict=True))))
    low, high = np.quantile(drawn, [(1 - confidence) / 2, (1 + confidence) / 2], axis=0)
    return low, high


def min_max_normalized(scores: dict[str, Array]) -> dict[str, Array]:
    """Return scores `[N, M]` in which the lowest of all algorithms is 0 and the highest 1, in each environment."""
    together = np.concatenate(list(scores.values()))
    low, high = together.min(0), together.max(0)
    span = np.where(high > low, high - low, 1.0)
    return {name: (one - low) / span for name, one in scores.items()}

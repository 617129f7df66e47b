"""The page `docs/zoo.md`: every shipped configuration with its score and published scores.

`python benchmarks/table.py` writes it; `python benchmarks/reproduce_all.py` makes the results first.
"""

from __future__ import annotations

import functools
import json
import random
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
CONFIGS = HERE.parent / "configs"
GOALS = HERE / "goals.json"
PUBLISHED = HERE / "published.json"
PAGE = HERE.parent / "docs" / "zoo.md"
RESULTS = HERE / "results"
RESAMPLES = 2_000
_OUTCOME = 7  # the cell of a row

INTRODUCTION = """# Model zoo

Every shipped configuration: the command that trains it, the score of its final policy, and published scores.
The score is the mean return of 100 episodes with the most likely actions (samples with
`evaluation.deterministic: false`), averaged over seeds 0, 1, …. Each seed is trained once, and no seed is left out.
Brackets contain the 95 % bootstrap interval of the mean: over **seeds**, or over the **episodes** if there is only one
seed; the latter says nothing about other seeds. Wall time is the median over seeds, on two cores with other load, so
the CPU time of training is given too.

The column after the goal compares every seed with [`benchmarks/goals.json`](../benchmarks/goals.json):

* `reached`: every seed is at the goal or above; `not reached`: some seed is below.
* `stopped`: the whole run would take hours or days here, and was ended after the given steps. Score and time belong to
  these steps.
* `not run`: the configuration needs several GPUs, or has no result yet.

The goal may differ from the published score in the last column.

"""

ENDING = """
Each source measured its scores in another way:

"""

REGENERATED = """
`python benchmarks/reproduce_all.py` trains the missing configurations, or all with `--again`, and writes this page from
the results and from [`benchmarks/published.json`](../benchmarks/published.json); `--list` only prints the plan.
`python benchmarks/reproduce.py configs/ppo/cartpole.yaml --seed 0` makes one result. Some configurations start from the
[episodes or the checkpoint](algorithms/behaviourcloning.md#from-recorded-episodes-to-reinforcement-learning) of other
runs. [`benchmarks/recipes.py`](../benchmarks/recipes.py) trains these first, with the same seed; the table does not
include their time. Standard deviations and commits are in the [table of scores](../benchmarks/README.md#scores).
"""


def page(runs: Mapping[str, Sequence[dict[str, Any]]]) -> str:
    """Return the page.

    Args:
        runs: Results of each configuration, by seed; results of stopped runs if there are no others.
    """
    goals, published = json.loads(GOALS.read_text()), json.loads(PUBLISHED.read_text())
    head = ["command", "environment", "steps", "seeds", "score", "wall (CPU)", "goal", "", "published"]
    rows = []
    for path in sorted(CONFIGS.glob("*/*.yaml")):
        name = path.relative_to(CONFIGS).with_suffix("").as_posix()
        rows.append(row(name, yaml.safe_load(path.read_text()), runs.get(name, ()), goals.get(name), published))
    table = "".join(f"| {' | '.join(cells)} |\n" for cells in [head, ["---"] * len(head), *rows])
    sources = [f"* [{x['title']}]({x['url']}): {x['about']}\n" for x in published["sources"].values()]
    return INTRODUCTION + by_outcome(rows) + table + elsewhere() + ENDING + "".join(sources) + REGENERATED


def by_outcome(rows: Sequence[Sequence[str]]) -> str:
    """Return the number of configurations that reach their goal, and the names of the others."""
    names: dict[str, list[str]] = {}
    for cells in rows:
        names.setdefault(cells[_OUTCOME], []).append(cells[0].split("`")[1].rpartition(" ")[2])
    lines = [f"* reached: {len(names.get('reached', ()))} of {len(rows)}\n"]
    for found in ("**not reached**", "no goal", "stopped", "not run"):
        lines.append(f"* {found}: {', '.join(f'`{name}`' for name in names.get(found, ())) or 'none'}\n")
    return "".join(lines) + "\n"


def elsewhere(results: Path = RESULTS) -> str:
    """Return the section on results that are not scores of shipped configurations."""
    kept, warm, held = (
        json.loads((results / f"{name}.json").read_text())
        for name in ("retention/mappings", "warm_up/mountain_car", "repeats/mountain_car")
    )
    share = "lowest_share_of_the_cloned_score"
    fresh, warmed = (", ".join(map(_percent, warm[name][share])) for name in ("ppo", "ppo_with_warm_up"))
    clears, impalas = (_percent(kept[name]["retention"]) for name in ("CLEAR", "IMPALA"))
    each, several = (f"{held[name]['decisions']:,.0f}" for name in ("each_step", "up_to_16_steps"))
    return f"""
Experiments that are not scores of shipped configurations:

* [CLEAR](algorithms/clear.md#what-it-keeps): after a second and a third task, {clears} of the score on the first task
  remains, with IMPALA {impalas} (three seeds; [result](../benchmarks/results/retention/mappings.json))
* [Behavior cloning, then PPO](algorithms/criticpretraining.md) on MountainCar: the return of the cloned policy divided
  by the worst return of the first updates (both negative) is {fresh} with an untrained critic, and
  {warmed} with a pretrained one (a number per seed; [result](../benchmarks/results/warm_up/mountain_car.json))
* [Learned action repeat](environments.md#learned-action-repeat): {several} decisions to a return of -120 on
  MountainCar instead of {each} (mean of three seeds; [result](../benchmarks/results/repeats/mountain_car.json))
"""


def _percent(share: float) -> str:
    return f"{round(100 * share, 6):.0f} %"  # 1.015 is 102 %, and a float of 101.49999…


def row(
    name: str, config: dict[str, Any], runs: Sequence[dict[str, Any]], goal: float | None, published: Mapping[str, Any]
) -> list[str]:
    """Return the cells of a configuration.

    Args:
        name: `<algorithm>/<name>`.
        config: Content of its file.
        runs: Its results, by seed; empty if it was not run.
        goal: Goal of each seed; None without a goal.
        published: Content of `published.json`.
    """
    command = f"`lightning-rl fit --config {name}` ([file](../configs/{name}.yaml))"
    steps, asked = max((run["env_steps"] for run in runs), default=None), config["max_env_steps"]
    stopped = steps is not None and steps < asked
    return [
        command,
        environment(config),
        f"{steps:,} of {asked:,}" if stopped else f"{asked:,}",
        str(len(runs) or ""),
        _score(runs),
        _seconds(runs),
        "" if goal is None else f"{goal:g}",
        "stopped" if stopped else outcome([run["evaluation"]["mean"] for run in runs], goal),
        _published(published["scores"].get(name), published["sources"]),
    ]


def environment(config: Mapping[str, Any]) -> str:
    """Return the id of a configuration's environment, for every class of the data."""
    data: Mapping[str, Any] = config["data"]
    env_id: str = data.get("init_args", data)["env_id"]
    return env_id


def outcome(means: Sequence[float], goal: float | None) -> str:
    """Return whether the mean returns of the seeds reach a goal."""
    if not means:
        return "not run"
    if goal is None:
        return "no goal"
    return "reached" if min(means) >= goal else "**not reached**"


def interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Return the bootstrap interval of a mean: percentiles of means of resampled values, with a fixed seed."""
    return _interval(tuple(values), confidence)


@functools.cache  # several pages show the same intervals
def _interval(values: tuple[float, ...], confidence: float) -> tuple[float, float]:
    generator = random.Random(0)
    means = sorted(statistics.fmean(generator.choices(values, k=len(values))) for _ in range(RESAMPLES))
    outside = round(RESAMPLES * (1 - confidence) / 2)
    return means[outside], means[-1 - outside]


def _score(runs: Sequence[dict[str, Any]]) -> str:
    if not runs:
        return ""
    means = [run["evaluation"]["mean"] for run in runs]
    several = len(runs) > 1
    low, high = interval(means if several else runs[0]["evaluation"]["returns"])
    mean = statistics.fmean(means)
    digits = 1 if abs(mean) >= 5 else 3
    over = "seeds" if several else "episodes"
    return f"{mean:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}], {over}"


def _seconds(runs: Sequence[dict[str, Any]]) -> str:
    if not runs:
        return ""
    wall, cpu = (statistics.median(run["training_seconds"][clock] for run in runs) for clock in ("wall", "cpu"))
    return f"{wall:,.0f} s ({cpu:,.0f} s)"


def _published(found: Mapping[str, str] | None, sources: Mapping[str, Mapping[str, str]]) -> str:
    if found is None:
        return "none comparable"
    after = f" after {found['steps']}" if found["steps"] else ""
    of = f" ({found['of']})" if "of" in found else ""
    source = sources[found["source"]]
    return f"{found['score']}{after}, [{source['title']}]({source['url']}){of}"

"""Write the tables of `benchmarks/README.md`, `docs/zoo.md` and `docs/results.md` from `benchmarks/results/`.

    python benchmarks/table.py [--check]

All numbers in the tables come from these files; `--check` only checks whether the tables are up to date.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import results_page
import zoo

HERE = Path(__file__).resolve().parent
README = HERE / "README.md"
RESULTS = HERE / "results"
GOALS = HERE / "goals.json"


def scores(results: Path = RESULTS) -> str:
    """Return the table of scores: a row for each configuration, over its seeds."""
    goals: dict[str, float] = json.loads(GOALS.read_text())
    rows = []
    for name, runs in sorted(load_scores(results).items()):
        means = [run["evaluation"]["mean"] for run in runs]
        rows.append(
            [
                f"[`{name}`](../configs/{name}.yaml)",
                zoo.environment(runs[0]["settings"]),
                f"{max(run['env_steps'] for run in runs):,}",
                f"{goals[name]:g}" if name in goals else "",
                _score(statistics.fmean(means)),
                ", ".join(
                    f"{_score(mean)} ± {_score(run['evaluation']['standard_deviation'], mean)}"
                    for mean, run in zip(means, runs, strict=True)
                ),
                f"{statistics.median(run['training_seconds']['cpu'] for run in runs):.0f}",
                ", ".join(sorted({_commit(run["source"]) for run in runs})),
            ]
        )
    head = ["configuration", "environment", "steps", "goal", "mean", "each seed", "CPU seconds", "commit"]
    return _markdown(head, rows)


def load_scores(
    results: Path = RESULTS, algorithm: str = "*", stopped: bool = False
) -> dict[str, list[dict[str, Any]]]:
    """Return the runs of every configuration `<algorithm>/<name>`, by seed.

    Args:
        results: Folder of all results.
        algorithm: Pattern of the algorithm.
        stopped: Return the runs that were ended early instead of the complete ones.
    """
    runs: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for path in results.glob(f"{algorithm}/*/{'stopped_' * stopped}seed*.json"):
        runs[path.parent.relative_to(results).as_posix()].append(json.loads(path.read_text()))
    return {name: sorted(found, key=lambda run: run["seed"]) for name, found in runs.items()}


def _score(value: float, beside: float | None = None) -> str:
    """Return a score, or its deviation, with as many digits as its size needs."""
    size = abs(value if beside is None else beside)
    return f"{value:.1f}" if size >= 5 else f"{value:.3f}"


def throughput(results: Path = RESULTS) -> str:
    """Return the table of throughput against peers."""
    rows = []
    for path in sorted((results / "throughput").glob("W*-*.json")):
        found = json.loads(path.read_text())
        per_cpu, per_wall = found["sps_cpu"], found["sps"]
        rows.append(
            [
                found["workload"],
                f"{found['peer']} {found['peer_version']}",
                (found.get("variant") or "sync").replace("-", ", "),
                f"{per_cpu['ours']:,.0f}",
                f"{per_cpu['theirs']:,.0f}",
                f"**{per_cpu['ratio']:.2f}**",
                f"{min(per_cpu['ratios']):.2f} – {max(per_cpu['ratios']):.2f}",
                f"{found['sps_cpu_quiet']['ratio']:.2f}" if "sps_cpu_quiet" in found else "",
                f"{per_wall['ratio']:.2f}",
                " / ".join(str(min(run["peak_rss_mb"] for run in found["runs"][side::2])) for side in (0, 1)),
                _commit(found["source"]),
            ]
        )
    head = ["workload", "peer", "ours with", "ours", "theirs", "ratio", "pairs", "quiet", "wall", "MB", "commit"]
    return _markdown(head, rows)


def start_up(results: Path = RESULTS) -> str:
    """Return the table of start-up times in CPU seconds."""
    rows = []
    for path in results.glob("start_up.json"):
        found = json.loads(path.read_text())
        commit = _commit(found["source"])
        rows += [[name, f"{seconds:.2f}", commit] for name, seconds in found["median_cpu_seconds"].items()]
        rows += [[f"ratio: {name}", f"**{ratio:.2f}**", commit] for name, ratio in found["ratios"].items()]
    return _markdown(["what", "CPU seconds", "commit"], rows)


def memory(results: Path = RESULTS) -> str:
    """Return the table of memory of long runs and of images."""
    rows = []
    for path in results.glob("memory/growth.json"):
        found = json.loads(path.read_text())
        commit = _commit(found["source"])
        rows.append(
            [f"growth for each of {found['rollouts']:,} rollouts", f"{found['bytes_per_rollout']:.0f} B", commit]
        )
    for path in results.glob("memory/images.json"):
        found = json.loads(path.read_text())
        commit = _commit(found["source"])
        size = f"{found['num_envs']} Pong environments × {found['rollout_length']} steps"
        for name, key in (("data", "data_mib"), ("storage", "rollout_mib"), ("process at its peak", "peak_mib")):
            rows.append([f"{size}: {name}", f"{found[key]:,.0f} MiB", commit])
    return _markdown(["what", "memory", "commit"], rows)


def scaling(results: Path = RESULTS) -> str:
    """Return the table of cost by the number of environments, and the speed-up by a second process."""
    rows = []
    for path in sorted(results.glob("scaling/environments-*.json")):
        found = json.loads(path.read_text())
        costs = ", ".join(f"{count}: {cost:.1f}" for count, cost in found["cpu_microseconds_per_step"].items())
        rows.append([f"{found['backend']}: µs of CPU a step, by environments", costs, _commit(found["source"])])
    for path in sorted(results.glob("scaling/processes-*.json")):
        found = json.loads(path.read_text())
        what = f"two processes over one, {found['workload']} with {found['num_envs']} environments ({found['backend']})"
        rows.append([what, f"**{found['speed_up']:.2f}**", _commit(found["source"])])
    return _markdown(["what", "found", "commit"], rows)


def gpu(results: Path = RESULTS) -> str:
    """Return the table of measurements with everything on one device."""
    rows = []
    for path in sorted(results.glob("gpu/*.json")):
        found = json.loads(path.read_text())
        where, commit = found["hardware"]["accelerator"] or found["device"], _commit(found["source"])
        size = f"{found['task']}, {found['num_envs']:,} × {found['rollout_length']}"
        parts = dict(found["microseconds"])
        minibatch = f"minibatch of {parts.pop('minibatch_rows'):,.0f}"
        for name, value in parts.items():
            rows.append([f"{size}, {minibatch}: {name.replace('_', ' ')}", f"{value:,.1f} µs", where, commit])
        for name, training in found.get("training", {}).items():
            times = f"rollout {training['rollout_milliseconds']} ms, update {training['update_milliseconds']} ms"
            rate = f"**{training['steps_per_second']:,}** steps a second"
            rows.append([f"{size}: training, {name}", f"{rate}; {times}", where, commit])
    return _markdown(["what", "found", "on", "commit"], rows)


def lightning_share(results: Path = RESULTS) -> str:
    """Return the table of Lightning's share."""
    rows = []
    for path in sorted((results / "throughput").glob("share-*.json")):
        found = json.loads(path.read_text())
        fifths = found["lightning_share_by_fifths"]
        rows.append(
            [
                found["workload"],
                found.get("backend", "sync"),
                found["with"],
                f"{found['env_steps']:,}",
                f"**{found['lightning_share']:.1%}**",
                f"{min(fifths):.1%} – {max(fifths):.1%}",
                _commit(found["source"]),
            ]
        )
    return _markdown(["workload", "backend", "with", "steps", "share", "fifths of the run", "commit"], rows)


def profile(results: Path = RESULTS) -> str:
    """Return the table of the shares of CPU time of each workload's parts, in per cent, before and after."""
    found = {
        path.stem.partition("-")[2]: json.loads(path.read_text())
        for path in sorted((results / "throughput").glob("breakdown-*.json"), reverse=True)
    }
    runs = sorted(found, key=lambda name: (name.partition("-")[0], name.endswith("after")))
    parts = list(dict.fromkeys(part for name in reversed(runs) for part in found[name]["parts"]))
    rows = [
        [part, *(f"{found[name]['parts'][part]['share']:.1%}" if part in found[name]["parts"] else "" for name in runs)]
        for part in parts
    ]
    rows.append(["commit", *(_commit(found[name]["source"]) for name in runs)])
    return _markdown(["part", *(name.replace("-", ", ") for name in runs)], rows)


def fast_paths(results: Path = RESULTS) -> str:
    """Return the table of the gain of each fast path; empty without results."""
    files = sorted((results / "throughput").glob("fast-paths-*.json"))
    found = {f"{run['workload']} {run['backend']}": run for run in map(json.loads, map(Path.read_text, files))}
    if not found:
        return ""
    names = list(dict.fromkeys(name for run in found.values() for name in run["variants"]))
    rows = [[name, *(_with_excess(run["variants"].get(name)) for run in found.values())] for name in names]
    rows.append(["commit", *(_commit(run["source"]) for run in found.values())])
    return _markdown(["CPU time per step", *found], rows)


def workers(results: Path = RESULTS) -> str:
    """Return the table of the speed-up by worker processes; empty without results."""
    path = results / "throughput" / "workers.json"
    if not path.exists():
        return ""
    found = json.loads(path.read_text())
    workloads = {name: row for name, row in found.items() if isinstance(row, dict) and "speed_up" in row}
    names = next(iter(workloads.values()))["speed_up"]
    rows = [
        [name, *(_with_speed_up(row["milliseconds_per_vector_step"][name], row, name) for row in workloads.values())]
        for name in names
    ]
    rows.append(["commit", *([_commit(found["source"])] * len(workloads))])
    heads = [f"{row['num_envs']} × {name}" for name, row in workloads.items()]
    return _markdown(["time per vector step", *heads], rows)


def _with_speed_up(milliseconds: float, row: dict[str, Any], name: str) -> str:
    pairs = statistics.median(row["speed_ups_of_pairs"][name])
    return f"{milliseconds:.2f} ms ({row['speed_up'][name]:.2f} ×, median of pairs {pairs:.2f} ×)"


def _with_excess(row: dict[str, Any] | None) -> str:
    return "" if row is None else f"{row['microseconds_per_step']:.1f} µs ({row['more']:+.0%})"


def _commit(source: dict[str, Any]) -> str:
    return (source["commit"] or "unknown")[:8] + ("+" if source["dirty"] else "")


def _markdown(head: list[str], rows: list[list[str]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in [head, ["---"] * len(head), *rows])


TABLES: dict[str, Callable[[Path], str]] = {
    "scores": scores,
    "throughput": throughput,
    "profile": profile,
    "lightning share": lightning_share,
    "fast paths": fast_paths,
    "workers": workers,
    "start-up": start_up,
    "memory": memory,
    "scaling": scaling,
    "gpu": gpu,
}
"""What makes each table of the README, by the name in the comments around it."""


def filled(text: str, results: Path = RESULTS) -> str:
    """Return the README with the tables of `results`."""
    for name, table in TABLES.items():
        body = table(results)
        before, begin, rest = text.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition(f"<!-- end of {name} -->")
        if not (begin and end):
            raise ValueError(f"README: expected a section {name!r} between comments, found none")
        text = before + begin + body + end + after
    return text


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 if one is out of date")
    only_check = parser.parse_args().check
    pages = {README: filled(README.read_text()), zoo.PAGE: zoo.page({**load_scores(stopped=True), **load_scores()})}
    pages[results_page.PAGE] = results_page.page(load_scores())
    old = [page.name for page, text in pages.items() if not page.exists() or page.read_text() != text]
    if only_check:
        sys.exit(f"{' and '.join(old)} out of date: run python benchmarks/table.py" if old else 0)
    for page, text in pages.items():
        page.write_text(text)

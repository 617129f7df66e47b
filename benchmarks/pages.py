"""Write the scores of each algorithm into its page of the guide, from the JSON under `benchmarks/results/`.

    python benchmarks/pages.py [--check]

Fills the section between `<!-- scores -->` and `<!-- end of scores -->` of the pages in `docs/algorithms/`, and draws
the curves with matplotlib. `--check` only checks whether the tables are up to date.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import curves
from table import GOALS, HERE, RESULTS, _markdown, _score, load_scores
from zoo import CONFIGS, environment

DOCS = HERE.parent / "docs"
BEGIN, END = "<!-- scores -->\n", "<!-- end of scores -->"
_NOTE = """\
Each score is the mean return of the final checkpoint over 100 episodes per seed, with the most likely actions
(samples with `evaluation.deterministic: false`) and raw rewards. The scores of all seeds, and their commands, are in
the [benchmarks](../../benchmarks/README.md).
"""


def algorithm_of(page: Path) -> str:
    """Return the folder of configurations that belongs to a page, ignoring underscores."""
    folders = {folder.name.replace("_", ""): folder.name for folder in CONFIGS.iterdir()}
    return folders.get(page.stem.replace("_", ""), page.stem)


def figure(algorithm: str) -> Path:
    """Return the path of the figure with an algorithm's curves."""
    return DOCS / "figures" / f"curves_{algorithm}.svg"


def section(algorithm: str, results: Path = RESULTS) -> str:
    """Return the section of scores of an algorithm: a row for each configuration, and the curves."""
    found = load_scores(results, algorithm)
    shipped = [f"{algorithm}/{path.stem}" for path in sorted((CONFIGS / algorithm).glob("*.yaml"))]
    links = [f"[`{name}`](../../configs/{name}.yaml)" for name in shipped if name not in found]
    not_run = f"Not run to a score: {', '.join(links)}.\n" if links else ""
    if not found:
        return not_run or "There is no shipped configuration.\n"
    goals: dict[str, float] = json.loads(GOALS.read_text())
    rows = []
    for name, runs in sorted(found.items()):
        means = [run["evaluation"]["mean"] for run in runs]
        rows.append(
            [
                f"[`{name}`](../../configs/{name}.yaml)",
                environment(runs[0]["settings"]),
                f"{max(run['env_steps'] for run in runs):,}",
                f"{goals[name]:g}" if name in goals else "",
                _score(statistics.fmean(means)),
                str(len(runs)),
                _score(min(means)) if len(runs) == 1 else f"{_score(min(means))} to {_score(max(means))}",
            ]
        )
    table = _markdown(["configuration", "environment", "steps", "goal", "mean", "seeds", "of single seeds"], rows)
    notes = "\n".join(note for note in (_NOTE, not_run, logged(found)) if note)
    return f"{table}\n{notes}\n![Returns against environment steps](../figures/{figure(algorithm).name})\n"


def logged(found: dict[str, list[dict[str, Any]]]) -> str:
    """Return the first and the last value, for each seed, of logged values other than returns."""
    lines = []
    for name, runs in sorted(found.items()):
        for key in [key for key in runs[0]["curve"] if not key.endswith("episode_return")]:
            ends = (f"{rows[0][1]:.3g} to {rows[-1][1]:.3g}" for rows in (run["curve"][key] for run in runs))
            lines.append(f"`{key}` of `{name}`, at the first and the last log of each seed: {', '.join(ends)}.\n")
    return "".join(lines)


def filled(text: str, algorithm: str, results: Path = RESULTS) -> str:
    """Return a page with the scores of `results`; a page without the comments is not changed."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    return before + begin + "\n" + section(algorithm, results) + "\n" + end + after if begin and end else text


def with_scores() -> list[Path]:
    """Return the pages with a section of scores."""
    return [page for page in sorted((DOCS / "algorithms").glob("*.md")) if BEGIN in page.read_text()]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 if a page is out of date")
    if parser.parse_args().check:
        sys.exit(any(filled(page.read_text(), algorithm_of(page)) != page.read_text() for page in with_scores()))
    for page in with_scores():
        page.write_text(filled(page.read_text(), algorithm := algorithm_of(page)))
        if load_scores(RESULTS, algorithm):
            curves.draw(figure(algorithm), RESULTS, algorithm)

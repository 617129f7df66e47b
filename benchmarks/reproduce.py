"""Train a shipped configuration and evaluate its final policy.

    python benchmarks/reproduce.py configs/ppo/cartpole.yaml --seed 0

Trains as `lightning-rl fit --config … --seed_everything 0` does. Then the final policy, not the best one, plays 100
episodes once, with its most likely actions or, with `evaluation.deterministic: false`, samples. The result is
`benchmarks/results/<algorithm>/<configuration>/seed<n>.json`. A configuration that needs the episodes or the checkpoint
of another run gets them first, by `recipes.py`, with the same seed. The run uses a separate working folder, so further
arguments must name files by absolute paths.
`--folder` stores the run there, saves it every minute, and resumes it after any kill, with the weights of an
uninterrupted run. Its result has the commit of each start and all interruptions. The queue of long runs
(`training_queue.py`) uses this option.
`--minutes` ends training early, for configurations that take days. The result is then `stopped_seed<n>.json`: the score
and speed up to this time, not the score of the configuration.
Other arguments are passed on to `lightning-rl fit`, for experiments. They and your own configurations require `--out`,
because the result is then not a result of the shipped configuration.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Collection, Iterable, Iterator
from contextlib import chdir, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import kept_run
import yaml
from lightning.pytorch import Callback, LightningModule, Trainer
from recipes import RECIPES, Recipe
from record import RESULTS, ROOT, hardware, source, versions, write_json
from run_files import history, interruptions

from lightning_rl.cli.main import OnPolicyCLI, main
from lightning_rl.rollouts.rollout import Episode

EPISODES = 100


class PlayedEpisodes(Callback):
    """Keeps the return and length of every test episode."""

    def __init__(self) -> None:
        self.returns: list[float] = []
        self.lengths: list[int] = []

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: object,
        batch: list[Episode],
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self.returns += [episode.episode_return for episode in batch]
        self.lengths += [episode.length for episode in batch]


@contextmanager
def timed(name: str, result: dict[str, Any]) -> Iterator[None]:
    """Put wall and CPU seconds (child processes included) into `result` as `<name>_seconds`."""
    wall, cpu = time.perf_counter(), sum(os.times()[:4])
    yield
    result[f"{name}_seconds"] = {
        "wall": round(time.perf_counter() - wall, 2),
        "cpu": round(sum(os.times()[:4]) - cpu, 2),
    }


@contextmanager
def made_before(recipe: Recipe, folder: str, result: dict[str, Any]) -> Iterator[None]:
    """Run the preceding commands of a recipe, and then the block, in `folder`; without commands only run the block."""
    if not recipe.before:
        yield
        return
    with chdir(folder):
        result["before"] = list(recipe.before)
        with timed("before", result):
            recipe.run_before(result["seed"])
        yield


def reproduce(
    config: Path,
    seed: int,
    out: Path,
    overrides: list[str],
    episodes: int = EPISODES,
    minutes: int | None = None,
    folder: Path | None = None,
) -> Path:
    """Train, evaluate and write the result; return its path.

    Args:
        config: File of the configuration.
        seed: Seed of the run.
        out: Folder of the results.
        overrides: Further arguments of `lightning-rl fit`.
        episodes: Number of episodes that the final policy plays.
        minutes: Maximum minutes of training.
        folder: Folder to store the run in, and to resume it from; None trains in a temporary folder.

    Raises:
        ValueError: The configuration uses more than one process, each of which would see only some of the episodes; or
            `folder` is given for a configuration that starts from other runs, or holds other files or another seed.
    """
    provenance = source()  # of the imported code; the files may change during training
    config = config.resolve()
    result: dict[str, Any] = {"algorithm": config.parent.name, "configuration": config.stem, "seed": seed}
    recipe = RECIPES.get(f"{config.parent.name}/{config.stem}", Recipe())
    if folder is not None and recipe.before:
        raise ValueError(f"folder={str(folder)!r}: expected None for {config.stem}, which starts from other runs")
    place = tempfile.TemporaryDirectory() if folder is None else nullcontext(str(folder.resolve()))
    with place as scratch, made_before(recipe, scratch, result):
        logger, more = {"save_dir": scratch, "name": "log", "version": "run"}, []
        if folder is not None:
            kept_run.claim(Path(scratch), config, overrides, seed)
            logger["version"], more = kept_run.new_log(Path(scratch)), kept_run.arguments(Path(scratch))
        limit = [] if minutes is None else ["--trainer.max_time", f"00:{minutes // 60:02}:{minutes % 60:02}:00"]
        with timed("training", result):
            cli = main(
                ["fit", "--config", str(config), "--seed_everything", str(seed), *recipe.arguments, *overrides, *limit]
                + ["--trainer.default_root_dir", scratch, "--trainer.logger", "lightning.pytorch.loggers.CSVLogger"]
                + [f"--trainer.logger.init_args.{name}={value}" for name, value in logger.items()]
                + more
            )
        if cli.trainer.world_size != 1:
            raise ValueError(f"devices={cli.trainer.world_size}: expected one process")
        assert cli.run_dir is not None
        logs = [(Path(scratch, "log", "run", "metrics.csv"), math.inf)]
        if folder is not None:
            logs = kept_run.logs(Path(scratch))
            result["training_seconds"] = kept_run.training_seconds(cli.trainer)
        result |= {"env_steps": cli.model.env_steps, "curve": read_curve(logs, recipe.logged)}
        settings = shared_settings(cli.run_dir / "config.yaml")
        with timed("evaluation", result):
            played = evaluate(cli, Path(scratch, "final.ckpt"), episodes)
        if folder is not None:
            events = history(Path(scratch))
            result |= {"interruptions": interruptions(events), "history": events}
    result["evaluation"] = {
        "policy": "mode" if cli.datamodule.evaluation.deterministic else "samples",
        "episodes": len(played.returns),
        "mean": statistics.fmean(played.returns),
        "standard_deviation": statistics.pstdev(played.returns),
        "minimum": min(played.returns),
        "maximum": max(played.returns),
        "returns": played.returns,
        "lengths": played.lengths,
    }
    result |= {"source": provenance, "versions": versions(), "hardware": hardware()}
    result |= {"overrides": overrides, "settings": settings}
    stopped = "stopped_" if cli.model.env_steps < (settings["max_env_steps"] or 0) else ""
    path = out / config.parent.name / config.stem / f"{stopped}seed{seed}.json"
    write_json(path, result)
    return path


def evaluate(cli: OnPolicyCLI, checkpoint: Path, episodes: int) -> PlayedEpisodes:
    """Save the final checkpoint, and evaluate the checkpoint."""
    cli.trainer.save_checkpoint(checkpoint)
    cli.datamodule.evaluation = replace(cli.datamodule.evaluation, episodes=episodes)
    played = PlayedEpisodes()
    cli.trainer.callbacks.append(played)  # type: ignore[attr-defined]
    cli.trainer.test(cli.model, datamodule=cli.datamodule, ckpt_path=str(checkpoint), verbose=False)
    return played


def read_curve(logs: Iterable[tuple[Path, float]], also: Collection[str] = ()) -> dict[str, list[list[float]]]:
    """Return `[environment steps, value]` pairs of every logged mean return, and of further values, by name.

    Args:
        logs: The log of each start of the run, and the environment steps up to which it counts.
        also: Names of the further values.
    """
    curve: dict[str, dict[int, float]] = {}
    for metrics, end in logs:
        if not metrics.is_file():  # killed before the first log
            continue
        with metrics.open() as file:
            for row in csv.DictReader(file):
                for name, value in row.items():
                    if (name.endswith("_return") or name in also) and value and float(row["step"]) <= end:
                        # By step, because Lightning writes the last training row again when training stops.
                        curve.setdefault(name, {})[int(float(row["step"]))] = float(value)
    return {name: [[step, value] for step, value in points.items()] for name, points in curve.items()}


def shared_settings(config: Path) -> dict[str, Any]:
    """Return the complete configuration without the folders, logger and callbacks of this run alone."""
    settings: dict[str, Any] = yaml.safe_load(config.read_text())
    trainer = settings["trainer"]
    for name in ("logger", "default_root_dir"):
        trainer.pop(name)
    own = ("lightning_rl.LastCheckpoint", "kept_run.RunClock")
    trainer["callbacks"] = [x for x in trainer["callbacks"] or () if x["class_path"] not in own] or None
    settings.pop("ckpt_path", None)
    return settings


def parse(args: list[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--out", type=Path, help="folder of the results")
    parser.add_argument("--episodes", type=int, default=EPISODES, help="evaluation episodes")
    parser.add_argument("--minutes", type=int, help="maximum minutes of training")
    parser.add_argument("--folder", type=Path, help="folder to store the run in, and to resume it from")
    known, overrides = parser.parse_known_args(args)
    if not known.config.is_file():
        parser.error(f"config={str(known.config)!r}: expected a file")
    if known.config.resolve().parent.parent != ROOT / "configs" and known.out is None:
        parser.error(f"config={str(known.config)!r} is not a shipped one: expected --out with another folder")
    if (overrides or known.episodes != EPISODES) and known.out is None:
        parser.error(f"{overrides or '--episodes'} change the shipped benchmark: expected --out with another folder")
    return known, overrides


if __name__ == "__main__":
    # Lightning warns if the program has command line arguments.
    warnings.filterwarnings("ignore", "LightningCLI's args parameter")
    arguments, unknown = parse()
    folder, given = arguments.out or RESULTS, arguments
    written = reproduce(given.config, given.seed, folder, unknown, given.episodes, given.minutes, given.folder)
    print(written, file=sys.stderr)

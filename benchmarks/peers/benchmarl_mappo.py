"""BenchMARL's MAPPO with its default options on `simple_spread_v3`, with 25 steps per episode and discrete actions.

    OMP_NUM_THREADS=1 python benchmarks/peers/benchmarl_mappo.py --seed 0

BenchMARL counts steps of the environment, in which each of the three agents acts. The result, the return of the team
with the most likely actions in 100 episodes, goes to `benchmarks/results/mappo/benchmarl.json`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from benchmarl.algorithms import MappoConfig
from benchmarl.environments import PettingZooTask
from benchmarl.experiment import Callback, Experiment, ExperimentConfig
from benchmarl.models.mlp import MlpConfig

RESULT = Path(__file__).parents[1] / "results" / "mappo" / "benchmarl.json"
STEPS, EPISODES = 480_000, 100


class Returns(Callback):  # type: ignore[misc]
    """Keeps the returns of the team in the latest evaluation."""

    def on_evaluation_end(self, rollouts: list[Any]) -> None:
        self.returns = [float(rollout["next", "agent", "reward"].sum()) for rollout in rollouts]


def run(seed: int, folder: str) -> dict[str, Any]:
    task = PettingZooTask.SIMPLE_SPREAD.get_from_yaml()
    task.config["max_cycles"] = 25
    config = ExperimentConfig.get_from_yaml()
    config.prefer_continuous_actions = config.render = config.create_json = False
    config.loggers, config.save_folder = [], folder
    config.max_n_frames, config.evaluation_episodes, config.evaluation_interval = STEPS, EPISODES, 60_000
    kept, network = Returns(), MlpConfig.get_from_yaml()
    experiment = Experiment(
        task=task,
        algorithm_config=MappoConfig.get_from_yaml(),
        model_config=network,
        critic_model_config=network,
        seed=seed,
        config=config,
        callbacks=[kept],
    )
    experiment.run()
    experiment._evaluation_loop()  # `run` evaluates only with loggers
    mean = sum(kept.returns) / len(kept.returns)
    return {"seed": seed, "steps": experiment.total_frames, "return": mean, "cpu_seconds": time.process_time()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, required=True)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        found = run(parser.parse_args().seed, folder)
    versions = {name: version(name) for name in ("benchmarl", "torchrl", "pettingzoo", "torch")}
    stored = json.loads(RESULT.read_text()) if RESULT.exists() else {"runs": []}
    runs = [one for one in stored["runs"] if one["seed"] != found["seed"]] + [found]
    result = {"env_id": "pettingzoo.mpe.simple_spread_v3", "episodes": EPISODES, "versions": versions}
    RESULT.write_text(json.dumps(result | {"runs": sorted(runs, key=lambda one: one["seed"])}, indent=2) + "\n")


if __name__ == "__main__":
    main()

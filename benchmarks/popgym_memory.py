"""Kinds of memory on a POPGym task of medium difficulty.

    OMP_NUM_THREADS=1 nice -n 19 python benchmarks/popgym_memory.py [--seeds 5] [--steps 5000000]

All kinds train with `configs/ppo/popgym_repeat_previous_medium.yaml`. Needs the extra `popgym`, and hours. The result
goes to `benchmarks/results/popgym_memory/repeat_previous_medium.json`.
"""

from __future__ import annotations

import argparse
from typing import Any

import yaml
from lightning.pytorch import seed_everything
from record import ROOT
from short_runs import Scores, quiet_trainer, write_result

from lightning_rl import PPO, EnvStepLimit, RolloutDataModule

KINDS: dict[str, dict[str, Any]] = {
    "gru": {"kind": "gru"},
    "lstm": {"kind": "lstm"},
    "mingru": {"kind": "mingru"},
    "gtrxl": {"kind": "gtrxl", "context_length": 40},
}


def compare(seeds: int, steps: int) -> dict[str, Any]:
    """Return the evaluations of every kind and seed."""
    config = yaml.safe_load((ROOT / "configs" / "ppo" / "popgym_repeat_previous_medium.yaml").read_text())
    options: dict[str, Any] = config["model"]["init_args"]
    result: dict[str, Any] = {"configuration": "configs/ppo/popgym_repeat_previous_medium.yaml", "steps": steps}
    for name, memory in KINDS.items():
        options["policy"]["memory"] = {"hidden_size": 64, **memory}
        result[name] = []
        for seed in range(seeds):
            seed_everything(seed)
            data = RolloutDataModule(**config["data"], seed=seed)
            model, scores = PPO(data.observation_space, data.action_space, **options), Scores()
            quiet_trainer(EnvStepLimit(steps), scores, max_epochs=-1).fit(model, data)
            result[name].append({"seed": seed, "env_steps": scores.env_steps, "returns": scores.returns})
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5_000_000)
    given = parser.parse_args()
    write_result("popgym_memory/repeat_previous_medium", lambda: compare(given.seeds, given.steps))

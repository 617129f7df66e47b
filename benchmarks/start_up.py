"""Measure start-up times: `python benchmarks/start_up.py --save`.

The command line's help is compared with `import lightning.pytorch`, and the time to learn from the first rollout with
the fastest script that trains under a Trainer: one batch of Lightning's own toy model. Each script is a separate
process; they alternate, and the CPU seconds of whole processes are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
from typing import Any

from record import add_saving, save

_QUIET = "logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False"
SCRIPTS = {
    "import lightning.pytorch": "import lightning.pytorch",
    "lightning-rl --help": "import sys; sys.argv[1:] = ['--help']; from lightning_rl.__main__ import run; run()",
    "toy model, one batch": f"""
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
Trainer(accelerator="cpu", max_steps=1, limit_val_batches=0, {_QUIET}).fit(BoringModel())
""",
    "PPO, one rollout": f"""
from lightning.pytorch import Trainer
from lightning_rl import PPO, RolloutDataModule
data = RolloutDataModule("CartPole-v1", num_envs=8, rollout_length=128, rollouts_per_epoch=1, seed=0)
model = PPO(data.observation_space, data.action_space)
Trainer(accelerator="cpu", max_epochs=1, limit_val_batches=0, {_QUIET}).fit(model, data)
""",
}
RATIOS = {
    "help": ("lightning-rl --help", "import lightning.pytorch"),
    "first rollout": ("PPO, one rollout", "toy model, one batch"),
}


def cpu_seconds(script: str) -> float:
    """Run a script in a separate process and return its CPU time.

    Raises:
        RuntimeError: The script failed, with its output.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(f"status {done.returncode} of:\n{script}\n{done.stderr[-2000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure_all(repeats: int) -> dict[str, Any]:
    """Run all scripts in alternation and return their CPU seconds and the ratios of their medians."""
    seconds: dict[str, list[float]] = {name: [] for name in SCRIPTS}
    for _ in range(repeats):
        for name, script in SCRIPTS.items():
            seconds[name].append(round(cpu_seconds(script), 3))
    medians = {name: statistics.median(taken) for name, taken in seconds.items()}
    ratios = {name: round(medians[ours] / medians[theirs], 3) for name, (ours, theirs) in RATIOS.items()}
    return {"ratios": ratios, "median_cpu_seconds": medians, "cpu_seconds": seconds}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    add_saving(parser)
    args = parser.parse_args()
    result = measure_all(args.repeats)
    save(result, args.save, "start_up.json")
    print(json.dumps(result))

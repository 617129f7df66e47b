"""Measure how the cost scales with the number of environments and of processes.

    OMP_NUM_THREADS=1 python benchmarks/scaling.py environments --backend torch --save
    OMP_NUM_THREADS=1 python benchmarks/scaling.py processes --workload W3 --backend sync --save

`environments` trains PPO on CartPole in 8 to 1,024 environments, with equal numbers of environment steps and
minibatches per rollout, and measures CPU microseconds per environment step. `processes` measures wall time on a
workload of `workloads.json`: two DDP processes of one thread, with half of the environments each, against one process
of one thread. It needs two idle cores.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import measure
import torch
import torch_cartpole
from lightning.pytorch import Callback, LightningModule, Trainer
from record import add_saving, save
from workload_models import make_data, make_model

from lightning_rl import PPO, RolloutDataModule
from lightning_rl.environments import Backend
from lightning_rl.rollouts.rollout import Rollout

COUNTS = (8, 32, 128, 512, 1024)
ROWS = 8192
"""Environment steps in a rollout of all processes, whatever the number of environments."""


class Ticks(Callback):
    """Ticks the clock after each rollout of this process."""

    def __init__(self) -> None:
        self.clock = measure.Clock()
        self.steps = 0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: Rollout, batch_idx: int
    ) -> None:
        self.steps += batch.num_steps
        self.clock.tick(self.steps)


def train(model: PPO, data: RolloutDataModule, processes: int = 1) -> tuple[int, float, float]:
    """Train for an epoch; return this process's environment steps, wall and CPU seconds after the first rollouts."""
    ticks = Ticks()
    trainer = Trainer(
        accelerator="cpu",
        devices=processes,
        strategy="ddp" if processes > 1 else "auto",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        callbacks=[ticks],
    )
    trainer.fit(model, data)
    return ticks.clock.interval()


def train_cartpole(num_envs: int, backend: Backend, rollouts: int) -> tuple[int, float, float]:
    """Train on `num_envs` copies of CartPole, and return the result of `train`."""
    env_id = torch_cartpole.ID if backend == "torch" else "CartPole-v1"
    kwargs = {"num_threads": measure.THREADS} if backend == "envpool" else {}
    length, total = ROWS // num_envs, rollouts + measure.WARM_UP
    data = RolloutDataModule(env_id, num_envs, length, total, backend=backend, env={"kwargs": kwargs}, seed=0)
    torch.manual_seed(0)
    return train(PPO(data.observation_space, data.action_space), data)


def environments(backend: Backend, rollouts: int, counts: tuple[int, ...]) -> dict[str, Any]:
    """Return the cost of an environment step by the number of environments, in rising and then in falling order."""
    costs: dict[int, list[float]] = {count: [] for count in counts}
    for count in (*counts, *reversed(counts)):
        steps, _, cpu_seconds = train_cartpole(count, backend, rollouts)
        costs[count].append(round(1e6 * cpu_seconds / steps, 2))
    return {"backend": backend, "cpu_microseconds_per_step": {str(count): min(costs[count]) for count in counts}}


def processes(args: argparse.Namespace) -> dict[str, Any]:
    """Return the ratio of the wall times of one process and of two, in alternation."""
    seconds: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(args.repeats):
        for number, taken in seconds.items():
            command = [sys.executable, str(Path(__file__).resolve()), "one", "--processes", str(number)]
            command += ["--workload", args.workload, "--backend", args.backend, "--rollouts", str(args.rollouts)]
            command += [] if args.num_envs is None else ["--num_envs", str(args.num_envs)]
            done = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=False)
            if done.returncode:
                raise RuntimeError(
                    f"{' '.join(command[2:])} ended with status {done.returncode}:\n{done.stderr[-2000:]}"
                )
            taken.append(json.loads(done.stdout.splitlines()[-1])["seconds"])
    ratios = [one / two for one, two in zip(seconds[1], seconds[2], strict=True)]
    return {
        "workload": args.workload,
        "backend": args.backend,
        "num_envs": args.num_envs or measure.WORKLOADS[args.workload]["num_envs"],
        "speed_up": round(statistics.median(ratios), 3),
        "speed_ups": [round(ratio, 3) for ratio in ratios],
        "seconds": {str(number): [round(value, 3) for value in taken] for number, taken in seconds.items()},
    }


def one(args: argparse.Namespace) -> dict[str, Any] | None:
    """Train in one process or as one rank of several; the first rank returns the measurement."""
    workload = measure.WORKLOADS[args.workload] | {"rollouts": args.rollouts + measure.WARM_UP}
    workload["num_envs"] = (args.num_envs or workload["num_envs"]) // args.processes
    data = make_data(workload, args.backend, 0)
    torch.manual_seed(0)
    steps, seconds, _ = train(make_model(workload, data), data, args.processes)
    first = int(os.environ.get("LOCAL_RANK", "0")) == 0
    return {"env_steps": steps * args.processes, "seconds": seconds} if first else None


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["environments", "processes", "one"])
    parser.add_argument("--backend", choices=["sync", "native", "torch", "envpool"], default="native")
    parser.add_argument("--rollouts", type=int, default=8, help="timed rollouts of each run")
    parser.add_argument("--counts", type=int, nargs="+", default=COUNTS, help="numbers of environments")
    parser.add_argument("--workload", choices=["W1", "W2", "W3"], default="W1", help="workload of processes")
    parser.add_argument("--num_envs", type=int, help="total environments of processes, in place of the workload's")
    parser.add_argument("--processes", type=int, default=1, help="processes of a single measurement (one)")
    parser.add_argument("--repeats", type=int, default=5, help="runs of either side of processes")
    add_saving(parser)
    return parser.parse_args()


def main(args: argparse.Namespace) -> None:
    torch.set_num_threads(measure.THREADS)
    result: dict[str, Any] | None
    name = args.what
    if args.what == "environments":
        result = environments(args.backend, args.rollouts, tuple(args.counts))
        name = f"environments-{args.backend}"
    elif args.what == "processes":
        result = processes(args)
        name = f"processes-{args.workload}-{result['num_envs']}-{args.backend}"
    else:
        result = one(args)
    if result is not None:
        save(result, args.save, f"scaling/{name}.json")
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(parse())

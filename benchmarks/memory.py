"""Measure memory: `python benchmarks/memory.py growth`, `python benchmarks/memory.py images`.

`growth` trains on thousands of tiny rollouts and fits a line to the resident memory of the process. `images` collects
one rollout of Pong in 64 environments, learns from it once, and prints the peak memory.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
from pathlib import Path
from typing import Any

import measure
import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from record import add_saving, save

from lightning_rl import PPO, AtariPreprocessing, RolloutDataModule
from lightning_rl.nested import leaves
from lightning_rl.rollouts.rollout import Rollout

_MIB = 2**20


def resident() -> int:
    """Return the resident memory of this process in bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def peak() -> int:
    """Return the peak resident memory of this process in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Watch(Callback):
    """Records the resident memory at intervals, and keeps the last rollout."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.seen: list[tuple[int, int]] = []
        self.stored = self.data = 0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: Rollout, batch_idx: int
    ) -> None:
        done = trainer.fit_loop.total_batch_idx + 1
        if done % self.every == 0:
            self.seen.append((done, resident()))
        self.stored, self.data = storage(batch)


def storage(rollout: Rollout) -> tuple[int, int]:
    """Return the bytes of memory behind a rollout's tensors, and the bytes of its `T` steps alone."""
    length = rollout.shape[0]
    fields = ("observations", "actions", "rewards", "terminated", "truncated", "log_probs", "values", "next_values")
    data = sum(leaf[:length].nbytes for name in fields for leaf in leaves(getattr(rollout, name)))
    tensors = [leaf for value in vars(rollout).values() for leaf in leaves(value) if isinstance(leaf, torch.Tensor)]
    behind = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    return sum(behind.values()), data


def trainer(watch: Watch) -> Trainer:
    return Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        callbacks=[watch],
    )


def growth(rollouts: int) -> dict[str, Any]:
    """Train on tiny rollouts; return the slope of the resident memory after a quarter of them."""
    torch.manual_seed(0)
    data = RolloutDataModule("CartPole-v1", 2, 8, rollouts, seed=0)
    model = PPO(
        data.observation_space, data.action_space, num_epochs=1, num_minibatches=1, policy={"hidden_sizes": (8,)}
    )
    watch = Watch(every=max(1, rollouts // 100))
    trainer(watch).fit(model, data)
    done, seen = np.array(watch.seen[len(watch.seen) // 4 :], float).T
    slope = float(np.polyfit(done, seen, 1)[0])
    return {
        "rollouts": rollouts,
        "bytes_per_rollout": round(slope, 1),
        "growth_mib": round((seen[-1] - seen[0]) / _MIB, 2),
        "resident_mib": round(seen[-1] / _MIB, 1),
    }


def images(num_envs: int, length: int) -> dict[str, Any]:
    """Collect a rollout of Pong and learn from it in one pass of minibatches of 512; return the memory used."""
    torch.manual_seed(0)
    data = RolloutDataModule(
        "ALE/Pong-v5", num_envs, length, 1, backend="native", env={"atari": AtariPreprocessing()}, seed=0
    )
    minibatches = max(1, num_envs * length // 512)
    model = PPO(data.observation_space, data.action_space, num_epochs=1, num_minibatches=minibatches)
    before = resident()
    watch = Watch(every=1)
    trainer(watch).fit(model, data)
    return {
        "num_envs": num_envs,
        "rollout_length": length,
        "data_mib": round(watch.data / _MIB, 1),
        "rollout_mib": round(watch.stored / _MIB, 1),
        "before_mib": round(before / _MIB, 1),
        "peak_mib": round(peak() / _MIB, 1),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["growth", "images"])
    parser.add_argument("--rollouts", type=int, default=2000, help="rollouts of growth")
    parser.add_argument("--num_envs", type=int, default=64, help="environments of images")
    parser.add_argument("--length", type=int, default=128, help="rollout length of images")
    add_saving(parser)
    args = parser.parse_args()
    torch.set_num_threads(measure.THREADS)
    result = growth(args.rollouts) if args.what == "growth" else images(args.num_envs, args.length)
    save(result, args.save, f"memory/{args.what}.json")
    print(json.dumps(result))

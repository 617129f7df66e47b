"""Helpers for short runs that compare algorithms: Trainers without output, and their scores."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from record import add_saving, save, source


class Scores(Callback):
    """Records environment steps, mean return and mean length of every validation."""

    def __init__(self) -> None:
        self.env_steps: list[int] = []
        self.returns: list[float] = []
        self.lengths: list[float] = []

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.env_steps.append(int(pl_module.env_steps))
        self.returns.append(round(float(trainer.callback_metrics["val/episode_return"]), 4))
        self.lengths.append(round(float(trainer.callback_metrics["val/episode_length"]), 2))


def quiet_trainer(*callbacks: Callback, **options: Any) -> Trainer:  # options of the Trainer
    """Return a Trainer on the CPU without output and files."""
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    given = {"accelerator": "cpu", "num_sanity_val_steps": 0, **dict.fromkeys(off, False), **options}
    return Trainer(callbacks=list(callbacks), **given)


def main(doc: str | None, name: str, compare: Callable[[int], dict[str, Any]], seeds: int = 3) -> None:
    """Run a comparison with the asked number of seeds and print its result; with `--save` write `<name>.json`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=seeds)
    add_saving(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    imported = source()  # the files may change during the runs
    result = compare(arguments.seeds)
    print(json.dumps(result))
    save(result, arguments.save, f"{name}.json", imported)

"""The configuration of each start of a run, saved in its folder."""

from __future__ import annotations

import os
from pathlib import Path

import jsonargparse
from jsonargparse import Namespace
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightning_rl.checkpointing.run_folders import configurations, next_configuration
from lightning_rl.tools.curves import RUN_FOLDER

# A null that was given in place of another default must be in the file.
_RENAMED = tuple(map(int, jsonargparse.__version__.split(".")[:2])) >= (4, 49)
_KEEP_NULL = {"skip_unset" if _RENAMED else "skip_none": False}


class SaveConfig(SaveConfigCallback):
    """Save the configuration of a training run in its folder, such that using it again starts a run of its own."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Save it, but not when a run is evaluated."""
        if stage == "fit":
            super().setup(trainer, pl_module, stage)

    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Save it where the run keeps its files, beside those of earlier starts unless it equals the last of them.

        A log that is elsewhere gets a file with the path of the folder.
        """
        folder = Path(trainer.default_root_dir)
        folder.mkdir(parents=True, exist_ok=True)
        text, earlier = configuration(self.parser, self.config), configurations(folder)
        if not earlier or earlier[-1].read_text() != text:
            next_configuration(folder).write_text(text)
        for logger in trainer.loggers:
            if isinstance(logger, CSVLogger | TensorBoardLogger):
                logger.experiment  # noqa: B018 - makes its folder, and warns where there are files in it
                log = Path(logger.log_dir)
                if log.resolve() != folder.resolve():
                    (log / RUN_FOLDER).write_text(f"{os.path.relpath(folder, log)}\n")


def configuration(parser: LightningArgumentParser, config: Namespace) -> str:
    """Return the YAML of a run's configuration; used again, it starts a new run."""
    kept = config.clone()
    kept["ckpt_path"] = None
    kept["resume_changes"] = "refuse"
    return str(parser.dump(kept, skip_validation=True, **_KEEP_NULL))

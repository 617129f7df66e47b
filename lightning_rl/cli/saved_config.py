"""The configuration of each start of a run, saved in its folder."""

from __future__ import annotations

import os
from pathlib import Path

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightning_rl.checkpointing.run_folders import configurations, next_configuration
from lightning_rl.tools.curves import RUN_FOLDER


class SaveConfig(SaveConfigCallback):
    """Save the configuration of a training run in its folder; used again, it starts a new run."""

    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Save the configuration beside the ones of earlier starts, unless it equals the last of these.

        A log in another folder gets a file with the path of the run folder.
        """
        folder = Path(trainer.default_root_dir)
        kept = self.config.clone()
        kept.ckpt_path, kept.resume_changes = None, "refuse"
        text = str(self.parser.dump(kept, skip_validation=True, skip_unset=False))
        if [earlier.read_text() for earlier in configurations(folder)[-1:]] != [text]:
            next_configuration(folder).write_text(text)
        for logger in trainer.loggers:
            if isinstance(logger, CSVLogger | TensorBoardLogger):
                logger.experiment  # noqa: B018 - makes its folder, and warns if that holds files
                log = Path(logger.log_dir)
                if log.resolve() != folder.resolve():
                    (log / RUN_FOLDER).write_text(f"{os.path.relpath(folder, log)}\n")

"""Policies for use without this package, exported during a run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.types import STEP_OUTPUT

from lightning_rl.callbacks.env_steps import EnvStepWriter
from lightning_rl.files import unfinished_folder
from lightning_rl.nested import Nested
from lightning_rl.rollouts.rollout import Rollout
from lightning_rl.tools.export import (
    FOLDER_PATTERN,
    METADATA,
    PROGRAMS,
    ExportFormat,
    check_exportable,
    check_options,
    export_policy,
    first_steps,
)
from lightning_rl.training.clock import env_steps_of
from lightning_rl.validation import check, is_int


class PolicyExport(EnvStepWriter):
    """Export the policy after each interval of environment steps, and at the end.

    Each export is a folder `step=…` with the files of `lightning_rl.tools.export.export_policy`, checked against the
    policy on observations of the last rollout. The first rank writes, and the run waits: for small networks a second
    with `torch_export`, some seconds with `onnx`, and once as long at the start for a check.

    Args:
        every_n_env_steps: Environment steps of all ranks between exports.
        dirpath: Folder; by default `policies` in the folder of the logger or, without one, of the Trainer.
        keep: Number of exports to keep, those written last; -1 keeps all.
        format: `torch_export` for PyTorch, or `onnx` for any runtime of ONNX.
        programs: `greedy`, `sampled` or both.

    Raises:
        ConfigurationError: In `on_fit_start`: the policy cannot be exported, or the folder cannot be written.
    """

    subfolder = "policies"

    def __init__(
        self,
        every_n_env_steps: int,
        dirpath: str | Path | None = None,
        keep: int = -1,
        format: ExportFormat = "torch_export",
        programs: Sequence[str] = PROGRAMS,
    ) -> None:
        check(is_int(keep) and (keep == -1 or keep > 0), "keep", keep, "an integer of at least 1, or -1")
        check_options(format, programs)
        super().__init__(every_n_env_steps, dirpath)
        self.keep = keep
        self.format: ExportFormat = format
        self.programs = tuple(programs)
        self._observations: Sequence[Nested] | None = None
        self._score: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"score": self._score}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._score = state_dict["score"]

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":  # an earlier run may have trained another model
            self._score = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        check_exportable(pl_module, self.format, self.programs)
        self.check_folder(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int
    ) -> None:
        if isinstance(batch, Rollout):
            self._observations = first_steps(batch.observations)
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def write(self, folder: Path, trainer: Trainer, pl_module: LightningModule) -> None:
        env_id = getattr(getattr(trainer.datamodule, "spec", None), "env_id", None)  # type: ignore[attr-defined]
        export_policy(
            pl_module,
            folder / FOLDER_PATTERN.format(pl_module.env_steps),
            env_id,
            format=self.format,
            programs=self.programs,
            observations=self._observations,
            score=self._score,
        )
        if self.keep > 0:
            # By time: exports of an earlier, longer run may have larger steps.
            exports = folder.glob(FOLDER_PATTERN.format("*") + f"/{METADATA}")
            for old in sorted(exports, key=lambda path: path.stat().st_mtime_ns)[: -self.keep]:
                with unfinished_folder(folder) as scratch:  # a part of an export could not be replaced
                    os.replace(old.parent, Path(scratch) / "old")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if (found := trainer.callback_metrics.get("val/episode_return")) is not None and not trainer.sanity_checking:
            steps = env_steps_of(pl_module)
            self._score = {"metric": "val/episode_return", "mean": float(found), "env_steps": steps}

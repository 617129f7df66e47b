"""The command line: `lightning-rl fit|validate|test|predict --config …`."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_rl.algorithms import OnPolicyAlgorithm
from lightning_rl.callbacks import EnvStepLimit
from lightning_rl.datamodule import RolloutDataModule
from lightning_rl.environments import EnvironmentFailure
from lightning_rl.progress import EnvStepProgressBar
from lightning_rl.runs import (
    CHECKPOINTS,
    existing_checkpoint,
    find_checkpoint,
    new_run_dir,
    run_dir_of,
    run_root,
)
from lightning_rl.spaces import space_to_dict
from lightning_rl.validation import ConfigurationError


class OnPolicyCLI(LightningCLI):
    """`LightningCLI` whose model gets the environment's spaces, and whose runs have a folder that a restart finds."""

    run_dir: Path

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Link the spaces, and add what belongs to a run rather than to one of its parts."""
        for space in ("observation_space", "action_space"):
            parser.link_arguments(
                f"data.{space}", f"model.init_args.{space}", compute_fn=space_to_dict, apply_on="instantiate"
            )
        parser.add_argument(
            "--max_env_steps",
            type=int | None,
            default=None,
            help="Stop with the first rollout that reaches this number of environment steps of all ranks.",
        )

    def _parse_ckpt_path(self) -> None:
        """Resolve `last` and `best`, and choose the folder of the run.

        Unlike Lightning's, this does not put the checkpoint's hyper-parameters over those of the command line.
        """
        config = self.config[self.config.subcommand]
        root = run_root(config.trainer.default_root_dir, config.model.class_path.rpartition(".")[2], config.data.env_id)
        name = config.get("ckpt_path")
        checkpoint: Path | None = None
        if name in ("last", "best"):
            checkpoint = find_checkpoint(root, name)
            if checkpoint is None and self.config.subcommand != "fit":
                raise ConfigurationError(f"ckpt_path={name!r}: expected a checkpoint under {root}, there is none")
            if checkpoint is None:
                _say(f"WARNING: ckpt_path={name!r}: there is no checkpoint under {root}: starting a NEW run.")
        elif name:
            checkpoint = existing_checkpoint(name)
        config["ckpt_path"] = str(checkpoint) if checkpoint else None
        self.run_dir = run_dir_of(checkpoint, root) if checkpoint else new_run_dir(root)
        if checkpoint and self.config.subcommand == "fit":
            _say(f"Resuming from {checkpoint}")

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:  # noqa: ANN401
        """Give the Trainer a logger, checkpoints and a progress bar, unless the configuration has its own."""
        config = self._get(self.config_init, "trainer")
        given: list[Callback] = config.get("callbacks") or []
        given = given if isinstance(given, list) else [given]
        added: list[Callback] = []
        fitting = self.subcommand == "fit"
        if fitting and (limit := self._get(self.config_init, "max_env_steps")) is not None:
            added.append(EnvStepLimit(limit))
        if fitting and config.enable_checkpointing is not False and not _has(given, ModelCheckpoint):
            added.append(
                ModelCheckpoint(
                    dirpath=self.run_dir / CHECKPOINTS,
                    filename="best-{step}",
                    monitor="val/episode_return",
                    mode="max",
                    save_last=True,
                )
            )
        if config.enable_progress_bar is not False and not _has(given, ProgressBar):
            added.append(EnvStepProgressBar())
        if config.logger in (None, True):
            kwargs["logger"] = TensorBoardLogger(self.run_dir, name="", version="", default_hp_metric=False)
            kwargs["logger"] = kwargs["logger"] if fitting else False
        return super().instantiate_trainer(callbacks=[*given, *added], default_root_dir=str(self.run_dir), **kwargs)

    def after_fit(self) -> None:
        """Say where everything is, and what to do next."""
        checkpoints = [c for c in self.trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint)]
        path = next((c.best_model_path or c.last_model_path for c in checkpoints), "")
        score = self.trainer.callback_metrics.get("val/episode_return")
        said = [f"Done: {self.model.env_steps} environment steps"]
        said[0] += f", val/episode_return {float(score):.1f}" if score is not None else ""
        if self.trainer.log_dir and self.trainer.logger:
            said.append(
                f"logs: {_relative(self.trainer.log_dir)} (tensorboard --logdir {_relative(self.trainer.log_dir)})"
            )
        if path:
            config = _relative(Path(self.trainer.log_dir or self.run_dir) / "config.yaml")
            said.append(f"checkpoint: {_relative(path)}")
            said.append(f"next: lightning-rl test --config {config} --ckpt_path {_relative(path)}")
        _say(" | ".join(said))


def _has(callbacks: list[Callback], kind: type[Callback]) -> bool:
    return any(isinstance(callback, kind) for callback in callbacks)


def _relative(path: str | Path) -> str:
    path = Path(path).absolute()
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


@rank_zero_only
def _say(message: str) -> None:
    print(message, flush=True)


class _NoAdvertisements(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        """Drop Lightning's tips for other products."""
        return "\N{ELECTRIC LIGHT BULB}" not in record.getMessage()


def main(args: list[str] | None = None) -> OnPolicyCLI:
    """Run the command line.

    Args:
        args: Arguments; those of the process if None.

    Raises:
        SystemExit: With status 1 after a one-line message, where the configuration or an environment is at fault.
    """
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(_NoAdvertisements())
    try:
        return OnPolicyCLI(
            OnPolicyAlgorithm,
            RolloutDataModule,
            subclass_mode_model=True,
            save_config_kwargs={"overwrite": True},
            # A validation before training says nothing here; an epoch of rollouts is short.
            trainer_defaults={"num_sanity_val_steps": 0, "log_every_n_steps": 10, "max_epochs": -1},
            args=args,
        )
    except (ConfigurationError, EnvironmentFailure, FloatingPointError) as error:
        print(f"lightning-rl: error: {error}", file=sys.stderr, flush=True)
        sys.exit(1)

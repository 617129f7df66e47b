"""The command line: `lightning-rl fit|validate|test|predict --config …`."""

from __future__ import annotations

import signal
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import yaml
from jsonargparse import Namespace
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, ModelSummary, ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_rl import OnPolicyAlgorithm, RolloutDataModule  # with all classes, whose short names are known then
from lightning_rl.callbacks import EnvStepLimit, EpisodeRecorder
from lightning_rl.callbacks.episode_recorder import EpisodeLines
from lightning_rl.callbacks.policy_summary import PolicySummary
from lightning_rl.callbacks.progress_bars import EnvStepProgressBar
from lightning_rl.checkpointing.atomic import LastCheckpoint
from lightning_rl.checkpointing.format import CHECKPOINT_KEY, read_checkpoint
from lightning_rl.checkpointing.interruption import EarlyTermination, early_termination
from lightning_rl.checkpointing.resuming import check_fits, check_resumable
from lightning_rl.checkpointing.run_folders import (
    CHECKPOINTS,
    CONFIG,
    RunLock,
    configurations,
    default_checkpoints,
    find_checkpoint,
    has_any,
    new_run_dir,
    remove_empty,
    run_dir_of,
    run_root,
)
from lightning_rl.cli import COMMANDS, TRAINER_COMMANDS
from lightning_rl.cli.errors import end_with_message
from lightning_rl.cli.parser import CommandParser, ShortHelp, as_list, chooses_data_class, relative, say
from lightning_rl.cli.saved_config import SaveConfig, configuration
from lightning_rl.distributed import end_all_ranks
from lightning_rl.files import check_intact, read_yaml
from lightning_rl.tools.curves import changes
from lightning_rl.tools.shipped_configs import ActionConfig
from lightning_rl.training.checks import check_strategy
from lightning_rl.training.warning_filters import filter_command_line_warnings
from lightning_rl.validation import ConfigurationError, check, check_positive_int

DEFAULT_ENV_STEPS = 1_000_000
"""Where a run ends to which nothing else sets an end."""
_OF_THE_NEWEST = (None, "step")
"""What callbacks monitor that keep the newest checkpoints, not the best."""


class OnPolicyCLI(LightningCLI):
    """`LightningCLI` whose model gets the environment's spaces, and whose runs have a folder that a restart finds."""

    run_dir: Path | None = None
    """Folder of the run; None where nothing is to be written."""
    checkpoint: dict[str, Any] | None = None
    """What is resumed from or evaluated, until it has been held to the model."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - those of Lightning
        self._lock = RunLock()
        try:
            super().__init__(*args, **kwargs)
        except BaseException as error:
            if self.run_dir is not None:
                remove_empty(self.run_dir)
            self._lock.release()
            ranks_have_met = torch.distributed.is_available() and torch.distributed.is_initialized()
            if isinstance(error, Exception) and ranks_have_met:
                end_all_ranks(error, getattr(self.trainer.strategy.launcher, "procs", []))
            raise
        if self.subcommand is not None:  # the command is over
            self._lock.release()

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Return the commands; where the arguments begin with one, that one alone: a parser takes 0.1 s to make."""
        known = LightningCLI.subcommands()
        command = next(iter(CommandParser.given), None)
        return {command: known[command]} if command in known else known

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:  # noqa: ANN401 - those of the parser
        """Return a parser whose option `--config` takes the names of the shipped configurations too."""
        parser = self.parser_class(**{"dump_header": [f"lightning=={version('lightning')}"], **kwargs})
        about = "A file in YAML, or the name of a shipped one: ppo/cartpole."
        parser.add_argument("-c", "--config", action=ActionConfig, help=about)
        return parser

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Give the model the spaces of the data."""
        link_spaces(parser)

    def _parse_ckpt_path(self) -> None:
        """Resolve `last` and `best`, and choose the folder of the run.

        Unlike Lightning's, this does not put the checkpoint's hyper-parameters over those of the command line.
        """
        fitting, config = self.config.subcommand == "fit", self.config[self.config.subcommand]
        filter_command_line_warnings(evaluating=not fitting)
        data, algorithm = config.data, config.model.class_path.rpartition(".")[2]
        env_id = (data.init_args if self.subclass_mode_data else data).get("env_id", "environment")
        root = run_root(config.trainer.default_root_dir, algorithm, env_id)
        name = path = config.get("ckpt_path")
        if name in ("last", "best"):
            path = find_checkpoint(root, name, resumable=fitting)
            if path is None and not fitting:
                raise ConfigurationError(f"ckpt_path={name!r}: expected a checkpoint under {root}, there is none")
            if path is None:
                say(f"WARNING: ckpt_path={name!r}: there is no checkpoint under {root}: starting a NEW run.")
        if path is None and not fitting:
            say("WARNING: no --ckpt_path was given: this plays with an UNTRAINED policy.")
        config["ckpt_path"] = None if path is None else str(path)
        if path is not None:
            if name == path:  # others have been checked
                check_intact(path, "ckpt_path", "an intact checkpoint")
            self.checkpoint = read_checkpoint(path, mapped=True)  # the Trainer will read it whole
            steps = self.checkpoint[CHECKPOINT_KEY]["env_steps"]
            self.run_dir = run_dir_of(Path(path), steps)
            self._run_configurations = configurations(Path(path).parent.parent)
            where = " in a NEW run folder" if fitting and self.run_dir is None else ""
            say(f"{'Resuming' if fitting else 'Policy'} from {path}, at {steps} environment steps{where}")
        self._root = root

    def before_instantiate_classes(self) -> None:
        """Set the number of threads before anything is computed."""
        if (num_threads := self.config[self.subcommand].get("num_threads")) is not None:
            check_positive_int("num_threads", num_threads)
            torch.set_num_threads(num_threads)

    def instantiate_classes(self) -> None:
        """Refuse what cannot be trained, or does not fit the checkpoint, before anything is written."""
        super().instantiate_classes()
        if isinstance(handler := signal.getsignal(signal.SIGTERM), EarlyTermination):
            handler.watch(self.trainer)
        if self.subcommand == "fit":
            self.model.check_run(self.trainer, self.datamodule.rollout_shape)
            self.model.check_actors(self.datamodule.num_actors)
        if self.checkpoint is not None:
            if self.subcommand == "fit":
                check_resumable(self.checkpoint, self.model)
                self.datamodule.check_resumable(self.checkpoint.get(type(self.datamodule).__qualname__, {}))
            check_fits(self.checkpoint, self.model)
            if self.subcommand == "fit":
                self._check_changes()
            self.checkpoint = None  # and with it the file, which a checkpoint of this run may replace
        elif self.subcommand == "fit" and (path := self._option("init_from")) is not None:
            parts = self._option("init_parts")
            self.model.init_from(path, None if parts is None else as_list(parts))

    def _check_changes(self) -> None:
        """Refuse to resume with other settings than those of the run's last start, unless they are confirmed."""
        last = self._run_configurations
        if not last or self._option("resume_changes") == "allow":
            return
        callbacks: list[Callback] = self.trainer.callbacks  # type: ignore[attr-defined]
        saver = next((callback for callback in callbacks if isinstance(callback, SaveConfig)), None)
        if saver is None:
            return
        now = yaml.safe_load(configuration(saver.parser, saver.config))
        if changed := changes(read_yaml(last[-1], "config") or {}, now):
            expected = "\n  ".join(["expected the same, or --resume_changes allow", *changed])
            raise ConfigurationError(f"ckpt_path: the settings differ from {relative(last[-1])}: {expected}")

    def _option(self, name: str) -> Any:  # noqa: ANN401
        """Return an option of the command, with its classes instantiated."""
        return self.config_init[self.subcommand].get(name)

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:  # noqa: ANN401
        """Give the Trainer a logger, checkpoints and a progress bar, unless the configuration has its own."""
        config = self._option("trainer")
        clip = config.gradient_clip_val
        check(clip is None, "trainer.gradient_clip_val", clip, "null; set model.optimizer.max_grad_norm instead")
        given: list[Callback] = config.get("callbacks") or []
        given = given if isinstance(given, list) else [given]
        added: list[Callback] = []
        if config.strategy is not None:
            check_strategy(config.strategy)
        fitting = self.subcommand == "fit"
        if fitting:
            limit = _whole(self._option("max_env_steps"))
            if limit is None and not (config.fast_dev_run or _has_end(config) or has_any(given, EnvStepLimit)):
                limit = DEFAULT_ENV_STEPS
            if limit is not None:
                added.append(EnvStepLimit(limit))
            if config.max_epochs is None:
                kwargs["max_epochs"] = -1  # or Lightning would take 1,000
        if config.enable_progress_bar is not False and not has_any(given, ProgressBar):
            added.append(EnvStepProgressBar())
        if config.enable_model_summary is not False and not has_any(given, ModelSummary):
            added.append(PolicySummary())
            kwargs["enable_model_summary"] = False  # of Lightning's own
        if self.subcommand == "predict":
            if (folder := self._option("record")) is not None:
                formats = self._option("record_as")
                added.append(EpisodeRecorder(folder, None if formats is None else as_list(formats)))
            added.append(EpisodeLines())  # after the bar, which has been closed by then
        if fitting and self.run_dir is None and not config.fast_dev_run:
            self.run_dir = new_run_dir(self._root)
        if fitting and self.run_dir is not None:
            self._lock.acquire(self.run_dir)
        if fitting and self.run_dir is not None and config.enable_checkpointing is not False:
            added += default_checkpoints(self.run_dir / CHECKPOINTS, given, validates=config.limit_val_batches != 0)
        if config.logger in (None, True):
            kwargs["logger"] = self._logger(self.run_dir) if fitting and self.run_dir is not None else False
        if self.run_dir is not None:
            kwargs["default_root_dir"] = str(self.run_dir)
        # `last.ckpt` is saved after the best one, so that it is the newest.
        callbacks = sorted([*given, *added], key=lambda callback: isinstance(callback, LastCheckpoint))
        try:
            return super().instantiate_trainer(callbacks=callbacks, **kwargs)
        except ValueError as error:
            raise ConfigurationError(f"trainer: {error}") from error

    def _logger(self, folder: Path) -> TensorBoardLogger:
        # What an interrupted run logged after its last checkpoint will be logged again.
        purge = {} if self.checkpoint is None else {"purge_step": self.checkpoint[CHECKPOINT_KEY]["env_steps"] + 1}
        return TensorBoardLogger(folder, name="", version="", default_hp_metric=False, **purge)

    def fit(self, **kwargs: Any) -> None:  # noqa: ANN401
        """Train; say where and how long before, and how to resume if training is interrupted."""
        where = "" if self.run_dir is None else f" in {relative(self.run_dir)}"
        end = _end_of(self.trainer, self._option("trainer").max_time)
        say(f"Training {type(self.model).__name__} on {self.datamodule.spec.env_id}{where} {end}")
        try:
            self.trainer.fit(**kwargs)
        except SystemExit:  # what Lightning makes of an interrupt
            if (chosen := self._checkpoint(last=True)) is not None:
                path = relative(chosen.best_model_path)
                say(f"Stopped. Go on with: lightning-rl fit --config {self._config_path()} --ckpt_path {path}")
            raise

    def after_fit(self) -> None:
        """Say where everything is, and what to do next."""
        # Where the Trainer spawned processes, their clock stays with them.
        done = f"Done: {steps} environment steps" if (steps := self.model.env_steps) else "Done"
        score = self.trainer.callback_metrics.get("val/episode_return")
        lines = [done if score is None else f"{done}, validation return at the end {_rounded(float(score))}"]
        if self.trainer.logger is not None and self.trainer.log_dir is not None:
            lines.append(f"  log:         {relative(self.trainer.log_dir)}")
        if (chosen := self._checkpoint(last=False)) is not None:
            best = relative(chosen.best_model_path)
            scored = chosen.monitor not in _OF_THE_NEWEST and chosen.best_model_score is not None
            why = _why_best(chosen) if scored else ""
            lines.append(f"  checkpoint:  {best}{why}")
            lines.append(f"  next:        lightning-rl test --config {self._config_path()} --ckpt_path {best}")
        if isinstance(self.trainer.logger, TensorBoardLogger):
            lines.append(f"  curves:      tensorboard --logdir {relative(self.trainer.logger.log_dir)}")
        say("\n".join(lines))

    def _config_path(self) -> str:
        folder = Path(self.trainer.default_root_dir)
        return relative((configurations(folder) or [folder / CONFIG])[-1])

    def _checkpoint(self, last: bool) -> ModelCheckpoint | None:
        """Return what has saved the best checkpoint, or the last one, as far as there is such a one."""
        saved = [c for c in self.trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint) and c.best_model_path]
        # One that keeps the newest, as `EnvStepCheckpoint` does, has a best one too: the newest.
        saved.sort(key=lambda c: (isinstance(c, LastCheckpoint) != last, c.monitor in _OF_THE_NEWEST))
        return saved[0] if saved else None


def _whole(steps: float | None) -> int | None:
    """Return environment steps as an integer: `1e5`, as other libraries have it, is 100000."""
    whole = steps is None or float(steps).is_integer()
    check(whole, "max_env_steps", steps, "a whole number such as 100000 or 1e5")
    return None if steps is None else int(steps)


def _has_end(config: Namespace) -> bool:
    """Whether options of the Trainer say when training ends; `max_epochs=-1` says that it never does."""
    return config.max_epochs is not None or config.max_steps != -1 or config.max_time is not None


def _end_of(trainer: Trainer, max_time: object) -> str:
    """Say when training ends."""
    limits = [c.max_env_steps for c in trainer.callbacks if isinstance(c, EnvStepLimit)]  # type: ignore[attr-defined]
    ends = [f"{min(limits)} environment steps"] if limits else []
    ends += [f"{trainer.max_epochs} epochs"] if trainer.max_epochs not in (None, -1) else []
    ends += [f"{trainer.max_steps} optimizer steps"] if trainer.max_steps != -1 else []
    ends += [f"max_time={max_time}"] if max_time is not None else []
    return f"until {' or '.join(ends)}" if ends else "without an end; stop it with Ctrl-C, or set --max_env_steps"


def _why_best(callback: ModelCheckpoint) -> str:
    """Say by what the best checkpoint is the best: the return at the end may be another one."""
    name = "validation return" if callback.monitor == "val/episode_return" else callback.monitor
    return f" (best {name}: {_rounded(float(callback.best_model_score))})"  # type: ignore[arg-type]


def link_spaces(parser: LightningArgumentParser) -> None:
    """Give the model the spaces of the data; call it in `add_arguments_to_parser` of a `LightningCLI`.

    Args:
        parser: Of a command, with or without the subclass modes of `LightningCLI`.
    """
    is_class = "model.observation_space" not in parser.get_defaults(skip_validation=True)
    model = "model.init_args" if is_class else "model"
    for space in ("observation_space", "action_space"):
        parser.link_arguments(f"data.{space}", f"{model}.{space}", apply_on="instantiate")


def _rounded(score: float) -> str:
    return f"{score:.{1 if abs(score) >= 10 else 3}f}"


def main(args: list[str] | None = None) -> OnPolicyCLI:
    """Run the command line.

    Args:
        args: Arguments; those of the process if None.

    Raises:
        SystemExit: After one message on the standard error: with status 2 where the arguments cannot be understood,
            with 1 where a setting or an environment is at fault.
    """
    filter_command_line_warnings()
    CommandParser.given = arguments = sys.argv[1:] if args is None else args
    others = " ".join(f"{name}: {COMMANDS[name]}" for name in COMMANDS if name not in TRAINER_COMMANDS)
    about = "On-policy reinforcement learning for PyTorch Lightning. Further commands, each with a --help of its own: "
    commands = {
        name: {
            "usage": f"lightning-rl {name} [--config NAME] [--model ALGORITHM] [--data.env_id ID] [options]",
            "description": f"{COMMANDS[name]} Options of an algorithm: lightning-rl {name} --model.help PPO. "
            "All options, also of the Trainer (--trainer.accelerator cpu) and the data: "
            f"lightning-rl {name} --help_all.",
        }
        for name in OnPolicyCLI.subcommands()
    }
    try:
        with early_termination():
            return OnPolicyCLI(
                OnPolicyAlgorithm,
                RolloutDataModule,
                subclass_mode_model=True,
                subclass_mode_data=chooses_data_class(arguments),
                parser_class=CommandParser,
                parser_kwargs={"description": about + others, "formatter_class": ShortHelp, **commands},
                save_config_callback=SaveConfig,
                save_config_kwargs={"save_to_log_dir": False},
                # A validation before training says nothing here; an epoch of rollouts is short.
                trainer_defaults={"num_sanity_val_steps": 0, "log_every_n_steps": 10},
                seed_everything_default=0,
                auto_configure_optimizers=False,  # the algorithms make their own
                args=args,
            )
    except Exception as error:
        end_with_message(error, arguments)
        raise

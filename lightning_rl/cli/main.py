"""The command line: `lightning-rl fit|validate|test|predict --config …`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from jsonargparse import Namespace
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, ModelSummary, ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightning_rl import (
    EnvStepLimit,
    EpisodeRecorder,
    LastCheckpoint,
    OnPolicyAlgorithm,
    RecordedEpisodes,
    RolloutDataModule,
)
from lightning_rl.callbacks.episode_recorder import EpisodeLines
from lightning_rl.callbacks.progress_bars import EnvStepProgressBar, PolicySummary
from lightning_rl.checkpointing import run_folders
from lightning_rl.checkpointing.format import CHECKPOINT_KEY, read_checkpoint
from lightning_rl.checkpointing.interruption import EarlyTermination, early_termination
from lightning_rl.checkpointing.resuming import check_fits, check_resumable
from lightning_rl.cli import COMMANDS
from lightning_rl.cli.parser import (
    ActionConfig,
    CommandParser,
    ShortHelp,
    chooses_data_class,
    end_with_message,
    say,
    search_beside,
    unknown_settings,
)
from lightning_rl.distributed import end_all_ranks, world_size
from lightning_rl.files import check_intact, read_yaml, relative, typed, write_file
from lightning_rl.options import default_groups, parameters_of
from lightning_rl.tools.curves import RUN_FOLDER, changes
from lightning_rl.tools.hub import pull_from_hub, push_to_hub
from lightning_rl.tools.plots import draw_runs
from lightning_rl.tools.trained import config_of, export_checkpoint
from lightning_rl.training.checks import check_strategy
from lightning_rl.training.warning_filters import filter_command_line_warnings
from lightning_rl.validation import ConfigurationError, as_list, check, check_positive_int, import_class

FUNCTIONS: dict[str, Any] = {"export": export_checkpoint, "plot": draw_runs, "pull": pull_from_hub, "push": push_to_hub}
"""The commands that run no Trainer; the parameters of their functions are the options."""
DEFAULT_ENV_STEPS = 1_000_000
"""Environment steps of a run without another limit."""
_FEW_PARAMETERS = 500_000
"""Policies with at most this number of parameters compute fastest on one CPU thread."""


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
        if [earlier.read_text(encoding="utf-8") for earlier in run_folders.configurations(folder)[-1:]] != [text]:
            write_file(run_folders.next_configuration(folder), text.encode())
        for logger in trainer.loggers:
            if isinstance(logger, CSVLogger | TensorBoardLogger):
                logger.experiment  # noqa: B018 - makes its folder, and warns if that holds files
                log = Path(logger.log_dir)
                if log.resolve() != folder.resolve():
                    try:
                        where = os.path.relpath(folder, log)
                    except ValueError:  # on another drive of Windows
                        where = str(folder.resolve())
                    (log / RUN_FOLDER).write_text(f"{where}\n", encoding="utf-8")


class OnPolicyCLI(LightningCLI):
    """`LightningCLI` whose model gets the spaces of the environment, and whose runs have folders to resume from."""

    run_dir: Path | None = None
    """Folder of the run; None if nothing is written."""
    checkpoint: dict[str, Any] | None = None
    """The checkpoint to resume or to evaluate, until it is compared with the model."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # as in Lightning
        self._lock = run_folders.RunLock()
        try:
            super().__init__(*args, **kwargs)
        except BaseException as error:
            if self.run_dir is not None:
                run_folders.remove_empty(self.run_dir)
            if isinstance(error, Exception) and world_size() > 1:
                end_all_ranks(error, getattr(self.trainer.strategy.launcher, "procs", []))
            raise
        finally:
            self._lock.release()

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Return the command that the arguments begin with, or else all commands: each parser takes 0.1 s to make."""
        known = LightningCLI.subcommands()
        return {name: known[name] for name in CommandParser.given[:1] if name in known} or known

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:  # as in Lightning
        """Return a parser whose option `--config` also takes names of shipped configurations."""
        parser = self.parser_class(**kwargs)
        parser.add_argument("-c", "--config", action=ActionConfig, help="A YAML file, or a shipped one: ppo/cartpole.")
        return parser

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Give the model the spaces of the data."""
        link_spaces(parser)

    def _parse_ckpt_path(self) -> None:
        """Resolve `last` and `best`, and choose the folder of the run."""
        # Overrides a private method of Lightning (2.5.5 to 2.6), where hyper-parameters of the checkpoint replace
        # options of the command line.
        config = self.config[self.config.subcommand]
        self._fits = self.config.subcommand == "fit"
        seed, data, algorithm = config.seed_everything, config.data, config.model.class_path.rpartition(".")[2]
        check(isinstance(seed, bool) or 0 <= seed < 2**32, "seed_everything", seed, "an integer from 0 to 2^32 - 1")
        check(config.trainer is not None, "trainer", None, "a dict of its options")
        for option, other in (("init_parts", "init_from"), ("record_as", "record")):
            given = config.get(option)
            check(given is None or config.get(other) is not None, option, given, f"null, or {other} beside it")
        if self.subclass_mode_data:
            if not self._fits and import_class("data", data.class_path, RolloutDataModule) is RecordedEpisodes:
                data.class_path = "lightning_rl.RolloutDataModule"
                data.init_args.pop("episodes")  # playing needs none
            data = data.init_args
        for group in default_groups(RolloutDataModule):
            check(data.get(group, {}) is not None, f"data.{group}", None, "a dict of its options")
        env_id = data.get("env_id", "environment")
        self._root = run_folders.run_root(config.trainer.default_root_dir, algorithm, env_id)
        name = path = config.ckpt_path
        if name in ("last", "best"):
            path = run_folders.find_checkpoint(self._root, name, resumable=self._fits)
            missing = f"ckpt_path={name!r}: there is no {name} checkpoint under {self._root}"
            if path is None and not self._fits:
                raise ConfigurationError(missing)
            if path is None:
                say(f"WARNING: {missing}: starting a NEW run.")
        elif path is not None:
            check_intact(path)
        elif not self._fits:
            say("WARNING: no --ckpt_path was given: this plays with an UNTRAINED policy.")
        config.ckpt_path = None if path is None else str(path)
        if path is not None:
            self.checkpoint = read_checkpoint(path, mapped=True)  # the Trainer reads the whole file later
            steps = self.checkpoint[CHECKPOINT_KEY]["env_steps"]
            self.run_dir = run_folders.run_dir_of(Path(path), steps)
            where = " in a NEW run folder" if self._fits and self.run_dir is None else ""
            what = "Resuming" if self._fits else f"Policy of {self.checkpoint[CHECKPOINT_KEY]['algorithm']}"
            say(f"{what} from {path}, at {steps} environment steps{where}")

    def instantiate_classes(self) -> None:
        """Refuse settings that cannot be trained or do not fit the checkpoint, before anything is written."""
        model = self.config[self.config.subcommand].model
        algorithm = import_class("model", model.class_path, OnPolicyAlgorithm)
        if dropped := unknown_settings("model", parameters_of(algorithm)):
            say(f"WARNING: dropped {', '.join(dropped)}, which {algorithm.__name__} does not have.")
        for group in default_groups(algorithm):
            check(model.init_args.get(group, {}) is not None, f"model.{group}", None, "a dict of its options")
        super().instantiate_classes()
        self._set_num_threads()
        if isinstance(handler := signal.getsignal(signal.SIGTERM), EarlyTermination):
            handler.trainer = self.trainer
        if self._fits:
            self.model.check_run(self.trainer, self.datamodule.rollout_shape)
            self.model.check_data(self.datamodule)
        if self.checkpoint is not None:
            if self._fits:
                check_resumable(self.checkpoint, self.model)
                self.datamodule.check_resumable(self.checkpoint.get(type(self.datamodule).__qualname__, {}))
            check_fits(self.checkpoint, self.model)
            self._check_changes()
            self.checkpoint = None  # closes the file, which a new checkpoint may replace
        elif self._fits and (path := self._option("init_from")) is not None:
            self.model.init_from(path, as_list(self._option("init_parts")) or None)

    def _set_num_threads(self) -> None:
        given, size = self._option("num_threads"), sum(x.numel() for x in self.model.policy.parameters())
        if given is not None or size <= _FEW_PARAMETERS:
            torch.set_num_threads(check_positive_int("num_threads", 1 if given is None else given))

    def _check_changes(self) -> None:
        """Refuse to resume with other settings than at the last start of the run, unless the user confirms them."""
        path = Path(self._option("ckpt_path"))
        run = run_folders.folder_around(path)
        starts = [] if run is None else run_folders.configurations(run)
        if not (self._fits and starts):
            return
        first, before = (read_yaml(starts[at], "config") or {} for at in (0, -1))
        if (kept := first.get("seed_everything")) != (seed := self._option("seed_everything")):
            say(f"Resuming with seed_everything={kept} of the run, not {seed}: its episodes and generators continue")
            if kept is not None:  # so that a new configuration in the run folder repeats the run
                self.config[self.config.subcommand].seed_everything = kept
        if self._option("resume_changes") == "refuse" and (changed := changes(before, self.config_dump)):
            lines = ["ckpt_path: the settings differ from the last start of the run:", *changed]
            limit = "" if (steps := self._option("max_env_steps")) is None else f" --max_env_steps {steps}"
            command = f"lightning-rl fit --config {relative(starts[-1])} --ckpt_path {relative(path)}{limit}"
            lines += [f"without the changes: {command}"]
            lines += [f"with the changes: lightning-rl {typed(CommandParser.given)} --resume_changes allow"]
            raise ConfigurationError("\n  ".join(lines))

    def _option(self, name: str) -> Any:
        """Return an option of the command, with its classes instantiated."""
        return self.config_init[self.subcommand].get(name)

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Give the Trainer a logger, checkpoints and a progress bar, unless the configuration has its own."""
        config = self._option("trainer")
        check_strategy(config.strategy or "auto")
        if config.barebones:  # nothing is written, not even into the folder of a resumed run
            self.run_dir = self.save_config_callback = None
            kwargs["log_every_n_steps"] = 0
        elif self._fits and not config.fast_dev_run:
            self.run_dir = self.run_dir or run_folders.new_run_dir(self._root)
            self._lock.acquire(self.run_dir)
        if not self._fits:
            self.save_config_callback = None
        elif config.max_epochs is None:
            kwargs["max_epochs"] = -1  # instead of Lightning's default of 1,000
        if config.logger in (None, True) or self.subcommand == "predict":  # which logs nothing
            # An interrupted run may have logged after its last checkpoint: these steps are logged again.
            again = None if self.checkpoint is None else self.checkpoint[CHECKPOINT_KEY]["env_steps"] + 1
            options: Any = {"name": "", "version": "", "default_hp_metric": False, "purge_step": again}
            writes = self._fits and self.run_dir is not None
            kwargs["logger"] = TensorBoardLogger(str(self.run_dir), **options) if writes else False
        if self.run_dir is not None:
            kwargs["default_root_dir"] = str(self.run_dir)
        given: list[Callback] = as_list(config.callbacks)
        callbacks = [*given, *self._default_callbacks(config, given)]
        # The best checkpoint is saved first; `InterruptionGuard` puts `LastCheckpoint` at the end.
        callbacks.sort(key=lambda callback: getattr(callback, "monitor", "") in run_folders.KEEP_NEWEST)
        try:
            # `PolicySummary` replaces the summary of Lightning.
            return super().instantiate_trainer(callbacks=callbacks, enable_model_summary=False, **kwargs)
        except (ValueError, TypeError, RuntimeError) as error:
            raise ConfigurationError(f"trainer: {error}") from error

    def _default_callbacks(self, config: Namespace, given: list[Callback]) -> Iterator[Callback]:
        """Yield the callbacks that options of the run ask for, and the default ones that the configuration lacks."""

        def has_any(kind: type[Callback]) -> bool:
            return any(isinstance(callback, kind) for callback in given)

        if self._fits:
            limit = self._option("max_env_steps")
            has_end = config.max_epochs is not None or config.max_steps != -1 or config.max_time is not None
            has_end = has_end or config.fast_dev_run or has_any(EnvStepLimit)
            if limit is not None or not has_end:
                yield EnvStepLimit(DEFAULT_ENV_STEPS if limit is None else limit)
        shows = not config.barebones
        if shows and config.enable_progress_bar is not False and not has_any(ProgressBar):
            yield EnvStepProgressBar()
        if shows and config.enable_model_summary is not False and not has_any(ModelSummary):
            yield PolicySummary()
        if self.subcommand == "predict":
            if (folder := self._option("record")) is not None:
                yield EpisodeRecorder(folder, as_list(self._option("record_as")) or None)
            yield EpisodeLines()  # after the progress bar, which is closed by then
        if self._fits and self.run_dir is not None and config.enable_checkpointing is not False:
            folder = self.run_dir / run_folders.CHECKPOINTS
            savers = [callback for callback in given if isinstance(callback, ModelCheckpoint)]
            for callback in savers:
                # `--ckpt_path` looks there. A logger may have a new folder when the run is resumed.
                callback.dirpath = callback.dirpath or str(folder.resolve())
            if config.limit_val_batches != 0 and all(x.monitor in run_folders.KEEP_NEWEST for x in savers):
                yield ModelCheckpoint(folder, "best-{step}", monitor="val/episode_return", mode="max")
            if not has_any(LastCheckpoint):
                yield LastCheckpoint(folder)

    def fit(self, **kwargs: Any) -> None:
        """Train. Print where and until when, and after an interruption the command that resumes the run."""
        where = "" if self.run_dir is None else f" in {relative(self.run_dir)}"
        end = _end_of(self.trainer, self._option("trainer").max_time)
        say(f"Training {type(self.model).__name__} on {self.datamodule.spec.env_id}{where} {end}")
        try:
            self.trainer.fit(**kwargs)
        except SystemExit:  # Lightning turns an interrupt into it
            for saver in self._savers()[-1:]:
                say(f"Continue with: lightning-rl fit {self._options_of(saver)}")
            raise

    def after_fit(self) -> None:
        """Print where the results are, and the next command."""
        # If the Trainer spawned processes, the step count stays with them.
        done = f"Done: {steps} environment steps" if (steps := self.model.env_steps) else "Done"
        score = self.trainer.callback_metrics.get("val/episode_return")
        validated = self.model.metrics.evaluation.since
        when = "at the end" if validated == steps else f"at step {validated}:"
        lines = [done if score is None else f"{done}, validation return {when} {score:.4g}"]
        folders = [logger.log_dir or logger.save_dir for logger in self.trainer.loggers]
        lines += [f"  log:         {relative(folder)}" for folder in folders if folder is not None]
        for saver in self._savers()[:1]:
            metric = "validation return" if saver.monitor == "val/episode_return" else saver.monitor
            best = saver.monitor not in run_folders.KEEP_NEWEST and saver.best_model_score is not None
            why = f" (best {metric}: {saver.best_model_score:.4g})" if best else ""
            lines.append(f"  checkpoint:  {relative(saver.best_model_path)}{why}")
            lines.append(f"  next:        lightning-rl test {self._options_of(saver)}")
        if isinstance(self.trainer.logger, TensorBoardLogger):
            lines.append(f"  curves:      tensorboard --logdir {relative(self.trainer.logger.log_dir)}")
        say("\n".join(lines))

    def _options_of(self, saver: ModelCheckpoint) -> str:
        """Return the options that name the configuration of the run and the checkpoint of a callback."""
        # A given configuration comes first if a module beside it was imported: only then this module is found again.
        folder = Path(self.trainer.default_root_dir)
        config = [folder / run_folders.CONFIG, *run_folders.configurations(folder)][-1]
        given = [Path(str(path)).absolute() for path in self._option("config") or ()]
        files = [str(getattr(module, "__file__", None)) for module in [*sys.modules.values()]]
        used = {path.parent for path in given if any(file.startswith(f"{path.parent}{os.sep}") for file in files)}
        beside = [path for path in given if path.parent in used - {Path.cwd()}]
        configs = " ".join(f"--config {relative(path)}" for path in dict.fromkeys([*beside, config.absolute()]))
        return f"{configs} --ckpt_path {relative(saver.best_model_path)}"

    def _savers(self) -> list[ModelCheckpoint]:
        return [c for c in self.trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint) and c.best_model_path]


def _end_of(trainer: Trainer, max_time: object) -> str:
    limits = [c.max_env_steps for c in trainer.callbacks if isinstance(c, EnvStepLimit)]  # type: ignore[attr-defined]
    ends: dict[str, Any] = {"environment steps": min(limits, default=-1), "epochs": trainer.max_epochs}
    ends |= {"optimizer steps": trainer.max_steps, "of max_time": max_time}
    if trainer.fast_dev_run:  # type: ignore[attr-defined]  # which sets the other limits
        ends = {"rollouts": trainer.limit_train_batches}
    text = " or ".join(f"{end} {unit}" for unit, end in ends.items() if end not in (None, -1))
    return f"until {text}" if text else "without a limit; stop it with Ctrl-C, or set --max_env_steps"


def link_spaces(parser: LightningArgumentParser) -> None:
    """Give the model the spaces of the data; call it in `add_arguments_to_parser` of a `LightningCLI`."""
    is_class = "model.observation_space" not in parser.get_defaults(skip_validation=True)
    model = "model.init_args" if is_class else "model"
    for space in ("observation_space", "action_space"):
        parser.link_arguments(f"data.{space}", f"{model}.{space}", apply_on="instantiate")


def run_command(arguments: Sequence[str]) -> None:
    """Run the command of `FUNCTIONS` that arguments begin with, and print what its function returns."""
    options = make_parser(arguments[0]).parse_args(arguments[1:])
    search_beside(options.get("config"))
    result = FUNCTIONS[arguments[0]](**options)
    say(f"Done: {relative(result) if isinstance(result, Path) else result}")
    if isinstance(result, Path) and (config := config_of(result)) is not None:
        say(f"  next: lightning-rl test --config {relative(config)} --ckpt_path {relative(result)}")


def make_parser(command: str) -> CommandParser:
    """Return the parser of a command of `FUNCTIONS`."""
    parser = CommandParser(prog=f"lightning-rl {command}", description=COMMANDS[command])
    if command == "plot":  # a list takes one positional argument otherwise
        about = "Folder of one or more runs. Runs that differ only in their seed, or have the same name, are one curve."
        parser.add_argument("runs", nargs="+", metavar="[NAME=]RUN", help=about)
    parser.sources = [("", FUNCTIONS[command])]
    parser.add_function_arguments(FUNCTIONS[command], as_positional=True, skip={"runs"} if command == "plot" else None)
    return parser


def main(args: list[str] | None = None) -> OnPolicyCLI | None:
    """Run the command line with arguments, by default of the process; commands that run no Trainer return None.

    Raises:
        SystemExit: After one message on the standard error, with status 2 for arguments that cannot be parsed, and 1
            for a setting or an environment that fails.
    """
    arguments = sys.argv[1:] if args is None else args
    filter_command_line_warnings(evaluating="fit" not in arguments)
    CommandParser.given, CommandParser.folder = arguments, Path.cwd()
    about = "On-policy reinforcement learning for PyTorch Lightning. Further commands, which have a --help too: "
    about += " ".join(f"{name}: {COMMANDS[name]}" for name in FUNCTIONS)
    try:
        if arguments and arguments[0] in FUNCTIONS:
            run_command(arguments)
            return None
        with early_termination():
            return OnPolicyCLI(
                OnPolicyAlgorithm,
                RolloutDataModule,
                subclass_mode_model=True,
                subclass_mode_data=chooses_data_class(arguments),
                parser_class=CommandParser,
                parser_kwargs={"description": about, "formatter_class": ShortHelp},
                save_config_callback=SaveConfig,
                save_config_kwargs={"save_to_log_dir": False},
                # A sanity check of the validation has no use here; an epoch of rollouts is short.
                trainer_defaults={"num_sanity_val_steps": 0, "log_every_n_steps": 10},
                seed_everything_default=0,
                auto_configure_optimizers=False,  # the algorithms have options for them
                args=args,
            )
    except Exception as error:
        end_with_message(error)
        raise

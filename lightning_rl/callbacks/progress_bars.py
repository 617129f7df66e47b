"""What a run shows while it trains: progress in environment steps, and the parts of the policy."""

from __future__ import annotations

import logging
import math
import shutil
import sys
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelSummary, RichProgressBar, TQDMProgressBar
from lightning.pytorch.callbacks.progress.progress_bar import ProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from lightning.pytorch.utilities.rank_zero import rank_zero_info  # type: ignore[attr-defined]
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import nn

from lightning_rl.data.datamodule import RolloutDataModule
from lightning_rl.files import print_line
from lightning_rl.training.clock import env_steps_of, planned_env_steps
from lightning_rl.training.metrics import log_is_due

DRAW_SECONDS = 0.5  # between updates in a terminal
LINE_SECONDS = 10.0  # minimum between lines in a file
LINE_FRACTION = 0.01  # minimum share of the run between lines, so at most 100 lines
LINE_SECONDS_ENDLESS = 60.0  # between lines of a run without an end
_RETURNS = {"rollout/episode_return": "return", "val/episode_return": "val"}
_HIDDEN = (*_RETURNS, "time/steps_per_second", "v_num")


class LineStream:
    """A text stream for tqdm: each state of the bar is a line in a file; in a notebook it replaces the last state."""

    encoding = "utf-8"  # tqdm draws bars in ASCII without it
    _handle: Any = None

    def __init__(self, notebook: bool) -> None:
        self.notebook = notebook

    def write(self, text: str) -> None:
        if not (text := text.strip()):
            return
        if not self.notebook:
            print_line(text)
        elif self._handle is not None:
            self._handle.update({"text/plain": text}, raw=True)
        else:
            from IPython.display import display

            self._handle = display({"text/plain": text}, raw=True, display_id=True)  # type: ignore[no-untyped-call]

    def flush(self) -> None:
        """Do nothing, since `write` shows the line."""


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    if "IPython" not in sys.modules:
        return False
    from IPython import get_ipython

    return getattr(get_ipython(), "kernel", None) is not None


class _EnvStepBar(ProgressBar):
    """Shows the returns of a run until it logs new ones."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._shown: dict[str, Any] = {}  # an earlier run may have trained another model

    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        returns, others = trainer.callback_metrics, super().get_metrics(trainer, pl_module)
        self._shown |= {name: float(returns[key]) for key, name in _RETURNS.items() if key in returns}
        self._shown |= {key: value for key, value in others.items() if key not in _HIDDEN}
        return self._shown

    def on_train_epoch_start(self, trainer: Trainer, *args: Any) -> None:
        """Do not begin a bar for each epoch."""


class EnvStepProgressBar(_EnvStepBar, TQDMProgressBar):
    """One bar for the whole training run: environment steps done of those planned, speed, returns, time left.

    The bar of a resumed run starts at the restored step. Without a terminal, lines replace the bar.

    Args:
        refresh_rate: 0 disables the bar; any other value draws it at most twice a second.
    """

    def __init__(self, refresh_rate: int = 1) -> None:
        super().__init__(refresh_rate)
        self.train_progress_bar = Tqdm(disable=True)  # until training starts

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self.train_progress_bar = Tqdm(disable=True)  # a copy in another process has none
        notebook = in_notebook()
        # An interactive console (ps1) can overwrite lines even if it is no terminal.
        self._live = notebook or (sys.stdout is not None and sys.stdout.isatty()) or hasattr(sys, "ps1")
        self._file: Any = sys.stdout if self._live and not notebook else LineStream(notebook)

    def init_train_tqdm(self) -> Tqdm:
        total = planned_env_steps(self.trainer)
        seconds = DRAW_SECONDS if self._live else LINE_SECONDS_ENDLESS if total is None else LINE_SECONDS
        return Tqdm(
            desc="Training",
            total=total,
            initial=min(env_steps_of(self.trainer.lightning_module), total or math.inf),
            unit=" env steps",
            unit_scale=True,
            file=self._file,
            disable=self.is_disabled,
            leave=self._live,
            smoothing=0,  # the speed is the mean of this process
            mininterval=seconds,
            miniters=0 if self._live else LINE_FRACTION * (total or 0),
            maxinterval=math.inf,  # or a thread of tqdm would set `miniters` to 1 after 10 s without a line
            delay=0 if self._live else sys.float_info.min,  # a file needs no line for the beginning
            # In a file there is no bar. tqdm shows nothing in a terminal that reports no size.
            ncols=shutil.get_terminal_size().columns - 1 if self._live else 0,
            nrows=20,
        )

    def print(self, *args: Any, **kwargs: Any) -> None:  # as in Lightning
        if self.train_progress_bar.disable:  # Lightning would drop the text
            print(*args, **kwargs)
        else:
            super().print(*args, **kwargs)

    def _announce(self) -> Tqdm:
        """Return an invisible bar: all episodes are one batch. An evaluation prints one line instead."""
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        if self.is_enabled and self.trainer.state.fn != "fit" and isinstance(data, RolloutDataModule):
            print_line(f"Playing {data.evaluation.episodes} episodes")
        return Tqdm(disable=True)

    init_sanity_tqdm = init_validation_tqdm = init_test_tqdm = init_predict_tqdm = _announce

    def on_train_start(self, *args: Any) -> None:
        super().on_train_start(*args)
        if not self.train_progress_bar.disable:
            for handler in _log_handlers():
                handler.addFilter(self._clear_line)

    def _clear_line(self, record: logging.LogRecord) -> bool:
        # Or the line of the log would begin at the end of the bar.
        self.train_progress_bar.clear()
        self.train_progress_bar.fp.flush()
        return True

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int
    ) -> None:
        bar = self.train_progress_bar
        # Lightning drops metrics at the end of an epoch, so read them when they are logged.
        if not bar.disable and log_is_due(trainer):
            bar.set_postfix(self.get_metrics(trainer, pl_module), refresh=False)
        bar.update(min(env_steps_of(trainer.lightning_module), bar.total or math.inf) - bar.n)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_validation_start(trainer, pl_module)
        self.train_progress_bar.set_description_str("Validating", refresh=self._live)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.train_progress_bar.set_description_str("Training", refresh=False)
        self.train_progress_bar.set_postfix(self.get_metrics(trainer, pl_module), refresh=self._live)

    def on_train_end(self, *args: object, **kwargs: object) -> None:
        for handler in _log_handlers():
            handler.removeFilter(self._clear_line)
        self.train_progress_bar.set_description_str("Training")
        self.train_progress_bar.close()

    on_exception = on_train_end  # shows the progress of an interrupted run

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Do not end a bar with each epoch."""


def _log_handlers() -> list[logging.Handler]:
    return [*logging.getLogger().handlers, *logging.getLogger("lightning.pytorch").handlers]


class EnvStepRichProgressBar(_EnvStepBar, RichProgressBar):
    """Lightning's Rich bar with environment steps: one bar for the whole training run.

    Without a terminal, it shows the end of the run only.

    Args:
        refresh_rate: Updates per second; 0 disables the bar.
        **kwargs: `theme` and `console_kwargs` of `lightning.pytorch.callbacks.RichProgressBar`.
    """

    def __init__(self, refresh_rate: int = 2, **kwargs: Any) -> None:  # as in Lightning
        super().__init__(refresh_rate, **kwargs)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if self.progress is not None:
            total, done = planned_env_steps(trainer) or math.inf, env_steps_of(pl_module)
            self.train_progress_bar_id = self.progress.add_task("Env steps", total=total, completed=done)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int
    ) -> None:
        """Draw environment steps in place of the batches of the epoch."""
        env_steps = env_steps_of(pl_module)
        super().on_train_batch_end(trainer, pl_module, outputs, batch, env_steps - 1)
        if self.progress is not None and self.train_progress_bar_id is not None:  # Lightning 2.5 counts the calls
            self.progress.update(self.train_progress_bar_id, completed=env_steps)


class PolicySummary(ModelSummary):
    """Log the parts of the policy and their numbers of parameters, instead of Lightning's model summary.

    Lightning's summary lists modules without parameters, and FLOPs of a forward pass that it does not run.
    """

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        named = [(f"{outer}.{name}", x) for outer, y in pl_module.named_children() for name, x in y.named_children()]
        parts = [(name, part, _num_parameters(part)) for name, part in named if _num_parameters(part)]
        width = max((len(name) for name, _, _ in parts), default=0)
        lines = [f"  {name:<{width}}  {type(part).__name__:<24}  {count:>11,}" for name, part, count in parts]
        title = f"{type(pl_module).__name__} has {_num_parameters(pl_module):,} parameters:"
        rank_zero_info("\n".join([title, *lines]))


def _num_parameters(module: nn.Module) -> int:
    return sum(x.numel() for x in module.parameters())

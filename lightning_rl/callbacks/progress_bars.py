"""Progress bars that count environment steps."""

from __future__ import annotations

import math
import shutil
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning.pytorch.callbacks.progress.progress_bar import ProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm

from lightning_rl.data.datamodule import RolloutDataModule
from lightning_rl.training.clock import planned_env_steps

DRAW_SECONDS = 0.5  # between updates in a terminal, each of which takes Rich milliseconds
LINE_SECONDS = 10.0  # minimum between lines in a file
LINE_FRACTION = 0.01  # minimum share of the run between lines, so at most 100 lines
LINE_SECONDS_ENDLESS = 60.0  # between lines of a run without an end
RETURNS = {"rollout/episode_return": "return", "val/episode_return": "val"}
PARTS = ("doing", "bar", "steps", "speed", "return", "val", "more", "time")
_LEFT_OUT_FIRST = ("more", "speed", "val", "return")  # in a narrow terminal


@dataclass
class RunStatus:
    """Progress of a run, and when it was last shown."""

    total: int | None
    first: int
    done: int
    shown_done: int
    doing: str = "Training"
    metrics: dict[str, str] = field(default_factory=dict)
    finished: bool = False
    started: float = field(default_factory=time.monotonic)
    shown: float = field(default_factory=time.monotonic)

    def due(self, live: bool) -> bool:
        """Return whether to draw the bar (`live`) or to write a line (not `live`) again."""
        seconds = time.monotonic() - self.shown
        if live or self.total is None:
            return seconds >= (DRAW_SECONDS if live else LINE_SECONDS_ENDLESS)
        return seconds >= LINE_SECONDS and self.done - self.shown_done >= LINE_FRACTION * self.total

    def parts(self, room: float = math.inf) -> dict[str, str]:
        """Return the parts to show, without the ones that exceed a line of `room` characters."""
        seconds = time.monotonic() - self.started
        speed = (self.done - self.first) / seconds if seconds > 0 else 0.0
        parts = {"doing": self.doing, "steps": f"{self.done:,} env steps", **self.metrics}
        if speed:
            parts["speed"] = f"{Tqdm.format_sizeof(speed)} steps/s"
        if self.total is not None:
            percent = min(100, 100 * self.done // self.total)  # the last rollout may go beyond the limit
            parts["doing"] = f"{self.doing} {percent:3d}%"
            parts["steps"] = f"{self.done:,}/{self.total:,} env steps"
            if speed:
                parts["time"] = f"{_duration(max(0, self.total - self.done) / speed)} left"
        if self.finished:
            parts["time"] = f"in {_duration(seconds)}"
        for name in _LEFT_OUT_FIRST:
            if len(line(parts)) > room:
                parts.pop(name, None)
        return parts


def line(parts: dict[str, str]) -> str:
    """Return the parts in one line."""
    return " | ".join(parts[name] for name in PARTS if parts.get(name))


def number(value: object) -> str:
    """Return a metric as text: 1,234.5 or 0.123."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.1f}" if abs(value) >= 10 else f"{value:.3f}"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    if "IPython" not in sys.modules:
        return False
    from IPython import get_ipython

    return getattr(get_ipython(), "kernel", None) is not None


class NotebookLine:
    """A text stream for tqdm in a notebook: the notebook would save each refresh of a progress bar as an output."""

    encoding = "utf-8"  # tqdm draws bars in ASCII without it
    _handle: Any = None

    def write(self, text: str) -> None:
        from IPython.display import display

        shown = {"text/plain": text.strip()}
        if not shown["text/plain"]:
            return
        if self._handle is None:
            self._handle = display(shown, raw=True, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._handle.update(shown, raw=True)

    def flush(self) -> None:
        """Do nothing, since `write` shows the line."""


class _EnvStepBar(ProgressBar):
    """Decides when to show what; subclasses draw. Without a terminal, lines replace the bar."""

    _enabled: bool  # only on the first rank
    _refresh_rate: int
    _status: RunStatus | None = None  # while training
    _live = False  # has a bar

    def _open(self, status: RunStatus) -> bool:
        raise NotImplementedError

    def _draw(self, status: RunStatus) -> None:
        raise NotImplementedError

    def _write(self, text: str) -> None:
        print(text, flush=True)

    def _show(self, status: RunStatus) -> None:
        status.shown, status.shown_done = time.monotonic(), status.done
        if self._live:
            self._draw(status)
        else:
            self._write(line(status.parts()))

    def _read(self, status: RunStatus, trainer: Trainer, module: LightningModule) -> None:
        metrics = trainer.callback_metrics
        shown = {name: f"{name} {number(float(metrics[key]))}" for key, name in RETURNS.items() if key in metrics}
        known = (*RETURNS, "time/steps_per_second", "v_num")
        more = {key: value for key, value in self.get_metrics(trainer, module).items() if key not in known}
        status.metrics = shown | {"more": " | ".join(f"{key} {number(value)}" for key, value in more.items())}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._enabled and self._refresh_rate > 0:
            done = int(pl_module.env_steps)  # type: ignore[arg-type]
            self._status = RunStatus(planned_env_steps(trainer), first=done, done=done, shown_done=done)
            self._live = self._open(self._status)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: object, **kwargs: object) -> None:
        if (status := self._status) is None:
            return
        status.done = int(pl_module.env_steps)  # type: ignore[arg-type]
        due, interval = status.due(self._live), trainer.log_every_n_steps  # type: ignore[attr-defined]
        # Lightning drops metrics at the end of an epoch, so read them when they are logged.
        if due or (interval and (trainer.fit_loop.total_batch_idx + 1) % interval == 0):
            self._read(status, trainer, pl_module)
        if due:
            self._show(status)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._status is None:
            self._announce(trainer)
        elif self._live:
            self._status.doing = "Validating"
            self._draw(self._status)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._status is not None:
            self._status.doing = "Training"
            self._read(self._status, trainer, pl_module)
            if self._live:
                self._draw(self._status)

    def on_train_end(self, *args: object, **kwargs: object) -> None:
        if (status := self._status) is not None:
            status.doing, status.finished = "Training", True
            self._show(status)
            self._status = None

    on_exception = on_train_end  # shows the progress of an interrupted run

    def _announce(self, trainer: Trainer, *args: object, **kwargs: object) -> None:
        # All episodes are one batch, so a bar would show no progress.
        data = trainer.datamodule  # type: ignore[attr-defined]
        shown = self._enabled and self._refresh_rate > 0 and not trainer.sanity_checking
        if shown and isinstance(data, RolloutDataModule):
            self._write(f"Playing {data.evaluation.episodes} episodes")

    def _nothing(self, *args: object, **kwargs: object) -> None:
        """Replace the hooks that draw bars of batches."""

    on_test_start = on_predict_start = _announce
    on_sanity_check_start = on_sanity_check_end = on_train_epoch_start = on_train_epoch_end = _nothing
    on_validation_batch_start = on_validation_batch_end = on_validation_epoch_end = _nothing
    on_test_batch_start = on_test_batch_end = on_test_end = _nothing
    on_predict_batch_start = on_predict_batch_end = on_predict_end = _nothing


class EnvStepProgressBar(_EnvStepBar, TQDMProgressBar):
    """One bar for the whole training run: environment steps done of those planned, speed, returns, time left.

    The bar of a resumed run starts at the restored step. Without a terminal, lines replace the bar.

    Args:
        refresh_rate: 0 disables the bar; any other value draws it at most twice a second.
    """

    def __init__(self, refresh_rate: int = 1) -> None:
        super().__init__(refresh_rate)

    def print(self, *args: Any, sep: str = " ", **kwargs: Any) -> None:  # noqa: ANN401 - as in Lightning
        if self._status is not None and self._live:
            super().print(*args, sep=sep, **kwargs)
        else:
            print(*args, sep=sep, **kwargs)

    def _open(self, status: RunStatus) -> bool:
        # An interactive console (ps1) can overwrite lines even if it is no terminal.
        if live := sys.stdout.isatty() or hasattr(sys, "ps1"):
            out = NotebookLine() if in_notebook() else sys.stdout
            # tqdm draws at once, and shows nothing if it must read the size of a terminal that reports none.
            text, room = line(status.parts()), shutil.get_terminal_size().columns - 1
            self.train_progress_bar = Tqdm(total=status.total, bar_format=text, file=out, ncols=room, nrows=20)
        return live

    def _draw(self, status: RunStatus) -> None:
        bar, room = self.train_progress_bar, shutil.get_terminal_size().columns - 1
        text = status.parts(room)
        parts = {name: said.replace("{", "{{").replace("}", "}}") for name, said in text.items()}
        if status.total is not None and room - len(line(text)) >= 12:
            parts["bar"] = "{bar}"
        bar.bar_format, bar.ncols = line(parts), room
        bar.n = min(status.done, status.total or status.done)  # tqdm draws no bar beyond its total
        bar.refresh()
        if status.finished:
            bar.close()


class EnvStepRichProgressBar(_EnvStepBar, RichProgressBar):
    """`EnvStepProgressBar` drawn by Rich.

    Args:
        refresh_rate: As in `EnvStepProgressBar`.
        **kwargs: `theme` and `console_kwargs` of `lightning.pytorch.callbacks.RichProgressBar`.
    """

    def __init__(self, refresh_rate: int = 1, **kwargs: Any) -> None:  # noqa: ANN401 - as in Lightning
        super().__init__(refresh_rate, **kwargs)
        self.console_options: dict[str, Any] = kwargs.get("console_kwargs") or {}

    def _write(self, text: str) -> None:
        import rich  # optional

        rich.reconfigure(**self.console_options)
        rich.get_console().out(text, highlight=False)

    def _open(self, status: RunStatus) -> bool:
        import rich
        from lightning.pytorch.callbacks.progress.rich_progress import CustomBarColumn, CustomProgress
        from rich.progress import ProgressColumn, TextColumn

        rich.reconfigure(**self.console_options)
        self._console = rich.get_console()
        if not (self._console.is_interactive or self._console.is_jupyter):
            return False
        theme = self.theme
        styles = dict.fromkeys(PARTS, theme.metrics) | {"doing": theme.description, "steps": theme.batch_progress}
        styles |= {"speed": theme.processing_speed, "time": theme.time}
        columns: dict[str, ProgressColumn] = {
            name: TextColumn(f"{{task.fields[parts][{name}]}}", style, markup=False) for name, style in styles.items()
        }
        columns["bar"] = CustomBarColumn(
            complete_style=theme.progress_bar,
            finished_style=theme.progress_bar_finished,
            pulse_style=theme.progress_bar_pulse,
        )
        self.progress = CustomProgress(*columns.values(), auto_refresh=False, console=self._console)
        total, parts = status.total or math.inf, self._parts(status)
        self.train_progress_bar_id = self.progress.add_task("", total=total, completed=status.first, parts=parts)
        self.progress.start()
        return True

    def _parts(self, status: RunStatus) -> dict[str, str]:
        assert self._console is not None
        return dict.fromkeys(PARTS, "") | status.parts(self._console.width - 12)  # leaves room for a bar

    def _draw(self, status: RunStatus) -> None:
        assert self.progress is not None and self.train_progress_bar_id is not None
        self.progress.update(self.train_progress_bar_id, completed=status.done, parts=self._parts(status))
        self.progress.refresh()
        if status.finished:
            self.progress.stop()

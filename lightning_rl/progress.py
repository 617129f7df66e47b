"""Progress bars of a whole training run, in environment steps."""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning.pytorch.callbacks.progress.progress_bar import ProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm

from lightning_rl.clock import planned_env_steps

DRAW_SECONDS = 0.25  # in a terminal, since a drawing costs up to milliseconds
LINE_SECONDS = 10.0  # in a file every drawing is one more line: none before 10 seconds,
LINE_FRACTION = 0.01  # and none before another 1 % is done: about 100 lines at the most,
LINE_SECONDS_ENDLESS = 60.0  # or one a minute where nothing says when the run ends
_RETURNS = {"rollout/episode_return": "return", "val/episode_return": "val"}
_PARTS = ("label", "percent", "bar", "steps", "speed", "return", "val", "more", "time")
_DROPPED_FIRST = ("more", "label", "speed", "val", "return")


@dataclass
class _Status:
    """Where a run stands, and when that was last shown."""

    total: int | None
    first: int
    done: int
    label: str = "Training"
    metrics: dict[str, float] = field(default_factory=dict)
    more: str = ""
    finished: bool = False
    started: float = field(default_factory=time.monotonic)
    shown: float = field(default_factory=time.monotonic)
    shown_done: int = 0

    def due(self, live: bool) -> bool:
        """Tell whether to draw again, or to write another line."""
        seconds = time.monotonic() - self.shown
        if live or self.total is None:
            return seconds >= (DRAW_SECONDS if live else LINE_SECONDS_ENDLESS)
        return seconds >= LINE_SECONDS and self.done - self.shown_done >= LINE_FRACTION * self.total

    def parts(self, room: float = math.inf) -> dict[str, str]:
        """Return what there is to say, less what does not fit into a line of `room` characters."""
        seconds = time.monotonic() - self.started
        speed = (self.done - self.first) / seconds if seconds > 0 else 0.0
        parts = {"label": f"{self.label:10}", "steps": f"{self.done:,} env steps", "more": self.more}
        if self.total is not None:
            parts["percent"] = f"{min(100, 100 * self.done // max(1, self.total)):3d}%"
            parts["steps"] = f"{self.done:,}/{self.total:,} env steps"
        if speed:
            parts["speed"] = f"{Tqdm.format_sizeof(speed)} steps/s"
        parts |= {name: f"{name} {_number(self.metrics[key])}" for key, name in _RETURNS.items() if key in self.metrics}
        if self.finished:
            parts["time"] = f"in {_duration(seconds)}"
        elif speed and self.total is not None:
            parts["time"] = f"{_duration(max(0, self.total - self.done) / speed)} left"
        for name in _DROPPED_FIRST:
            if len(_line(parts)) > room:
                parts.pop(name, None)
        return parts


def _line(parts: dict[str, str]) -> str:
    said = [parts[name] for name in _PARTS if parts.get(name)]
    if "label" in parts and "percent" in parts:
        said[:2] = [" ".join(said[:2])]
    return " | ".join(said)


def _number(value: float) -> str:
    return f"{value:,.1f}" if abs(value) >= 10 else f"{value:.3f}"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


class _EnvStepBar(ProgressBar):
    """When to show what, and the lines in place of a bar where the output is no terminal."""

    _enabled: bool
    _refresh_rate: int
    _status: _Status | None = None
    _live = False
    _remove_note: Callable[[], object] | None = None

    def _open(self, status: _Status) -> bool:
        """Open a bar and return True, or return False where the output is no terminal."""
        raise NotImplementedError

    def _draw(self, status: _Status) -> None:
        raise NotImplementedError

    def _close(self) -> None:
        raise NotImplementedError

    def _write(self, line: str) -> None:
        print(line, flush=True)

    def _add_note(self, text: str) -> Callable[[], object] | None:
        """Show a text if the output is a terminal, and return what takes it away."""
        raise NotImplementedError

    def _show(self, status: _Status) -> None:
        status.shown, status.shown_done = time.monotonic(), status.done
        if self._live:
            self._draw(status)
        else:
            self._write(_line(status.parts()))

    def _read(self, status: _Status, trainer: Trainer, module: LightningModule) -> None:
        metrics = trainer.callback_metrics
        status.metrics = {key: float(metrics[key]) for key in _RETURNS if key in metrics}
        known = (*_RETURNS, "time/steps_per_second", "v_num")
        more = {name: value for name, value in self.get_metrics(trainer, module).items() if name not in known}
        status.more = " | ".join(f"{k} {_number(v) if isinstance(v, float) else v}" for k, v in more.items())

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Open the one bar of the run, at the steps that a resumed run has done already."""
        if self._enabled and self._refresh_rate > 0:
            done = int(pl_module.env_steps)  # type: ignore[arg-type]
            self._status = _Status(planned_env_steps(trainer), done, done, shown_done=done)
            self._live = self._open(self._status)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        """Count the steps of a rollout."""
        if (status := self._status) is None:
            return
        status.done = int(pl_module.env_steps)  # type: ignore[arg-type]
        interval: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        due = status.due(self._live)
        # Lightning forgets some values at the end of an epoch: read them when they are new, not only when shown.
        if due or (interval and (trainer.fit_loop.total_batch_idx + 1) % interval == 0):
            self._read(status, trainer, pl_module)
        if due:
            self._show(status)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show the end of the run and leave it there."""
        if (status := self._status) is not None:
            self._status, status.finished, status.label = None, True, "Training"
            self._show(status)
            if self._live:
                self._close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Show how far an interrupted run came."""
        self._end_evaluation()
        self.on_train_end(trainer, pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say it in the bar of the run, or where there is none for as long as it takes."""
        if (status := self._status) is None:
            self._start_evaluation(trainer, "Validating")
        elif self._live:
            status.label = "Validating"
            self._show(status)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the new return into the bar of the run."""
        self._end_evaluation()
        if (status := self._status) is not None:
            status.label = "Training"
            self._read(status, trainer, pl_module)
            if self._live:
                self._show(status)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say it for as long as it takes: with all episodes in one batch, a bar would say no more."""
        self._start_evaluation(trainer, "Testing")

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say it for as long as it takes."""
        self._start_evaluation(trainer, "Predicting")

    def _start_evaluation(self, trainer: Trainer, doing: str) -> None:
        if self._enabled and self._refresh_rate > 0 and not trainer.sanity_checking:
            episodes = getattr(trainer.datamodule, "eval_episodes", None)  # type: ignore[attr-defined]
            self._remove_note = self._add_note(f"{doing}: {episodes} episodes ..." if episodes else f"{doing} ...")

    def _end_evaluation(self, *args: Any, **kwargs: Any) -> None:
        if self._remove_note is not None:
            self._remove_note()
            self._remove_note = None

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        """Have no bar of epochs or batches."""

    on_test_end = on_predict_end = _end_evaluation
    on_sanity_check_start = on_sanity_check_end = on_train_epoch_start = on_train_epoch_end = _nothing
    on_validation_batch_start = on_validation_batch_end = on_validation_epoch_end = _nothing
    on_test_batch_start = on_test_batch_end = on_predict_batch_start = on_predict_batch_end = _nothing


class EnvStepProgressBar(_EnvStepBar, TQDMProgressBar):
    """One bar for the whole training run: environment steps done of those planned, speed, returns, time left.

    It starts where a resumed run left off. Where the output is no terminal, a line now and then takes its place.

    Args:
        refresh_rate: 0 shows nothing.
        process_position: Lines left free above, for the bars of others.
    """

    def __init__(self, refresh_rate: int = 1, process_position: int = 0) -> None:
        super().__init__(refresh_rate, process_position)

    def print(self, *args: Any, sep: str = " ", **kwargs: Any) -> None:
        """Print above the bar, or as usual where there is none."""
        if self._status is not None and self._live:
            super().print(*args, sep=sep, **kwargs)
        elif self._enabled:
            print(*args, sep=sep, **kwargs)

    def _open(self, status: _Status) -> bool:
        if _live_stdout():
            self.train_progress_bar = self._tqdm(bar_format=_line(status.parts()), total=status.total, leave=True)
            self._draw(status)
        return _live_stdout()

    def _draw(self, status: _Status) -> None:
        columns = shutil.get_terminal_size().columns - 1
        parts, bar = status.parts(columns), self.train_progress_bar
        if status.total is not None and columns - len(_line(parts)) >= 12:
            parts["bar"] = "{bar}"
        # tqdm draws no bar at all beyond its total, which the last rollout may exceed.
        bar.bar_format, bar.ncols, bar.n = _line(parts), columns, min(status.done, status.total or status.done)
        bar.refresh()

    def _close(self) -> None:
        self.train_progress_bar.close()

    def _add_note(self, text: str) -> Callable[[], object] | None:
        return self._tqdm(bar_format=text, leave=False).close if _live_stdout() else None

    def _tqdm(self, **kwargs: Any) -> Tqdm:
        return Tqdm(position=2 * self.process_position, file=sys.stdout, **kwargs)


def _live_stdout() -> bool:
    return sys.stdout.isatty() or hasattr(sys, "ps1")  # ps1: a notebook, which can overwrite a line too


class EnvStepRichProgressBar(_EnvStepBar, RichProgressBar):
    """`EnvStepProgressBar` drawn by Rich.

    Args:
        refresh_rate: Drawings a second at the most; 0 shows nothing.
        theme: Styles; see `lightning.pytorch.callbacks.RichProgressBar`.
        console_kwargs: Arguments of `rich.console.Console`.
    """

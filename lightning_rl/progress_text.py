"""What a progress bar says about a training run, and how often."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm

DRAW_SECONDS = 0.5  # between drawings in a terminal: Rich takes milliseconds for one
LINE_SECONDS = 10.0  # between lines in a file,
LINE_FRACTION = 0.01  # and what must be done in between: 100 lines at the most,
LINE_SECONDS_ENDLESS = 60.0  # or one a minute where nothing says when the run ends
RETURNS = {"rollout/episode_return": "return", "val/episode_return": "val"}
PARTS = ("doing", "bar", "steps", "speed", "return", "val", "more", "time")
_LEFT_OUT_FIRST = ("more", "speed", "val", "return")  # where the terminal is narrow


@dataclass
class RunStatus:
    """Where a run stands, and when that was last shown."""

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
        """Tell whether to draw the bar again (`live`), or to write another line (not `live`)."""
        seconds = time.monotonic() - self.shown
        if live or self.total is None:
            return seconds >= (DRAW_SECONDS if live else LINE_SECONDS_ENDLESS)
        return seconds >= LINE_SECONDS and self.done - self.shown_done >= LINE_FRACTION * self.total

    def parts(self, room: float = math.inf) -> dict[str, str]:
        """Return what there is to say, less what does not fit into a line of `room` characters."""
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
    """Return a metric for people: 1,234.5 or 0.123."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.1f}" if abs(value) >= 10 else f"{value:.3f}"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"

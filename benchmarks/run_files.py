"""The plain files of a training run that several processes continue in turn; the queue reads them without PyTorch."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


def read_json(path: Path) -> Any:  # JSON
    """Return the content of a file; None if there is no such file."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None


def replace_json(path: Path, content: Any) -> None:  # JSON
    """Write a file atomically: readers find the old or the new content, also after a kill."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(json.dumps(content))
    unfinished.replace(path)


def append_event(folder: Path, event: str, **more: Any) -> None:  # JSON
    """Add a line to the history of a run."""
    line = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": event, **more}
    with (folder / "history.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def history(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of the history of a run, oldest first, without a line that a power failure cut off."""
    path, events = folder / "history.jsonl", []
    for line in path.read_text().splitlines() if path.is_file() else ():
        try:
            events.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return events


def interruptions(events: list[dict[str, Any]]) -> int:
    """Return how often a run was paused or restarted."""
    kinds = [event["event"] for event in events]
    return max(0, kinds.count("start") - 1) + kinds.count("pause")

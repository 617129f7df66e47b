"""What this package adds to a Lightning checkpoint: the format, and how older ones are brought up to date."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from lightning_rl.checksums import check_intact
from lightning_rl.validation import ConfigurationError

CHECKPOINT_KEY = "lightning_rl"
"""Key of what this package adds."""

FORMAT = 2
"""Number of the format that is written. Any change to what is stored takes the next one, and a migration."""


def read_checkpoint(path: str | Path, field: str | None = None, mapped: bool = False) -> dict[str, Any]:
    """Read a checkpoint of this package, and bring it to the present format.

    Args:
        path: The file.
        field: The option that named it, for errors; None: the `ckpt_path` of a Trainer's command, which takes names.
        mapped: Leave what tensors hold on the disk until it is used, and checksums unchecked, for a look that does not
            need it.

    Raises:
        ConfigurationError: There is no such file, it is damaged or something else, or a newer version of this package
            wrote it.
    """
    names = ", 'last' or 'best'" if field is None else ""
    field = field or "ckpt_path"
    checkpoint = load_plain(path, field, f"a checkpoint of lightning_rl{names}", mapped)
    upgrade(checkpoint, f"{field}={str(path)!r}")
    return checkpoint


def load_plain(path: str | Path, field: str, expected: str, mapped: bool = False) -> dict[str, Any]:
    """Read a file of tensors and plain values; nothing in it is executed.

    Raises:
        ConfigurationError: There is no such file, or it is damaged or holds something else.
    """
    named = f"{field}={str(path)!r}"
    if not Path(path).is_file():
        raise ConfigurationError(f"{named} does not exist: expected {expected}")
    if not mapped:
        check_intact(path, field, expected)
    try:
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:
        raise ConfigurationError(f"{named} cannot be read ({type(error).__name__}): expected {expected}") from error
    return content


def upgrade(checkpoint: dict[str, Any], named: str = "the checkpoint") -> None:
    """Bring a checkpoint to the present format, in place.

    Args:
        checkpoint: As it was read.
        named: What to call it in errors.

    Raises:
        ConfigurationError: It was written by something else, or by a newer version of this package.
    """
    if not isinstance(checkpoint, dict) or CHECKPOINT_KEY not in checkpoint:
        raise ConfigurationError(f"{named} was not written by lightning_rl: expected a checkpoint that was")
    state = checkpoint[CHECKPOINT_KEY]
    if state["format"] > FORMAT:
        raise ConfigurationError(
            f"{named} has format {state['format']}, written by lightning_rl {state['version']}: expected format "
            f"{FORMAT} or older; install that version of lightning_rl or a newer one"
        )
    while state["format"] < FORMAT:
        _MIGRATIONS[state["format"]](checkpoint)
        state["format"] += 1


def is_weights_only(checkpoint: Mapping[str, Any]) -> bool:
    """Whether nothing can be resumed from a checkpoint: `ModelCheckpoint(save_weights_only=True)` wrote it."""
    return "optimizer_states" not in checkpoint


def _from_1(checkpoint: dict[str, Any]) -> None:
    """Format 2 says what the run was like, and records rewards: episodes without them cannot be verified, so end."""
    state = checkpoint[CHECKPOINT_KEY]
    unknown = ("version", "algorithm", "precision", "planned_env_steps")
    state |= {**dict.fromkeys(unknown), "skipped_updates": 0}
    for rank in state["ranks"]:
        rank["window"]["restarts"] = None
    datamodules = [x for x in checkpoint.values() if isinstance(x, dict) and {"starts", "ranks"} <= x.keys()]
    for environments in (rank["environments"] for data in datamodules for rank in data["ranks"] if rank is not None):
        if environments is not None and environments["kind"] == "episodes":
            records = environments["environments"]
            environments["environments"] = [{n: record[n] for n in ("stream_seed", "episode")} for record in records]


_MIGRATIONS: dict[int, Callable[[dict[str, Any]], None]] = {1: _from_1}

"""The format of the entry that this package adds to Lightning checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_rl.files import load_plain
from lightning_rl.validation import ConfigurationError

CHECKPOINT_KEY = "lightning_rl"
FORMAT = 1
"""Changes when older code can no longer read the entry."""


def read_checkpoint(path: str | Path, field: str | None = None, mapped: bool = False) -> dict[str, Any]:
    """Read a checkpoint of this package.

    Args:
        path: The file.
        field: Option for error messages; None is the `ckpt_path` of a Trainer command, which also accepts names.
        mapped: Map tensors from disk and skip checksums: faster if only a few values are needed.

    Raises:
        ConfigurationError: The file is missing, damaged, from another program, or has another format.
    """
    names = ", 'last' or 'best'" if field is None else ""
    field = field or "ckpt_path"
    checkpoint = load_plain(path, field, f"a checkpoint of lightning_rl{names}", mapped)
    check_format(checkpoint, f"{field}={str(path)!r}")
    return checkpoint


def check_format(checkpoint: dict[str, Any], named: str = "the checkpoint") -> None:
    """Raise a `ConfigurationError` unless this package wrote a checkpoint, in the format that it reads.

    Args:
        checkpoint: Content of the file.
        named: Name of the checkpoint in error messages.
    """
    if not isinstance(checkpoint, dict) or CHECKPOINT_KEY not in checkpoint:
        raise ConfigurationError(f"{named} was not written by lightning_rl: expected a checkpoint that was")
    state = checkpoint[CHECKPOINT_KEY]
    if state["format"] != FORMAT:
        raise ConfigurationError(
            f"{named} has format {state['format']}, written by lightning_rl {state['version']}: expected format "
            f"{FORMAT}; install that version of lightning_rl"
        )


def is_weights_only(checkpoint: Mapping[str, Any]) -> bool:
    """Whether a checkpoint cannot be resumed because `ModelCheckpoint(save_weights_only=True)` wrote it."""
    return "optimizer_states" not in checkpoint

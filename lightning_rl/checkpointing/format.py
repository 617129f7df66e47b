"""The format of what this package adds to a Lightning checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_rl.files import load_plain
from lightning_rl.validation import ConfigurationError

CHECKPOINT_KEY = "lightning_rl"
"""Key of what this package adds."""
FORMAT = 1
"""Number of the checkpoint format."""


def read_checkpoint(path: str | Path, field: str | None = None, mapped: bool = False) -> dict[str, Any]:
    """Read a checkpoint of this package.

    Args:
        path: The file.
        field: The option that named it, for errors; None: the `ckpt_path` of a Trainer's command, which takes names.
        mapped: Leave what tensors hold on the disk until it is used, and checksums unchecked, for a look that does not
            need it.

    Raises:
        ConfigurationError: The file is missing or damaged, is not a checkpoint of this package, or has another format.
    """
    names = ", 'last' or 'best'" if field is None else ""
    field = field or "ckpt_path"
    checkpoint = load_plain(path, field, f"a checkpoint of lightning_rl{names}", mapped)
    check_format(checkpoint, f"{field}={str(path)!r}")
    return checkpoint


def check_format(checkpoint: dict[str, Any], named: str = "the checkpoint") -> None:
    """Raise unless a checkpoint was written by this package in the format that it reads.

    Args:
        checkpoint: Content of the file.
        named: Name of the checkpoint in error messages.

    Raises:
        ConfigurationError: Another program wrote it, or another version of this package with another format.
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
    """Whether nothing can be resumed from a checkpoint: `ModelCheckpoint(save_weights_only=True)` wrote it."""
    return "optimizer_states" not in checkpoint

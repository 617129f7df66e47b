"""What this package adds to a Lightning checkpoint: the format, and how older ones are brought up to date."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_rl.validation import ConfigurationError

CHECKPOINT_KEY = "lightning_rl"
"""Key of what this package adds."""

FORMAT = 2
"""Number of the format that is written. Any change to what is stored takes the next one, and a migration."""


def upgrade(checkpoint: dict[str, Any]) -> None:
    """Bring a checkpoint to the present format, in place.

    Raises:
        ConfigurationError: It was written by something else, or by a newer version of this package.
    """
    if CHECKPOINT_KEY not in checkpoint:
        raise ConfigurationError("the checkpoint was not written by lightning_rl: expected one that was")
    state = checkpoint[CHECKPOINT_KEY]
    if state["format"] > FORMAT:
        raise ConfigurationError(
            f"the checkpoint has format {state['format']}, written by lightning_rl {state['version']}: expected format "
            f"{FORMAT} or older; install that version of lightning_rl or a newer one"
        )
    while state["format"] < FORMAT:
        _MIGRATIONS[state["format"]](checkpoint)
        state["format"] += 1


def _from_1(checkpoint: dict[str, Any]) -> None:
    """Format 2 says what the run was like, so that a resumed one can say what has changed."""
    checkpoint[CHECKPOINT_KEY] |= {
        "version": None,
        "algorithm": None,
        "precision": None,
        "planned_env_steps": None,
        "skipped_updates": 0,
    }


_MIGRATIONS: dict[int, Callable[[dict[str, Any]], None]] = {1: _from_1}

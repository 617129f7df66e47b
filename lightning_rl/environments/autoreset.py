"""How a vector environment resets."""

from __future__ import annotations

from typing import Any

from gymnasium.vector import AutoresetMode, VectorEnv

from lightning_rl.validation import ConfigurationError


def autoreset_mode(env: VectorEnv[Any, Any, Any]) -> AutoresetMode:
    """Return what an environment says in `metadata["autoreset_mode"]`.

    Raises:
        ConfigurationError: It says nothing, or something else.
    """
    mode = (env.metadata or {}).get("autoreset_mode")
    try:
        return mode if isinstance(mode, AutoresetMode) else AutoresetMode(mode)
    except ValueError:
        raise ConfigurationError(
            f"env_id: {env} has metadata['autoreset_mode']={mode!r}: expected one of "
            f"{[mode.value for mode in AutoresetMode]}, so that episode ends can be told apart from resets"
        ) from None

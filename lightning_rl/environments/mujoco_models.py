"""Loading Gymnasium's own MuJoCo models without a warning that only their authors can act on."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from typing import Any

from gymnasium.envs.registration import EnvSpec

_FOR_THE_AUTHORS = "compiler attribute 'settotalmass' is deprecated"
"""Of MuJoCo 4.0 about half_cheetah.xml, once for each environment."""


@contextlib.contextmanager
def quiet_loading(spec: EnvSpec, env_kwargs: dict[str, Any]) -> Iterator[None]:
    """Drop that one warning while an environment is made; others, and those of the simulation later, are shown.

    Args:
        spec: Of the environment; nothing is done unless it is one of Gymnasium's own with MuJoCo.
        env_kwargs: Arguments of its constructor; a model of the user's own is the user's to mend.
    """
    own = str(spec.entry_point).startswith("gymnasium.envs.mujoco") and "xml_file" not in env_kwargs
    if not own or importlib.util.find_spec("mujoco") is None:
        yield
        return
    mujoco: Any = importlib.import_module("mujoco")
    before = mujoco.get_mju_user_warning()

    def handle(message: str) -> None:
        if message.startswith(_FOR_THE_AUTHORS):
            return
        if before is not None:
            before(message)
        else:  # what MuJoCo does by itself
            print(f"WARNING: {message}\n", file=sys.stderr)
            mujoco.mju_writeLog("WARNING", message)

    mujoco.set_mju_user_warning(handle)
    try:
        yield
    finally:
        mujoco.set_mju_user_warning(before)

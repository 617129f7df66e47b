"""What a learner has to do with a cluster of Ray before there are actors."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn  # type: ignore[attr-defined]

from lightning_rl.validation import ConfigurationError


def connect(ray: ModuleType, address: str | None) -> bool:
    """Begin a session with Ray, unless there is one, and return whether that was done.

    Args:
        ray: The package.
        address: As `ray.init` has it.

    Raises:
        ConfigurationError: There is no cluster.
    """
    if ray.is_initialized():
        return False
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigurationError(
            f"ray_address={address!r} leads to no cluster of Ray ({error}): expected its address, or None"
        ) from error
    finally:
        # Ray would have the signal end this process at once, where a run has a checkpoint to write.
        if handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)
    return True


def as_options(resources: Mapping[str, float]) -> dict[str, Any]:
    """Return resources, by their names, as the options of an actor in which Ray wants to be told of them."""
    named = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    own = {option: resources[name] for name, option in named.items() if name in resources}
    others = {name: amount for name, amount in resources.items() if name not in named}
    return {"num_cpus": 0} | own | ({"resources": others} if others else {})


def tell_of_room(ray: ModuleType, num_actors: int, resources: Mapping[str, float]) -> None:
    """Warn where not all actors find a place now.

    Args:
        ray: The package.
        num_actors: How many there shall be.
        resources: What each needs.
    """
    there = ray.cluster_resources()
    room = [there.get(name, 0) // amount for name, amount in resources.items() if amount]
    if room and min(room) < num_actors:
        rank_zero_warn(
            f"num_actors={num_actors}: the cluster of Ray has room for {math.floor(min(room))} of them, with "
            f"{dict(resources)} each; the others join when machines do"
        )

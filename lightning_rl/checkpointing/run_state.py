"""What a checkpoint holds beside the weights."""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn  # type: ignore[attr-defined]
from torch import Tensor

from lightning_rl.__about__ import __version__
from lightning_rl.checkpointing.format import FORMAT
from lightning_rl.distributed import gather_on_rank_zero
from lightning_rl.rollouts.replay import Replay


def _uses_cuda() -> bool:
    # Asking for the generators would initialise CUDA in a process that computes on the CPU.
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def random_state() -> dict[str, Any]:
    """Return the states of the generators of Python, NumPy and torch, as tensors and plain values."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, list(words), gauss],
        "numpy": [kind, [int(key) for key in keys], int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if _uses_cuda() else [],
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Take over what `random_state` returned; generators of devices that are missing here are left out."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.asarray(keys, np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([one.cpu() for one in state["cuda"]])


def run_state(module: Any) -> dict[str, Any]:  # noqa: ANN401
    """Return, as tensors and plain values, the clock, what each rank has of its own, and what the run is like.

    A collective call; what each rank has is there on rank 0 alone, which writes the checkpoint.
    """
    rewards, clock = module.reward_normalizer, module.clock
    of_this_rank = {
        "discounted_return": None if rewards is None else rewards.discounted_return.cpu(),
        "generator": module.generator.get_state(),
        "random": random_state(),
        "window": module.metrics.snapshot(),
        "replays": {n: x for n, x in replay_states(module).items() if n not in module.not_in_checkpoints},
    }
    return {
        "format": FORMAT,
        "version": __version__,
        "algorithm": type(module).__name__,
        "precision": _precision(module),
        "planned_env_steps": clock.planned_env_steps,
        "env_steps": clock.env_steps,
        "env_steps_before_epochs": clock.env_steps_before_epochs,
        "frames": clock.frames,
        "policy_version": clock.policy_version,
        "skipped_updates": module.skipped_updates,
        "ranks": gather_on_rank_zero(of_this_rank),
    }


def _precision(module: Any) -> str | None:  # noqa: ANN401
    """Return the precision of the module's Trainer; None without a Trainer."""
    try:
        return str(module.trainer.precision)
    except RuntimeError:  # raised by Lightning for a module without a Trainer
        return None


def replay_states(module: Any) -> dict[str, Any]:  # noqa: ANN401
    """Return what this rank keeps of earlier rollouts, by name."""
    return {name: replay.state_dict() for name, replay in module.replays.items()}


def restore_replays(module: Any, state: Mapping[str, Any]) -> None:  # noqa: ANN401
    """Take over what one rank kept of earlier rollouts, as far as the module has such replays."""
    for name, stored in state["replays"].items():
        if name in module.replays:
            module.replays[name].load_state_dict(stored)


def restore_own_replays(module: Any, ranks: Sequence[Mapping[str, Any]]) -> None:  # noqa: ANN401
    """Take over what this rank kept of earlier rollouts; where ranks are new, all begin without, and that is said.

    Args:
        module: Whatever it kept until now is dropped where it goes on from a checkpoint.
        ranks: What each of the ranks that there were had of its own; none where it does not.
    """
    for replay in module.replays.values() if ranks else ():
        replay.clear()
    if module.global_rank < len(ranks) >= module.trainer.world_size:
        dtype = next(module.policy.parameters()).dtype
        restore_replays(module, _in_precision_of(dtype, ranks[module.global_rank]))
        return
    # All of them, since they take each step together: from what is new alone, or from what they keep as well.
    stored: Mapping[str, Any] = ranks[0]["replays"] if ranks else {}
    if lost := [name for name, replay in module.replays.items() if name in stored and _holds(replay, stored[name])]:
        rank_zero_warn(
            f"What {type(module).__name__} has kept of earlier rollouts ({', '.join(lost)}) is dropped: there are "
            f"{module.trainer.world_size} ranks, and were {len(ranks)}; those that are new have none of it"
        )


def _in_precision_of(dtype: torch.dtype, stored: Any) -> Any:  # noqa: ANN401 - nested plain data
    """Return what is stored with float64 where parameters have it, and nowhere else: one batch has old and new rows."""
    if isinstance(stored, Tensor):
        if dtype == torch.float64:
            return stored.double() if stored.is_floating_point() else stored
        return stored.float() if stored.dtype == torch.float64 else stored
    if isinstance(stored, Mapping):
        return {name: _in_precision_of(dtype, x) for name, x in stored.items()}
    return type(stored)(_in_precision_of(dtype, x) for x in stored) if isinstance(stored, list | tuple) else stored


def _holds(replay: Replay, state: Mapping[str, Any]) -> bool:
    """Whether there is anything in the stored state of an empty replay."""
    filled = copy.deepcopy(replay)
    filled.load_state_dict({**state})
    return filled.num_bytes > 0


def restore_rank(module: Any, state: dict[str, Any]) -> None:  # noqa: ANN401
    """Take over what one rank had of its own."""
    module.generator.set_state(state["generator"].cpu())
    set_random_state(state["random"])
    if module.reward_normalizer is not None and state["discounted_return"] is not None:
        module.reward_normalizer.discounted_return = state["discounted_return"].to(module.device)

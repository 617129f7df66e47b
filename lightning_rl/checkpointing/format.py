"""The entry that this package adds to Lightning checkpoints: format, content, and how a run is restored from it."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn  # type: ignore[attr-defined]
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_rl import __version__
from lightning_rl.distributed import gather_on_rank_zero
from lightning_rl.environments.contract import MINIBATCHES, derive_seed
from lightning_rl.files import load_plain
from lightning_rl.training.normalizers import reward_normalizers
from lightning_rl.validation import ConfigurationError

CHECKPOINT_KEY = "lightning_rl"
FORMAT = 1
"""Changes when older code can no longer read the entry."""


def read_checkpoint(path: str | Path, field: str | None = None, mapped: bool = False) -> dict[str, Any]:
    """Read a checkpoint of this package, without checksums if it is `mapped` from disk.

    `field` is the option in errors, by default `ckpt_path`. A file that is missing, damaged, from another program or in
    another format raises a `ConfigurationError`.
    """
    names = ", 'last' or 'best'" if field is None else ""
    field = field or "ckpt_path"
    checkpoint = load_plain(path, field, f"a checkpoint of lightning_rl{names}", mapped)
    check_format(checkpoint, f"{field}={str(path)!r}")
    return checkpoint


def check_format(checkpoint: dict[str, Any], named: str = "the checkpoint") -> None:
    """Raise a `ConfigurationError` unless this package wrote a checkpoint, in the format that it reads."""
    if not isinstance(checkpoint, dict) or CHECKPOINT_KEY not in checkpoint:
        raise ConfigurationError(f"{named} was not written by lightning_rl: expected one of its checkpoints")
    state = checkpoint[CHECKPOINT_KEY]
    if state["format"] != FORMAT:
        raise ConfigurationError(
            f"{named} has format {state['format']}, written by lightning_rl {state['version']}: expected format "
            f"{FORMAT}; install that version of lightning_rl"
        )


def is_weights_only(checkpoint: Mapping[str, Any]) -> bool:
    """Whether a checkpoint cannot be resumed because `ModelCheckpoint(save_weights_only=True)` wrote it."""
    return "optimizer_states" not in checkpoint


def run_state(module: Any) -> dict[str, Any]:  # an algorithm
    """Return the state of a run as tensors and plain values; `ranks` is filled on rank 0 only. A collective call."""
    precision = None
    with suppress(RuntimeError):  # no Trainer
        precision = str(module.trainer.precision)
    of_this_rank = {
        "discounted_returns": {name: x.discounted_return.cpu() for name, x in reward_normalizers(module).items()},
        "generator": module.generator.get_state(),
        "random": _random_state(),
        "window": module.metrics.snapshot(),
        "replays": {n: x.state_dict() for n, x in module.replays.items() if n not in module.not_in_checkpoints},
    }
    return {
        "format": FORMAT,
        "version": __version__,
        "algorithm": type(module).__name__,
        "options": dict(module.options),
        "precision": precision,
        **vars(module.clock),
        "skipped_updates": module.skipped_updates,
        "ranks": gather_on_rank_zero(of_this_rank),
    }


def _random_state() -> dict[str, Any]:
    """Return the states of the random generators of Python, NumPy and PyTorch as tensors and plain values."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    # Reading the generators would initialize CUDA in a process that uses only the CPU.
    uses_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return {
        # PyTorch unpickles single numbers slowly.
        "python": [version, torch.tensor(words), gauss],
        "numpy": [kind, torch.from_numpy(np.asarray(keys, np.int64)), position, has_gauss, cached],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if uses_cuda else [],
    }


def restore_this_rank(module: Any, ranks: Sequence[Mapping[str, Any]]) -> None:  # an algorithm
    """Restore generators, replays and values that are not logged yet; a new rank or run begins with its own seed."""
    rank = module.global_rank
    if rank < len(ranks):
        _restore_generators(module, ranks[rank])
    else:
        seed = derive_seed(torch.initial_seed(), MINIBATCHES, rank, module.policy_version)
        module.generator.manual_seed(seed)
    _restore_replays(module, ranks)
    if len(ranks) == module.trainer.world_size:
        module.metrics.restore(ranks[rank]["window"])
    else:  # a rank that is new could not reduce metrics that it does not have
        module.metrics.begin(module.env_steps)


def _restore_generators(module: Any, state: Mapping[str, Any]) -> None:
    """Restore the random generators and discounted returns of this rank from its entry in `ranks`."""
    module.generator.set_state(state["generator"].cpu())
    generators = state["random"]
    version, words, gauss = generators["python"]
    random.setstate((version, tuple(torch.as_tensor(words).tolist()), gauss))
    kind, keys, *others = generators["numpy"]
    np.random.set_state((kind, torch.as_tensor(keys).cpu().numpy(), *others))
    torch.set_rng_state(generators["torch"].cpu())
    if generators["cuda"] and len(generators["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([one.cpu() for one in generators["cuda"]])
    normalizers, returns = reward_normalizers(module), state["discounted_returns"]
    for name in normalizers.keys() & returns.keys():
        normalizers[name].discounted_return = returns[name].to(module.device)


def _restore_replays(module: Any, ranks: Sequence[Mapping[str, Any]]) -> None:
    """Restore the earlier rollouts of this rank from the states of all `ranks`; warn if there are new ranks."""
    for replay in module.replays.values() if ranks else ():
        replay.clear()
    stored: Mapping[str, Any]
    if module.global_rank < len(ranks) >= module.trainer.world_size:
        dtype = next(module.policy.parameters()).dtype
        stored = _in_precision_of(dtype, ranks[module.global_rank]["replays"])
        for name in stored.keys() & module.replays.keys():
            module.replays[name].load_state_dict(stored[name])
        if missing := stored.keys() - module.replays.keys():
            rank_zero_warn(
                f"Replays in the checkpoint that {type(module).__name__} does not have are dropped: "
                f"{', '.join(missing)}. Make replays in __init__"
            )
        return
    # All ranks start without replays: each step needs old rows from all of them, or from none.
    stored = ranks[0]["replays"] if ranks else {}
    if lost := stored.keys() & module.replays.keys():
        rank_zero_warn(
            f"The rollouts that {type(module).__name__} keeps ({', '.join(sorted(lost))}) are dropped: the run now has "
            f"{module.trainer.world_size} ranks instead of {len(ranks)}, and new ranks have none"
        )


def _in_precision_of(dtype: torch.dtype, stored: Any) -> Any:  # nested plain data
    """Return stored rows in the precision of new ones, since a batch has both: float64 with float64 parameters only."""

    def cast(x: Tensor) -> Tensor:
        if dtype == torch.float64:
            return x.double() if x.is_floating_point() else x
        return x.float() if x.dtype == torch.float64 else x

    return apply_to_collection(stored, Tensor, cast)

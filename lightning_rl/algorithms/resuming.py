"""What a module checks and changes in a checkpoint before it takes over its state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule

from lightning_rl.spaces import space_from_dict
from lightning_rl.validation import ConfigurationError

_OF_THE_NETWORK = ("network", "hidden_sizes", "shared_encoder", "normalize_observations", "normalize_rewards")


def check_fits(checkpoint: Mapping[str, Any], module: LightningModule) -> None:
    """Raise unless the parameters in a checkpoint are those of a network like that of `module`.

    Raises:
        ConfigurationError: Spaces, activation, or names and shapes of parameters differ; names the options that do.
    """
    stored, own = checkpoint["hyper_parameters"], module.hparams
    for name in ("observation_space", "action_space"):
        if stored[name] != own[name]:
            raise ConfigurationError(
                f"{name}={space_from_dict(own[name])} does not fit the checkpoint: "
                f"expected {space_from_dict(stored[name])}, the space it was trained with"
            )
    different = [name for name in _OF_THE_NETWORK if stored.get(name) != own.get(name)]
    # Another activation would load without complaint, and act differently.
    if stored.get("activation") != own.get("activation"):
        different.append("activation")
    elif _shapes(checkpoint["state_dict"]) == _shapes(module.state_dict()):
        return
    settings = ", ".join(f"{name}={own.get(name)!r}" for name in different) or type(module).__name__
    expected = ", ".join(f"{name}={stored.get(name)!r}" for name in different) or "the network it was trained with"
    raise ConfigurationError(f"{settings} does not fit the checkpoint: expected {expected}")


def _shapes(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: x.shape for name, x in state.items()}


def check_resumable(checkpoint: Mapping[str, Any], module: LightningModule) -> None:
    """Raise unless training can go on from a checkpoint with the optimiser and scheduler of `module`.

    Raises:
        ConfigurationError: It holds weights only, or the state of another optimiser or scheduler.
    """
    if "optimizer_states" not in checkpoint:
        raise ConfigurationError(
            "ckpt_path names a checkpoint of weights only (save_weights_only=True): expected one with the state of the "
            "optimiser to resume from"
        )
    for name in ("optimizer", "lr_scheduler"):
        stored, own = checkpoint["hyper_parameters"].get(name), module.hparams.get(name)
        if stored != own:
            raise ConfigurationError(f"{name}={own!r} does not fit the checkpoint: expected {stored!r}, as before")


def keep_learning_rate(checkpoint: dict[str, Any], learning_rate: float, anneal: bool = True) -> None:
    """Make optimisers and schedulers in a checkpoint go on with `learning_rate` in place of the one they had.

    Where a schedule has lowered it, it stays lowered by the same factor, unless it was annealed and no longer is.
    """
    before = checkpoint["hyper_parameters"]["learning_rate"]
    if checkpoint["hyper_parameters"].get("anneal_learning_rate") and not anneal:
        for optimizer in checkpoint["optimizer_states"]:
            for group in optimizer["param_groups"]:
                group["lr"] = learning_rate
        return
    if learning_rate == before:
        return
    for optimizer in checkpoint.get("optimizer_states", ()):
        for group in optimizer["param_groups"]:
            group |= {name: group[name] / before * learning_rate for name in ("lr", "initial_lr") if name in group}
    for scheduler in checkpoint.get("lr_schedulers", ()):
        for name in ("base_lrs", "_last_lr"):
            if name in scheduler:
                scheduler[name] = [rate / before * learning_rate for rate in scheduler[name]]

"""What a module checks and changes in a checkpoint before it takes over its state.

The settings of a resumed run are those it is given, not those of the checkpoint: whatever differs is said, and the
stored state of optimiser and schedule is made to follow.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning
from lightning.pytorch import LightningModule

from lightning_rl.__about__ import __version__
from lightning_rl.checkpoint_format import CHECKPOINT_KEY, is_weights_only
from lightning_rl.spaces import space_from_dict
from lightning_rl.validation import ClassSpec, ConfigurationError, import_class

_OF_THE_NETWORK = (
    *("network", "hidden_sizes", "discrete_encoding", "shared_encoder", "critic_only", "memory"),
    *("normalize_observations", "normalize_rewards"),
)
# Others of these would load without complaint, and act differently.
_OF_ACTING = ("activation", "action_distribution")


def check_fits(checkpoint: Mapping[str, Any], module: LightningModule) -> None:
    """Raise unless the parameters in a checkpoint are those of a network like that of `module`.

    Raises:
        ConfigurationError: Spaces, activation, action distributions, or names and shapes of parameters differ; names
            the options that do.
    """
    stored, own = checkpoint["hyper_parameters"], module.hparams
    for name in ("observation_space", "action_space"):
        if stored[name] != own[name]:
            raise ConfigurationError(
                f"{name}={space_from_dict(own[name])} does not fit the checkpoint: "
                f"expected {space_from_dict(stored[name])}, the space it was trained with"
            )
    different = [name for name in _OF_THE_NETWORK if stored.get(name) != own.get(name)]
    if acts_differently := [name for name in _OF_ACTING if stored.get(name) != own.get(name)]:
        different += acts_differently
    elif _shapes(checkpoint["state_dict"]) == _shapes(module.state_dict()):
        return
    settings = ", ".join(f"{name}={own.get(name)!r}" for name in different) or type(module).__name__
    expected = ", ".join(f"{name}={stored.get(name)!r}" for name in different) or "the network it was trained with"
    raise ConfigurationError(f"{settings} does not fit the checkpoint: expected {expected}")


def _shapes(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: x.shape for name, x in state.items()}


def check_resumable(checkpoint: Mapping[str, Any]) -> None:
    """Raise unless training can go on from a checkpoint.

    Raises:
        ConfigurationError: It holds weights only.
    """
    if is_weights_only(checkpoint):
        raise ConfigurationError(
            "ckpt_path names a checkpoint of weights only (save_weights_only=True): expected one with the state of the "
            "optimiser to resume from; init_from begins a new run with its weights"
        )


def changes(checkpoint: Mapping[str, Any], module: LightningModule) -> list[str]:
    """Return a sentence for everything about a resumed run that is not what it was.

    Args:
        checkpoint: What is resumed from.
        module: The algorithm, with the settings and the Trainer that the run goes on with.
    """
    trainer = module.trainer
    stored, own, state = checkpoint["hyper_parameters"], module.hparams, checkpoint[CHECKPOINT_KEY]
    # An option that the checkpoint does not know has come later, with a default that changes nothing.
    names = sorted(set(stored) & set(own) - {"_class_path", "_instantiator"})
    pairs = [(name, stored[name], own[name]) for name in names]
    pairs += [
        ("algorithm", state["algorithm"] or type(module).__name__, type(module).__name__),
        ("precision", state["precision"] or trainer.precision, trainer.precision),
        ("world_size", len(state["ranks"]), trainer.world_size),
        ("lightning_rl", state["version"] or __version__, __version__),
        ("lightning", checkpoint.get("pytorch-lightning_version", lightning.__version__), lightning.__version__),
    ]
    effects = {
        "learning_rate": "; a schedule goes on in proportion",
        "initial_log_std": ", which takes no effect: the parameter is what training has made of it",
        "world_size": "; ranks that there were before go on from where they were",
        "optimizer": _class_effect(stored.get("optimizer"), own.get("optimizer")),
        "lr_scheduler": _class_effect(stored.get("lr_scheduler"), own.get("lr_scheduler")),
    }
    differ = [(name, old, new) for name, old, new in pairs if old != new]
    return [f"Resuming with {name}={new!r} (before: {old!r}){effects.get(name, '')}" for name, old, new in differ]


def _class_effect(stored: ClassSpec | None, own: ClassSpec | None) -> str:
    return ", with the state it had" if _same_class(stored, own) else ", which begins anew"


def _same_class(stored: ClassSpec | None, own: ClassSpec | None) -> bool:
    if stored is None or own is None:
        return stored is own
    return import_class("class_path", stored["class_path"]) is import_class("class_path", own["class_path"])


def adopt_settings(checkpoint: dict[str, Any], module: LightningModule) -> None:
    """Make the stored states of optimiser and schedule follow the settings of `module`.

    Another class begins with a state of its own. The same class with other arguments keeps its state and takes the new
    arguments. Another learning rate takes the place of the old one; where a schedule has lowered that, the new one is
    lowered by the same factor.
    """
    stored, own = checkpoint["hyper_parameters"], module.hparams
    if not _same_class(stored.get("optimizer"), own["optimizer"]):
        checkpoint["optimizer_states"], checkpoint["lr_schedulers"] = [], []
        return
    keeps_schedule = _same_class(stored.get("lr_scheduler"), own["lr_scheduler"])
    if keeps_schedule:
        _adopt_learning_rate(checkpoint, module)
    if all(stored.get(name) == own[name] for name in ("optimizer", "lr_scheduler")):
        return
    made: Any = module.configure_optimizers()
    optimizers, schedulers = made if isinstance(made, tuple) else ([made], [])
    names = _arguments(stored.get("optimizer")) | _arguments(own["optimizer"])
    for state, optimizer in zip(checkpoint["optimizer_states"], optimizers, strict=True):
        for group, new in zip(state["param_groups"], optimizer.param_groups, strict=True):
            # A schedule that begins anew has already put its first learning rate, and notes of its own, into the group.
            taken = names if keeps_schedule else new.keys() - {"params"}
            group |= {name: new[name] for name in taken if name in new}
    if not keeps_schedule:
        checkpoint["lr_schedulers"] = []
    for state, scheduler in zip(checkpoint["lr_schedulers"], schedulers, strict=False):
        new = scheduler.state_dict()
        state |= {name: new[name] for name in _arguments(own["lr_scheduler"]) if name in new and name != "last_epoch"}


def _arguments(spec: ClassSpec | None) -> set[str]:
    return set() if spec is None else set(spec["init_args"])


def _adopt_learning_rate(checkpoint: dict[str, Any], module: LightningModule) -> None:
    stored, learning_rate = checkpoint["hyper_parameters"], module.hparams["learning_rate"]
    before = stored["learning_rate"]
    if stored.get("anneal_learning_rate") and not module.hparams["anneal_learning_rate"]:
        for optimizer in checkpoint["optimizer_states"]:
            for group in optimizer["param_groups"]:
                group["lr"] = learning_rate
    elif learning_rate != before:
        for optimizer in checkpoint["optimizer_states"]:
            for group in optimizer["param_groups"]:
                group |= {name: group[name] / before * learning_rate for name in ("lr", "initial_lr") if name in group}
        for scheduler in checkpoint["lr_schedulers"]:
            for name in ("base_lrs", "_last_lr"):
                if name in scheduler:
                    scheduler[name] = [rate / before * learning_rate for rate in scheduler[name]]

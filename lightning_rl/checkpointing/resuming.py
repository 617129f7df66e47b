"""What a module checks and changes in a checkpoint before it takes over its state.

The settings of a resumed run are those it is given, not those of the checkpoint: whatever differs is said, and the
stored state of optimiser and schedule is made to follow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import lightning
from lightning.pytorch import LightningModule
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_rl.__about__ import __version__
from lightning_rl.checkpointing.format import CHECKPOINT_KEY, is_weights_only
from lightning_rl.options import default_groups, flat
from lightning_rl.spaces import differing, space_from_dict
from lightning_rl.training.normalizers import reward_scale
from lightning_rl.training.optimizers import SCHEDULER, has_own_critic_optimizer, optimizers_and_schedulers
from lightning_rl.training.parameter_groups import SCALE
from lightning_rl.training.schedules import parse_schedule
from lightning_rl.validation import FROM_COMMAND_LINE, ConfigurationError, import_class, loading

_OF_THE_NETWORK = tuple(
    f"policy.{name}"
    for name in ("network", "hidden_sizes", "discrete_encoding", "shared_encoder", "critic_only", "memory")
)
# Others of these would load without complaint, and mean something else by the same numbers.
_OF_THEIR_MEANING = (
    *("policy.activation", "policy.action_distribution"),
    *("normalization.values", "normalization.observations", "normalization.rewards"),
)
_OPTIMIZERS = ("optimizer", "optimizer.critic")
_LEARNED = ", which takes no effect: the parameter is what training has made of it"


def check_fits(checkpoint: Mapping[str, Any], module: Any) -> None:  # noqa: ANN401 - an algorithm
    """Raise unless the parameters in a checkpoint are those of a network like that of `module`.

    Raises:
        ConfigurationError: Spaces, activation, action distributions, normalisers, or names and shapes of parameters
            differ; names the options that do.
    """
    stored, own = stored_options(checkpoint, module), module.options
    for name in ("observation_space", "action_space"):
        if stored[name] != own[name]:
            found, expected = differing(space_from_dict(own[name]), space_from_dict(stored[name]))
            raise ConfigurationError(
                f"{name}={found} does not fit the checkpoint: expected {expected}, the space it was trained with"
            )
    different = [name for name in _OF_THE_NETWORK if stored.get(name) != own.get(name)]
    if others := [name for name in _OF_THEIR_MEANING if _meaning(name, stored) != _meaning(name, own)]:
        different += others
    elif _shapes(checkpoint["state_dict"]) == _shapes(module.state_dict()):
        return
    settings = ", ".join(f"{name}={own.get(name)!r}" for name in different) or type(module).__name__
    expected = ", ".join(f"{name}={stored.get(name)!r}" for name in different) or "the network it was trained with"
    raise ConfigurationError(f"{settings} does not fit the checkpoint: expected {expected}")


def stored_options(checkpoint: Mapping[str, Any], module: Any) -> dict[str, Any]:  # noqa: ANN401 - an algorithm
    """Return the options in a checkpoint by their full names."""
    return flat(checkpoint["hyper_parameters"], default_groups(type(module)))


def _meaning(name: str, options: Mapping[str, Any]) -> Any:  # noqa: ANN401
    """Return the value of an option, the same one for all that say the same."""
    value = options.get(name)
    if name == "normalization.rewards":
        return reward_scale(value)
    return {} if name == "normalization.observations" and value is True else value


def _shapes(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: x.shape for name, x in state.items()}


def check_resumable(checkpoint: Mapping[str, Any], module: Any) -> None:  # noqa: ANN401 - an algorithm
    """Raise unless the training of `module` can go on from a checkpoint.

    Raises:
        ConfigurationError: It holds weights only, or is of another algorithm.
    """
    algorithm, own = checkpoint[CHECKPOINT_KEY]["algorithm"], _names(type(module))
    if algorithm is not None and algorithm not in own:
        raise ConfigurationError(
            f"ckpt_path names a checkpoint of {algorithm}: expected one of {own[0]}, whose optimiser and clock can go "
            "on; init_from begins a new run with the parameters of any algorithm"
        )
    if is_weights_only(checkpoint):
        raise ConfigurationError(
            "ckpt_path names a checkpoint of weights only (save_weights_only=True): expected one with the state of the "
            "optimiser to resume from; init_from begins a new run with its weights"
        )


def _names(algorithm: type[LightningModule]) -> list[str]:
    """Return what an algorithm is called in checkpoints; a subclass of your own goes on from those of its base too."""
    bases = [algorithm] if algorithm.__module__.startswith("lightning_rl.") else algorithm.__mro__
    return [base.__name__ for base in bases]


def changes(checkpoint: Mapping[str, Any], module: Any) -> list[str]:  # noqa: ANN401 - an algorithm
    """Return a sentence for everything about a resumed run that is not what it was.

    Args:
        checkpoint: What is resumed from.
        module: The algorithm, with the settings and the Trainer that the run goes on with.
    """
    trainer = module.trainer
    stored, own, state = stored_options(checkpoint, module), module.options, checkpoint[CHECKPOINT_KEY]
    # An option that the checkpoint does not know has come later, with a default that changes nothing.
    names = sorted(set(stored) & set(own) - {*FROM_COMMAND_LINE})
    pairs = [(name, stored[name], own[name]) for name in names]
    pairs += [
        ("algorithm", state["algorithm"] or type(module).__name__, type(module).__name__),
        ("precision", state["precision"] or trainer.precision, trainer.precision),
        ("world_size", len(state["ranks"]), trainer.world_size),
        ("lightning_rl", state["version"] or __version__, __version__),
        ("lightning", checkpoint.get("pytorch-lightning_version", lightning.__version__), lightning.__version__),
    ]
    effects = {
        "learning_rate": _rate_effect(stored, own, "learning_rate"),
        "optimizer.critic.learning_rate": _rate_effect(stored, own, "optimizer.critic.learning_rate"),
        "optimizer.critic.name": "" if _same_optimizers(stored, own) else ", which begins anew",
        "optimizer.critic.options": "" if _same_optimizers(stored, own) else ", which begins anew",
        "separate_aux_optimizer": "; optimisers begin anew",
        "optimizer.groups": ", with the state it had" if _same_optimizers(stored, own) else "; optimisers begin anew",
        "policy.initial_log_std": _LEARNED,
        "initial_temperature": _LEARNED,
        "initial_kl_coef": _kl_coef_effect(stored, own),
        "world_size": "; ranks that there were before go on from where they were",
        "optimizer.name": _class_effect(stored, own, "optimizer"),
        "optimizer.options": _class_effect(stored, own, "optimizer"),
        "optimizer.scheduler.name": _class_effect(stored, own, SCHEDULER),
        "optimizer.scheduler.options": _class_effect(stored, own, SCHEDULER),
    }
    differ = [(name, old, new) for name, old, new in pairs if old != new]
    return [f"Resuming with {name}={new!r} (before: {old!r}){effects.get(name, '')}" for name, old, new in differ]


def _rate_effect(stored: Mapping[str, Any], own: Mapping[str, Any], name: str) -> str:
    if not _same_optimizers(stored, own):
        return "; optimisers begin anew"
    if isinstance(own.get(name), dict):
        return ", a function of the environment steps from the beginning of the run on"
    return "; a schedule goes on in proportion"


def _kl_coef_effect(stored: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    is_on = stored.get("initial_kl_coef") and own.get("initial_kl_coef")
    return "; the coefficient itself goes on from where it was" if is_on else ""


def _class_effect(stored: Mapping[str, Any], own: Mapping[str, Any], group: str) -> str:
    return ", with the state it had" if _same_class(stored, own, group) else ", which begins anew"


def _same_class(stored: Mapping[str, Any], own: Mapping[str, Any], group: str) -> bool:
    """Whether the optimizers or schedulers of a group of options are of one class, by whatever path it is named."""
    before, now = stored.get(f"{group}.name"), own[f"{group}.name"]
    if before is None or now is None or before == now:
        return bool(before == now)
    kinds = (Optimizer, LRScheduler)
    try:
        with loading():
            found = import_class("ckpt_path", before, kinds)
    except ConfigurationError:  # of a module that this run does not use
        return False
    return found is import_class(f"{group}.name", now, kinds)


def adopt_settings(checkpoint: dict[str, Any], module: Any) -> None:  # noqa: ANN401 - an algorithm
    """Make the stored states of optimisers and schedules follow the settings of `module`.

    Another class begins with a state of its own, and so do both optimisers where there were others, or other groups of
    parameters. The same class with other arguments keeps its state and takes the new arguments. Another learning rate
    takes the place of the old one; where a schedule has lowered that, the new one is lowered by the same factor.
    """
    stored, own = stored_options(checkpoint, module), module.options
    if not _same_optimizers(stored, own):
        checkpoint["optimizer_states"], checkpoint["lr_schedulers"] = [], []
        return
    keeps_schedule = _same_class(stored, own, SCHEDULER)
    optimizers, schedulers = optimizers_and_schedulers(module.configure_optimizers())
    if keeps_schedule:
        _adopt_learning_rates(checkpoint, stored, own, optimizers)
    names = [f"{group}.{name}" for group in (*_OPTIMIZERS, SCHEDULER) for name in ("name", "options")]
    if all(stored.get(name) == own[name] for name in (*names, "optimizer.groups")):
        return
    arguments = {name for options in (stored, own) for name in _arguments(options)}
    for state, optimizer in zip(checkpoint["optimizer_states"], optimizers, strict=True):
        for group, new in zip(state["param_groups"], optimizer.param_groups, strict=True):
            # A schedule that begins anew has already put its first learning rate, and notes of its own, into the group.
            taken = arguments if keeps_schedule else new.keys() - {"params"}
            group |= {name: new[name] for name in taken if name in new}
    if not keeps_schedule:
        checkpoint["lr_schedulers"] = []
    for state, scheduler in zip(checkpoint["lr_schedulers"], schedulers, strict=False):
        new = scheduler.state_dict()
        state |= {name: new[name] for name in own[f"{SCHEDULER}.options"] if name in new and name != "last_epoch"}


def _same_optimizers(stored: Mapping[str, Any], own: Mapping[str, Any]) -> bool:
    """Whether the states of stored optimisers fit those of the module: number, classes, parameters of each group."""
    separate = [has_own_critic_optimizer(options) for options in (stored, own)]
    patterns = [list(options.get("optimizer.groups") or {}) for options in (stored, own)]
    same = all(_same_class(stored, own, group) for group in _OPTIMIZERS)
    of_phases = stored.get("separate_aux_optimizer") == own.get("separate_aux_optimizer")
    return same and of_phases and separate[0] == separate[1] and patterns[0] == patterns[1]


def _arguments(options: Mapping[str, Any]) -> set[str]:
    """Names of everything that optimisers and groups of parameters are given."""
    given = [options.get(f"{group}.options") or {} for group in _OPTIMIZERS]
    given += (options.get("optimizer.groups") or {}).values()
    return {name for arguments in given for name in arguments}


def _adopt_learning_rates(
    checkpoint: dict[str, Any], stored: Mapping[str, Any], own: Mapping[str, Any], optimizers: Sequence[Optimizer]
) -> None:
    was_scheduled = _is_scheduled(stored) and not _is_scheduled(own)
    states, schedulers = checkpoint["optimizer_states"], checkpoint["lr_schedulers"]
    for index, (state, optimizer) in enumerate(zip(states, optimizers, strict=True)):
        before, now = (_first_rate(options, index) for options in (stored, own))
        for group, new in zip(state["param_groups"], optimizer.param_groups, strict=True):
            first = before * group.get(SCALE, 1.0)
            if was_scheduled:
                group["lr"] = new["lr"]
            elif first != (first_now := now * new.get(SCALE, 1.0)):
                rates = [name for name in ("lr", "initial_lr") if name in group]
                # A group that stood still has no proportion to go on in.
                group |= {name: group[name] / first * first_now if first else first_now for name in rates}
        if before != now and index < len(schedulers):
            for name in {"base_lrs", "_last_lr"} & {*schedulers[index]}:
                schedulers[index][name] = [rate / before * now for rate in schedulers[index][name]]


def _is_scheduled(options: Mapping[str, Any]) -> bool:
    rates = [options.get(name) for name in ("learning_rate", "optimizer.critic.learning_rate")]
    changing = (options.get(f"optimizer.{name}") for name in ("anneal", "adaptive_learning_rate"))
    return any(changing) or any(isinstance(rate, dict) for rate in rates)


def _first_rate(options: Mapping[str, Any], index: int) -> float:
    """Return the learning rate that an optimiser begins a run with."""
    critics = options.get("optimizer.critic.learning_rate")
    # Those of an auxiliary phase come after the others, in the same order.
    value = options["learning_rate"] if index % 2 == 0 or critics is None else critics
    return parse_schedule("learning_rate", value).at(0, None)

"""Checks, reports and applies options of a resumed run, which take precedence over options in the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path, PureWindowsPath
from typing import Any

import lightning
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn  # type: ignore[attr-defined]
from torch.optim import Optimizer

from lightning_rl import __version__
from lightning_rl.checkpointing.atomic import AtomicCheckpointIO
from lightning_rl.checkpointing.format import CHECKPOINT_KEY, check_format, is_weights_only
from lightning_rl.files import check_intact
from lightning_rl.policies.sharding import load_optimizer
from lightning_rl.spaces import space_from_dict
from lightning_rl.training.normalizers import reward_scale
from lightning_rl.training.optimizers import SCHEDULER, has_own_critic_optimizer, optimizers_and_schedulers
from lightning_rl.training.parameter_groups import SCALE
from lightning_rl.training.schedules import parse_schedule
from lightning_rl.validation import FROM_COMMAND_LINE, ConfigurationError, check

_NETWORK_OPTIONS = tuple(
    f"policy.{name}"
    for name in ("network", "hidden_sizes", "discrete_encoding", "shared_encoder", "critic_only", "memory")
)
# With another value of these, the stored parameters would load without an error, but compute something else.
_MEANING_OPTIONS = (
    *("policy.activation", "policy.action_distribution"),
    *("normalization.values", "normalization.observations", "normalization.rewards"),
)
_OPTIMIZERS = ("optimizer", "optimizer.critic")
_ALL_NEW = "; all optimizers start with a new state"
_NEW_STATE = ", with a new state"
_STORED_STATE = ", with the stored state"
_LEARNED = ", ignored: the learned value is kept"


def take_over(checkpoint: dict[str, Any], module: Any) -> None:  # an algorithm
    """Check a checkpoint and take over its clock; if the Trainer resumes the run, also the rest of its state."""
    trainer, state, clock = module._trainer, checkpoint.get(CHECKPOINT_KEY, {}), module.clock
    if trainer is not None and not isinstance(trainer.strategy.checkpoint_io, AtomicCheckpointIO):
        check_intact(trainer.ckpt_path)
    check_format(checkpoint)
    resumes = trainer is not None and trainer.state.fn == "fit"
    if resumes:
        check_resumable(checkpoint, module)
    check_fits(checkpoint, module)
    for name in ("env_steps", "policy_version", "frames", "planned_env_steps"):
        setattr(clock, name, state[name])
    if not resumes:
        if "current_model_state" in checkpoint:  # Lightning would evaluate these parameters instead of their average
            checkpoint["current_model_state"] = checkpoint["state_dict"]
        return
    if hasattr(data := trainer.datamodule, "rollout_shape") and (name := type(data).__qualname__) not in checkpoint:
        rank_zero_warn(
            f"the checkpoint has no state of {name}, since another class collected its rollouts: environments begin "
            "new episodes, so this run is not bit for bit the same as one without the interruption"
        )
    for sentence in changes(checkpoint, module):
        rank_zero_info(sentence)
    adopt_settings(checkpoint, module)
    _follow_moved_folder(checkpoint.get("callbacks", {}), trainer)
    if module.acting_copies:
        for stored, optimizer in zip(checkpoint["optimizer_states"], trainer.optimizers, strict=False):
            load_optimizer(optimizer, stored)
    module.skipped_updates = state["skipped_updates"]
    clock.env_steps_before_epochs, clock.epoch_size = state["env_steps_before_epochs"], state["epoch_size"]
    module.restored = {name: state[name] for name in ("ranks", "planned_env_steps")}


def _follow_moved_folder(states: Mapping[str, dict[str, Any]], trainer: Trainer) -> None:
    """Change the paths of saved checkpoints if their folder was moved or copied; Lightning would drop their scores."""
    for callback in trainer.checkpoint_callbacks:
        state = states.get(callback.state_key, {})
        old, new = state.get("dirpath"), getattr(callback, "dirpath", None)
        if not old or not new or old == new or Path(str(trainer.ckpt_path)).parent.resolve() != Path(new).resolve():
            continue
        if not Path(_moved(state["best_model_path"], old, new)).exists():
            continue  # `old` is another folder, of a run with another `dirpath`
        for name in ("dirpath", "best_model_path", "kth_best_model_path", "last_model_path"):
            state[name] = _moved(state[name], old, new)
        state["best_k_models"] = {_moved(path, old, new): score for path, score in state["best_k_models"].items()}


def _moved(path: str, old: str, new: str) -> str:
    inside = PureWindowsPath(path)  # parses paths of all systems: the run may come from Windows
    return str(Path(new, *inside.relative_to(old).parts)) if inside.is_relative_to(old) else path


def check_fits(checkpoint: Mapping[str, Any], module: Any) -> None:  # an algorithm
    """Raise a `ConfigurationError` that names the options, unless the parameters in a checkpoint fit `module`."""
    stored, own = checkpoint[CHECKPOINT_KEY]["options"], module.options
    for name in ("observation_space", "action_space"):
        if stored[name] != own[name]:
            raise ConfigurationError(
                f"{name}={space_from_dict(own[name])} does not fit the checkpoint: expected "
                f"{space_from_dict(stored[name])}, the space it was trained with"
            )
    different = [name for name in _MEANING_OPTIONS if _meaning(name, stored) != _meaning(name, own)]
    own_state = module.state_dict()
    # `ModelParallelStrategy` has already loaded and removed the parameters.
    states = (checkpoint.get("state_dict", own_state), own_state)
    shared = states[0].keys() & own_state.keys()
    shapes = [{n: x.shape for n, x in state.items() if module.strict_loading or n in shared} for state in states]
    if not different and shapes[0] == shapes[1]:
        return
    different = [name for name in _NETWORK_OPTIONS if stored.get(name) != own.get(name)] + different
    settings = ", ".join(f"{name}={own.get(name)!r}" for name in different) or type(module).__name__
    others = sorted({n for n, _ in shapes[0].items() ^ shapes[1].items()})
    network = f"the network it was trained with; different are {', '.join(others)}"
    expected = ", ".join(f"{name}={stored.get(name)!r}" for name in different) or network
    raise ConfigurationError(f"{settings} does not fit the checkpoint: expected {expected}")


def _meaning(name: str, options: Mapping[str, Any]) -> Any:
    value = options.get(name)
    if name == "normalization.rewards":
        return reward_scale(value)
    return {} if name == "normalization.observations" and value is True else value


def check_resumable(checkpoint: Mapping[str, Any], module: Any) -> None:  # an algorithm
    """Raise a `ConfigurationError` if a checkpoint is of another algorithm or has no optimizer."""
    kind, algorithm = type(module), checkpoint[CHECKPOINT_KEY]["algorithm"]
    # A user's subclass also resumes checkpoints of its base.
    bases: Sequence[type[LightningModule]] = [kind] if kind.__module__.startswith("lightning_rl.") else kind.__mro__
    if algorithm not in {base.__name__ for base in bases}:
        raise ConfigurationError(
            f"ckpt_path names a checkpoint of {algorithm}: expected one of {kind.__name__}, to resume its optimizer "
            "and clock; init_from starts a new run with the parameters of any algorithm"
        )
    if is_weights_only(checkpoint) or not checkpoint["optimizer_states"]:
        raise ConfigurationError(
            "ckpt_path names a checkpoint without optimizer (save_weights_only=True, or saved by a Trainer that only "
            "evaluated): expected one with the state of the optimizer; init_from starts a new run with its weights"
        )


def changes(checkpoint: Mapping[str, Any], module: Any) -> list[str]:  # an algorithm
    """Return a sentence about each difference between a resumed run and its checkpoint."""
    trainer = module.trainer
    own, state = module.options, checkpoint[CHECKPOINT_KEY]
    stored = state["options"]
    # A subclass may have options that the algorithm in the checkpoint does not have.
    names = sorted(set(stored) & set(own) - {*FROM_COMMAND_LINE})
    pairs = [(name, stored[name], own[name]) for name in names]
    pairs += [
        ("algorithm", state["algorithm"], type(module).__name__),
        ("precision", state["precision"], trainer.precision),
        ("world_size", len(state["ranks"]), trainer.world_size),
        ("lightning_rl", state["version"], __version__),
        ("lightning", checkpoint["pytorch-lightning_version"], lightning.__version__),
    ]
    effects = _effects(stored, own)
    differ = [(name, old, new) for name, old, new in pairs if old != new]
    return [f"Resuming with {name}={new!r} (before: {old!r}){effects.get(name, '')}" for name, old, new in differ]


def _effects(stored: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, str]:
    """Return by option how a change takes effect, if that needs saying."""
    same = _same_optimizers(stored, own)
    keeps_coef = stored.get("initial_kl_coef") and own.get("initial_kl_coef")
    effects = {
        "separate_aux_optimizer": _ALL_NEW,
        "optimizer.groups": _STORED_STATE if same else _ALL_NEW,
        "policy.initial_log_std": _LEARNED,
        "initial_temperature": _LEARNED,
        "initial_kl_coef": "; the current coefficient is kept" if keeps_coef else "",
        "world_size": "; the earlier ranks continue where they stopped",
    }
    for name in ("learning_rate", "optimizer.critic.learning_rate"):
        is_schedule = own.get(name) is not None and parse_schedule(name, own[name]).varies
        kept = ", a function of all environment steps of the run" if is_schedule else "; the current rate is scaled"
        effects[name] = kept if same else _ALL_NEW
    for name in ("name", "options"):
        for group in ("optimizer", SCHEDULER):
            effects[f"{group}.{name}"] = _STORED_STATE if _same_class(stored, own, group) else _NEW_STATE
        effects[f"optimizer.critic.{name}"] = "" if same else _NEW_STATE
    return effects


def _same_class(stored: Mapping[str, Any], own: Mapping[str, Any], group: str) -> bool:
    """Whether the optimizer or scheduler of a group of options keeps its class, by whatever path it is named."""
    # `torch.optim.Adam` is `torch.optim.adam.Adam`. Nothing that a checkpoint names is imported.
    names = [options.get(f"{group}.name") or "" for options in (stored, own)]
    before, now = ((name.partition(".")[0], name.rpartition(".")[2]) for name in names)
    return before == now


def _same_optimizers(stored: Mapping[str, Any], own: Mapping[str, Any]) -> bool:
    forms = [
        (
            has_own_critic_optimizer(options),
            options.get("separate_aux_optimizer"),
            list(options.get("optimizer.groups") or {}),
        )
        for options in (stored, own)
    ]
    return forms[0] == forms[1] and all(_same_class(stored, own, group) for group in _OPTIMIZERS)


def adopt_settings(checkpoint: dict[str, Any], module: Any) -> None:  # an algorithm
    """Change the stored states of optimizers and schedulers to the options of `module`.

    * Optimizers of another class, number or grouping of parameters start with a new state, and so does a scheduler of
      another class. Otherwise the state is kept, with the new arguments.
    * A new learning rate replaces the old one. A rate that a schedule has lowered is lowered by the same factor.
    """
    stored, own = checkpoint[CHECKPOINT_KEY]["options"], module.options
    if not _same_optimizers(stored, own):
        checkpoint["optimizer_states"], checkpoint["lr_schedulers"] = [], []
        return
    keeps_schedule = _same_class(stored, own, SCHEDULER)
    optimizers, schedulers = optimizers_and_schedulers(module.configure_optimizers())
    number, before = len(optimizers), len(checkpoint["optimizer_states"])
    expected = f"{before} as in the checkpoint; init_from starts a new run with its parameters"
    check(number == before, "configure_optimizers", f"{number} optimizers", expected)
    if keeps_schedule:
        _adopt_learning_rates(checkpoint, stored, own, optimizers)
    names = [f"{group}.{name}" for group in (*_OPTIMIZERS, SCHEDULER) for name in ("name", "options")]
    if all(stored.get(name) == own[name] for name in (*names, "optimizer.groups")):
        return
    arguments = _argument_names(stored) | _argument_names(own)
    for state, optimizer in zip(checkpoint["optimizer_states"], optimizers, strict=True):
        for group, new in zip(state["param_groups"], optimizer.param_groups, strict=True):
            # Other entries may be state, as the step size of Prodigy. A new scheduler has already written its own.
            taken = arguments if keeps_schedule else new.keys() - {"params"}
            group |= {name: new[name] for name in taken if name in new}
            if SCALE not in new:
                group.pop(SCALE, None)
    if not keeps_schedule:
        checkpoint["lr_schedulers"] = []
    for state, scheduler in zip(checkpoint["lr_schedulers"], schedulers, strict=False):
        new, taken = scheduler.state_dict(), {*stored[f"{SCHEDULER}.options"], *own[f"{SCHEDULER}.options"]}
        state |= {name: new[name] for name in taken if name in new and name != "last_epoch"}


def _argument_names(options: Mapping[str, Any]) -> set[str]:
    given = [options.get(f"{group}.options") or {} for group in _OPTIMIZERS]
    given += (options.get("optimizer.groups") or {}).values()
    return {name for arguments in given for name in arguments}


def _adopt_learning_rates(
    checkpoint: dict[str, Any], stored: Mapping[str, Any], own: Mapping[str, Any], optimizers: Sequence[Optimizer]
) -> None:
    states, schedulers = checkpoint["optimizer_states"], checkpoint["lr_schedulers"]
    for index, (state, optimizer) in enumerate(zip(states, optimizers, strict=True)):
        (before, old_setter), (now, setter) = (_initial_rate(options, index) for options in (stored, own))
        scheduler = schedulers[index] if index < len(schedulers) else {}
        for number, (group, new) in enumerate(zip(state["param_groups"], optimizer.param_groups, strict=True)):
            first, first_now = before * group.get(SCALE, 1.0), now * new.get(SCALE, 1.0)
            if old_setter and setter != old_setter:
                group["lr"] = new["lr"]
            elif first != first_now:
                rates: list[tuple[Any, str | int]] = [(group, name) for name in ("lr", "initial_lr") if name in group]
                rates += [(scheduler[name], number) for name in ("base_lrs", "_last_lr") if name in scheduler]
                for holder, key in rates:  # a rate of 0 cannot be scaled
                    holder[key] = holder[key] / first * first_now if first else first_now


def _initial_rate(options: Mapping[str, Any], index: int) -> tuple[float, str | None]:
    """Return the initial learning rate of an optimizer, and what changes it apart from a scheduler, if anything."""
    # The order is actor, critic, then actor and critic of the auxiliary phase.
    is_critic = index % 2 == 1 and has_own_critic_optimizer(options)
    of_critic = options.get("optimizer.critic.learning_rate") if is_critic else None
    rate = options["learning_rate"] if of_critic is None else of_critic  # a number or a schedule
    adapts = options.get("optimizer.adaptive_learning_rate") and not is_critic
    schedule = parse_schedule("learning_rate", rate)
    is_scheduled = options.get("optimizer.anneal") or schedule.varies
    setter = "schedule" if is_scheduled else "adaptive_learning_rate" if adapts else None
    return schedule.at(0, None), setter

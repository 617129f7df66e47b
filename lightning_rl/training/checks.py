"""Checks of an algorithm's options, and of the Trainer and its strategy."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    EarlyStopping,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateFinder,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.strategies import (
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    Strategy,
    StrategyRegistry,
)
from lightning.pytorch.strategies.xla import XLAStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn  # type: ignore[attr-defined]
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lightning_rl.nested import space_leaves
from lightning_rl.options import changed
from lightning_rl.policies.actor_critic import check_modes_agree
from lightning_rl.policies.networks.make import network_to_plain_data
from lightning_rl.rollouts.rollout import LOGGED, OF_EPISODES, names_of_infos
from lightning_rl.spaces import observation_dtype, space_to_dict
from lightning_rl.training.metrics import BY_GRADIENT_STEPS, collected, histogram_loggers
from lightning_rl.training.optimizers import (
    SCHEDULER,
    AdaptiveLearningRate,
    check_optimizer_class,
    check_scheduler_class,
    scheduler_spec,
)
from lightning_rl.training.parameter_groups import group_options
from lightning_rl.training.schedules import parse_schedule
from lightning_rl.validation import (
    ConfigurationError,
    check,
    check_number,
    check_type,
    is_one_of,
    to_class_spec,
    to_plain_data,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def plain_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return options as plain data for checkpoints and logs: spaces and classes become descriptions."""
    plain: dict[str, Any] = {}
    for name, value in given.items():
        if name in ("observation_space", "action_space"):
            plain[name] = space_to_dict(value, name)
        elif name in _CLASSES and value is not None:
            expected = "a class that can be imported, or its path; its arguments belong into options"
            check(isinstance(value, str | type), name, value, expected)
            plain[name] = to_class_spec(name, value)["class_path"]
        elif name == "policy.network" and not isinstance(value, str):
            plain[name] = network_to_plain_data(value)
        elif name == "optimizer.groups":
            plain[name] = group_options(value)
        else:
            plain[name] = to_plain_data(name, value)
    return plain


_CLASSES = ("optimizer.name", "optimizer.critic.name", "optimizer.scheduler.name")


def check_options(
    given: Mapping[str, Any], types: Mapping[str, Any], without_effect: Mapping[str, str], defaults: Mapping[str, Any]
) -> None:
    """Check options by full name; `without_effect` has the reason for each option that is not used."""
    for name, reason in without_effect.items():
        check(given[name] == defaults[name], name, given[name], f"{defaults[name]!r}: {reason}")
    for name, hint in types.items():
        if "." not in name:  # a group has checked its own options
            check_type(name, given[name], hint)
    check_number("gamma", given["gamma"], at_least=0, at_most=1)
    _check_normalizers(given)
    _check_optimizer(given)
    _check_learning_rates(given)


def _check_normalizers(given: Mapping[str, Any]) -> None:
    observations, rewards = given["normalization.observations"], given["normalization.rewards"]
    if not isinstance(observations, dict):  # `make_normalizer` checks a dict
        check(isinstance(observations, bool), "normalization.observations", observations, "true or false, or a dict")
    known = isinstance(rewards, bool) or is_one_of(rewards, ("return_std", "reward_std"))
    check(known, "normalization.rewards", rewards, "true or false, return_std or reward_std")


def _check_optimizer(given: Mapping[str, Any]) -> None:
    rates = {"optimizer": "learning_rate", "optimizer.critic": "optimizer.critic.learning_rate"}
    for group, rate in rates.items():
        arguments = given[f"{group}.options"]
        check("lr" not in arguments, f"{group}.options", arguments, f"no 'lr'; set {rate} instead")
        if (name := given[f"{group}.name"]) is not None:
            check_optimizer_class(group, {"class_path": name, "init_args": arguments})
    if (scheduler := scheduler_spec(given)) is not None:
        check_scheduler_class(scheduler)
        check(not given["optimizer.anneal"], "optimizer.anneal", True, f"false, since {SCHEDULER} is set")
    else:
        field = f"{SCHEDULER}.options"
        check(not given[field], field, given[field], f"an empty dict without {SCHEDULER}.name")


def _check_learning_rates(given: Mapping[str, Any]) -> None:
    others = {"optimizer.anneal": given["optimizer.anneal"], SCHEDULER: given[f"{SCHEDULER}.name"]}
    for name in ("learning_rate", "optimizer.critic.learning_rate"):
        if given[name] is not None or name == "learning_rate":
            schedule = parse_schedule(name, given[name], above=0)
            check(schedule.at(0, None) > 0, name, given[name], "a rate that starts above 0")
            for other, value in others.items():
                check(not (schedule.varies and value), name, given[name], f"a number, since {other} is set")
    field, adaptive = "optimizer.adaptive_learning_rate", given["optimizer.adaptive_learning_rate"]
    if adaptive is None:
        return
    schedule = parse_schedule("learning_rate", given["learning_rate"])
    valid = isinstance(adaptive, Mapping) and "target_kl" in adaptive
    check(valid, field, adaptive, "target_kl and optionally factor, minimum and maximum")
    rule = changed(field, AdaptiveLearningRate(adaptive["target_kl"]), adaptive)
    check_number(f"{field}.maximum", rule.maximum, at_least=rule.minimum)
    setters = [name for name, value in others.items() if value]
    setters += ["learning_rate, a schedule,"] if schedule.varies else []
    check(not setters, field, adaptive, f"null, since {' and '.join(setters)} is set")
    rate = schedule.at(0, None)
    expected = f"minimum and maximum on either side of learning_rate, which is {rate:g}"
    check(rule.minimum <= rate <= rule.maximum, field, vars(rule), expected)


_FEWER_MINIBATCHES = "a batch is a rollout; lower num_minibatches of the model for gradients of more steps"
_NEW_TRAINER = "; after a Tuner, which leaves this callback in its Trainer, make a new Trainer"
_REFUSED = {
    LearningRateFinder: f"the loss says nothing about a policy; compare returns (examples/tune.py){_NEW_TRAINER}",
    BatchSizeFinder: "a batch is a rollout; set num_envs and rollout_length, or more minibatches if memory is short"
    + _NEW_TRAINER,
    GradientAccumulationScheduler: _FEWER_MINIBATCHES,
    StochasticWeightAveraging: "learning rates are options of the model; EMAWeightAveraging averages without them",
    BaseFinetuning: "learning rates are options of the model; freeze modules by requires_grad_(False) in a callback",
}
# Lightning 2.6 introduced `WeightAveraging`, the base of `EMAWeightAveraging`.
_REFUSED_IF_SHARDED: dict[Any, str] = {
    getattr(lightning_callbacks, "WeightAveraging", StochasticWeightAveraging): "it copies the parameters, which "
    "cannot be copied with ModelParallelStrategy; use strategy='ddp'"
}
# Hooks that Lightning calls in automatic optimization only.
_NEVER_CALLED = (
    "optimizer_step",
    "optimizer_zero_grad",
    "configure_gradient_clipping",
    "lr_scheduler_step",
    "on_before_zero_grad",
)


def refuse_callbacks(trainer: Trainer) -> None:
    """Check that a Trainer has no callback that needs automatic optimization; Lightning's Tuner adds some of them."""
    refused = _REFUSED | (_REFUSED_IF_SHARDED if isinstance(trainer.strategy, ModelParallelStrategy) else {})
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for kind, reason in refused.items():
            if isinstance(callback, kind):
                raise ConfigurationError(f"trainer.callbacks: {kind.__name__} cannot be used: {reason}")


def refuse_automatic_optimization(trainer: Trainer, model: LightningModule) -> None:
    """Check for options and hooks that Lightning uses in automatic optimization only, and for repeated batches."""
    clip, accumulated = trainer.gradient_clip_val, trainer.accumulate_grad_batches
    expected = "None; set model.optimizer.max_grad_norm or max_grad_value instead"
    check(not clip, "trainer.gradient_clip_val", clip, expected)
    check(accumulated == 1, "trainer.accumulate_grad_batches", accumulated, f"1: {_FEWER_MINIBATCHES}")
    repeated = trainer.overfit_batches  # type: ignore[attr-defined]
    check(not repeated, "trainer.overfit_batches", repeated, "0, since every rollout is a new one")
    reason = "which Lightning does not call in manual optimization"
    for name in _NEVER_CALLED:
        expected = f"no {name}, {reason}; extend update or descend"
        check(not is_overridden(name, model), "model", type(model).__name__, expected)
    hooks = {name: hook for name, hook in vars(Callback).items() if name.startswith("on_")}
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        # An attribute of LambdaCallback is no method. Callbacks of Ray Tune override all hooks, and most do nothing.
        own = {name for name, hook in hooks.items() if getattr(getattr(callback, name), "__func__", None) is not hook}
        expected = f"no on_before_zero_grad, {reason}; on_train_batch_end follows the updates from a rollout"
        is_valid = "on_before_zero_grad" not in own or own == hooks.keys()
        check(is_valid, "trainer.callbacks", type(callback).__name__, expected)


def check_callbacks(trainer: Trainer, model: Any) -> None:  # an algorithm
    """Check that checkpoint callbacks can save, and that callbacks monitor a logged value in the right direction."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    info_keys = getattr(trainer.datamodule, "info_keys", None)  # type: ignore[attr-defined]
    infos = names_of_infos(info_keys or ())
    logged = {"val": [f"val/{name}" for name in (*OF_EPISODES, "episodes", *infos)]}
    if model.learns_from_recorded_steps:  # no episode ends in training
        logged["rollout"] = logged["val"]
    elif info_keys is not None:  # known once the Trainer has the data
        logged["rollout"] = [f"rollout/{name}" for name in (*LOGGED, *infos)]
    for callback in callbacks:
        # Lightning has no other public name for the intervals.
        key = callback.state_key if isinstance(callback, ModelCheckpoint) else ""
        if "'train_time_interval': datetime" in key:
            raise ConfigurationError(
                f"trainer.callbacks: {type(callback).__name__}.train_time_interval: Lightning saves nothing by time in "
                "manual optimization; expected LastCheckpoint(train_time_interval=...), or EnvStepCheckpoint"
            )
        if (every := BY_GRADIENT_STEPS.search(key)) and every[1] != "1":
            rank_zero_warn(
                f"{type(callback).__name__}(every_n_train_steps={every[1]}) counts gradient steps, and saves only if "
                f"their number is a multiple of {every[1]} at the end of a rollout; EnvStepCheckpoint counts "
                "environment steps"
            )
        field = f"trainer.callbacks: {type(callback).__name__}"
        every_step = getattr(callback, "update_every_n_steps", 1)
        expected = "1: EMAWeightAveraging averages after a rollout, and only at a multiple of so many gradient steps"
        check(every_step == 1, f"{field}.update_every_n_steps", every_step, expected)
        monitor, mode = getattr(callback, "monitor", None), getattr(callback, "mode", "max")
        if not isinstance(monitor, str):
            continue
        is_return = "episode_return" in monitor
        names = logged.get(monitor.partition("/")[0], [monitor])
        if monitor not in names:
            near = difflib.get_close_matches(monitor, names, 1, 0.8)
            known = all(map(_logs_known_values, (model, *callbacks)))
            check(not known, f"{field}.monitor", monitor, " or ".join(near or names))
            if near:
                rank_zero_warn(f"{type(callback).__name__}: monitor={monitor!r}; did you mean {near[0]!r}?")
        if monitor in collected(trainer) and isinstance(callback, EarlyStopping):
            callback.strict = False  # it waits for the first episode, which may end in a later epoch
        expected = f"'max', since larger values of {monitor} are better"
        check(mode == "max" or not is_return, f"{field}.mode", mode, expected)
        validates = trainer.limit_val_batches != 0 or not monitor.startswith("val/episode")
        check(validates, f"{field}.monitor", monitor, "a value that is logged in training, since nothing is validated")


def _logs_known_values(x: object) -> bool:
    # Classes of users may log more than the algorithms.
    return type(x).__module__.startswith(("lightning.", "lightning_rl.")) and not isinstance(x, LambdaCallback)


_MODEL_PARALLEL = (
    "ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, save_distributed_checkpoint=False)"
)


def check_strategy(strategy: str | Strategy) -> None:
    """Check that a strategy, or its name, is not FSDP1 or DeepSpeed."""
    if isinstance(strategy, Strategy):
        kind, value = type(strategy), type(strategy).__name__
    else:
        kind, value = {k: v["strategy"] for k, v in StrategyRegistry.items()}.get(strategy, Strategy), strategy
    # Lightning has no name for model parallelism, and its own error would not name the class.
    if issubclass(kind, FSDPStrategy | DeepSpeedStrategy) or strategy == "model_parallel":
        raise ConfigurationError(
            f"strategy={value!r} is not supported: Lightning runs FSDP1 and DeepSpeed on CUDA GPUs only, so they were "
            f"never tested; expected 'ddp', or to shard over two devices {_MODEL_PARALLEL}"
        )
    # Private in Lightning 2.6; no public attribute has this argument.
    folder = isinstance(strategy, ModelParallelStrategy) and strategy._save_distributed_checkpoint
    expected = f"False, since a checkpoint is a single file: {_MODEL_PARALLEL}"
    check(not folder, "save_distributed_checkpoint", True, expected)


def training_device(trainer: Trainer) -> torch.device:
    """Return the device of a Trainer; strategies for several XLA devices set their device only on the ranks."""
    strategy = trainer.strategy
    return torch.device("xla") if isinstance(strategy, XLAStrategy) else strategy.root_device


def check_mesh(mesh: DeviceMesh | None) -> None:
    """Check that the mesh of `ModelParallelStrategy` shards parameters, but does not split layers."""
    size = 1 if mesh is None else mesh["tensor_parallel"].size()
    expected = f"1, since each rank has its own environments: {_MODEL_PARALLEL}"
    check(size == 1, "tensor_parallel_size", size, expected)


def check_spaces(model: Any, data: object) -> None:  # an algorithm
    """Check that a data module has the spaces of an algorithm."""
    for name in ("observation_space", "action_space"):
        space = getattr(data, name, None)
        if space is not None and space_to_dict(space) != model.options[name]:
            env_id = getattr(getattr(data, "spec", None), "env_id", "the environments")
            raise ConfigurationError(
                f"{name}={space} of {env_id} does not fit: expected {getattr(model, name)}, the space that "
                f"{type(model).__name__} was made for"
            )


def check_schedulers(trainer: Trainer) -> None:
    """Check that schedulers that `configure_optimizers` returns can step after each rollout."""
    for config in trainer.lr_scheduler_configs:
        how = f"{type(config.scheduler).__name__}, frequency {config.frequency}"
        expected = "a scheduler with frequency 1 that needs no metric: it steps after each rollout"
        needs_metric = isinstance(config.scheduler, ReduceLROnPlateau)
        check(config.frequency == 1 and not needs_metric, "configure_optimizers", how, expected)


def warn_of_untrained_parameters(model: nn.Module, optimizers: Sequence[Any]) -> None:
    """Warn of parameters that are in no optimizer, unless they are frozen."""
    trained = {id(x) for optimizer in optimizers for group in optimizer.param_groups for x in group["params"]}
    names = [name for name, x in model.named_parameters() if x.requires_grad and id(x) not in trained]
    if names:
        rank_zero_warn(
            f"in no optimizer, so they will not be trained: {', '.join(names)}. Make these modules in make_policy, "
            "whose parameters are trained, return their optimizer from configure_optimizers (another one is not in "
            "checkpoints), or freeze them by requires_grad_(False)"
        )


def check_memory(model: Any, option: str, num_steps: int) -> None:
    """Check that a memory, whose size in GiB is an option, has room for observations and two numbers of each step."""
    dtype = next(model.policy.parameters()).dtype
    leaves = space_leaves(model.observation_space).values()
    sizes = [math.prod(x.shape or ()) * observation_dtype(x, dtype).itemsize for x in leaves]
    bytes_ = sum(sizes) + 2 * (8 if dtype == torch.float64 else 4)
    needed = num_steps * bytes_ / 2**30
    expected = f"at least {needed:.3g}, for {num_steps} steps of {bytes_} bytes"
    check(needed <= model.options[option], option, model.options[option], expected)


def check_trainer(model: Any, trainer: Trainer, rollout_shape: tuple[int, int] | None) -> None:
    """Check that a Trainer can train an algorithm on rollouts of shape `(T, B)` per rank; None: unknown shape."""
    refuse_callbacks(trainer)
    refuse_automatic_optimization(trainer, model)
    check_callbacks(trainer, model)
    # An interval of time is no attribute of the Trainer.
    epochs, interval = trainer.check_val_every_n_epoch, getattr(trainer, "val_check_interval", None)
    check(epochs is None or epochs >= 1, "check_val_every_n_epoch", epochs, "an integer of at least 1, or None")
    positive = not isinstance(interval, int | float) or interval > 0
    check(positive, "val_check_interval", interval, "an integer of at least 1, or a fraction of an epoch")
    # XLA would cast the policy of the learner, but not the copy that acts.
    on_xla = "xla" in (model.device.type, training_device(trainer).type)
    precisions = ("32-true",) if on_xla else ("32-true", "16-mixed", "bf16-mixed", "bf16-true", "64-true")
    reason = ": in float16, the squares that Adam averages become 0" if trainer.precision == "16-true" else ""
    check(trainer.precision in precisions, "precision", trainer.precision, f"one of {', '.join(precisions)}{reason}")
    coarse = trainer.precision == "bf16-true" and model.options["normalization.values"] == "popart"
    expected = "null, running_std or precision bf16-mixed: rounding of bfloat16 weights would change the values"
    check(not coarse, "normalization.values", "popart", expected)
    dtype = next(model.policy.parameters()).dtype
    check(dtype != torch.float16, "model", dtype, "parameters in float32; half precision is an option of the Trainer")
    check_modes_agree(model.policy)
    if (memory := getattr(model.policy, "memory", None)) is not None:
        expected = "None on XLA, which would compile for every way in which episodes can end in a rollout"
        check(not on_xla, "policy.memory", model.options["policy.memory"], expected)
        if rollout_shape is not None:
            memory.num_sequences(rollout_shape)
    shown = not model.options["debug.histograms"] or bool(histogram_loggers(trainer.loggers))
    check(shown, "debug.histograms", True, "false, or a TensorBoardLogger to show them")

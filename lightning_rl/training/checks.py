"""Checks of options, tuners and strategies before a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.strategies import (
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    Strategy,
    StrategyRegistry,
)
from lightning.pytorch.strategies.xla import XLAStrategy

from lightning_rl.policies.networks import network_to_plain_data
from lightning_rl.policies.recurrent import MemoryOptions
from lightning_rl.spaces import space_to_dict
from lightning_rl.training.optimizers import optimizer_spec, scheduler_spec
from lightning_rl.training.parameter_groups import group_options
from lightning_rl.training.schedules import parse_schedule
from lightning_rl.validation import (
    ConfigurationError,
    check,
    check_bool,
    check_names,
    check_number,
    is_int,
    is_list,
    is_one_of,
    to_plain_data,
)


def plain_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return all options of an algorithm as plain data, which checkpoints and logs can hold.

    Spaces and classes become their descriptions.

    Raises:
        ConfigurationError: One of those that every algorithm has is out of range, or any of them is no plain data.
    """
    plain: dict[str, Any] = {name: space_to_dict(given[name], name) for name in ("observation_space", "action_space")}
    if is_list(given["hidden_sizes"]):
        plain["hidden_sizes"] = list(given["hidden_sizes"])
    # First of all: an array, say, cannot be compared with what an option may be.
    plain |= {name: to_plain_data(name, x) for name, x in {**given, **plain}.items() if name not in _CLASSES}
    _check({**given, **plain})
    for name in ("optimizer", "critic_optimizer"):
        if given[name] is not None:
            plain[name] = optimizer_spec(name, given[name])
    if given["parameter_groups"] is not None:
        plain["parameter_groups"] = group_options(given["parameter_groups"])
    if given["lr_scheduler"] is not None:
        plain["lr_scheduler"] = scheduler_spec(given["lr_scheduler"])
    if not isinstance(given["network"], str):
        plain["network"] = network_to_plain_data(given["network"])
    return {name: to_plain_data(name, value) for name, value in {**given, **plain}.items()}


_CLASSES = ("optimizer", "critic_optimizer", "lr_scheduler", "network", "parameter_groups")
"""Options that may have classes in them."""


def _check_alone(given: Mapping[str, Any], name: str, varies: bool) -> None:
    """Refuse two options that would both set the learning rate."""
    for other in ("anneal_learning_rate", "lr_scheduler"):
        check(not varies or given[other] in (None, False), name, given[name], f"a number, since {other} is given")


def _check_normalizers(given: Mapping[str, Any]) -> None:
    observations, rewards = given["normalize_observations"], given["normalize_rewards"]
    if not isinstance(observations, dict):  # whose entries `make_normalizer` checks
        check(isinstance(observations, bool), "normalize_observations", observations, "true or false, or a dict")
    known = isinstance(rewards, bool) or is_one_of(rewards, ("return_std", "reward_std"))
    check(known, "normalize_rewards", rewards, "true or false, return_std or reward_std")
    if given["normalized_reward_clip"] is not None:
        check_number("normalized_reward_clip", given["normalized_reward_clip"], above=0)


def _check(given: Mapping[str, Any]) -> None:
    for name in ("anneal_learning_rate", "check_numerics", "recompute_values", "histograms"):
        check_bool(name, given[name])
    MemoryOptions.parse(given["memory"])
    _check_normalizers(given)
    for name in ("policy_l2", "value_l2", "shared_l2"):
        check_number(name, given[name], at_least=0)
    for name, choices in (
        ("on_truncation", ("bootstrap", "terminal")),
        ("advantage_estimator", ("gae", "monte_carlo")),
        ("value_target", ("td_lambda", "empirical")),
        ("update_normalizers", ("after", "before")),
    ):
        check(is_one_of(given[name], choices), name, given[name], " or ".join(choices))
    if given["shared_encoder"] is not None:
        check_bool("shared_encoder", given["shared_encoder"])
    for name in ("learning_rate", "critic_learning_rate"):
        if given[name] is not None or name == "learning_rate":
            schedule = parse_schedule(name, given[name], above=0)
            check(schedule.at(0, None) > 0, name, given[name], "a rate that begins above 0")
            _check_alone(given, name, schedule.varies)
    check_number("gamma", given["gamma"], at_least=0, at_most=1)
    skipped = given["max_skipped_updates"]
    check(is_int(skipped) and skipped >= 0, "max_skipped_updates", skipped, "an integer of at least 0")
    for name in ("max_grad_norm", "max_grad_value"):
        if given[name] is not None:
            check_number(name, given[name], above=0)
    if given["lr_scheduler"] is not None:
        check(not given["anneal_learning_rate"], "anneal_learning_rate", True, "False, since lr_scheduler is given")
    sizes, paths = given["hidden_sizes"], given["critic_only"]
    check(is_list(sizes), "hidden_sizes", sizes, "a list of integers of at least 1")
    if paths is not None:
        check_names("critic_only", paths, "a list of paths")


_REASONS = {
    LearningRateFinder: (
        "it picks a rate by how fast a loss falls, and the loss of a policy gradient does not measure the policy; it "
        "would also train on while the rate grows: expected runs compared by their return, as in examples/tune.py, or "
        "adaptive_learning_rate"
    ),
    BatchSizeFinder: (
        "a batch is a rollout, whose size is part of the algorithm, not whatever fits into memory: expected num_envs "
        "and rollout_length as the task needs them, and more minibatches where memory is short"
    ),
}


def refuse_tuners(trainer: Trainer) -> None:
    """Raise if a Trainer has a callback that looks for a learning rate or a batch size; the Tuner adds them.

    Raises:
        ConfigurationError: It has; says why that cannot work, and what does.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for kind, reason in _REASONS.items():
            if isinstance(callback, kind):
                raise ConfigurationError(f"trainer.callbacks: {kind.__name__} cannot be used: {reason}")


def refuse_automatic_optimization(trainer: Trainer) -> None:
    """Raise if a Trainer is to clip or add up gradients, which it does in automatic optimisation alone.

    Lightning's own error tells to switch to that.

    Raises:
        ConfigurationError: It is; says which option of the model does so.
    """
    clip, added_up = trainer.gradient_clip_val, trainer.accumulate_grad_batches
    check(not clip, "trainer.gradient_clip_val", clip, "None; set max_grad_norm or max_grad_value of the model instead")
    expected = "1, since a batch is a rollout; lower num_minibatches of the model for gradients of more steps"
    check(added_up == 1, "trainer.accumulate_grad_batches", added_up, expected)


# Their parameters are whole only inside the forward pass of `training_step`, but acting needs them outside of it.
_SHARDED = (FSDPStrategy, ModelParallelStrategy, DeepSpeedStrategy)


def check_strategy(strategy: str | Strategy) -> None:
    """Refuse strategies that divide the parameters of one network among devices.

    Args:
        strategy: As the Trainer takes it, or as it has it.

    Raises:
        ConfigurationError: It is of FSDP, model parallelism or DeepSpeed, or for several XLA devices.
    """
    if isinstance(strategy, Strategy):
        kind = type(strategy)
        value = kind.__name__
    else:
        # Lightning has no name for model parallelism, but an error of its own would not say what to use.
        named = {"model_parallel": ModelParallelStrategy} | {k: v["strategy"] for k, v in StrategyRegistry.items()}
        kind, value = named.get(strategy, Strategy), strategy
    if issubclass(kind, _SHARDED):
        raise ConfigurationError(
            f"strategy={value!r} divides the parameters among devices, and the policy needs them whole to act: "
            "expected 'ddp', which has a copy on each device; networks of on-policy learning are small enough"
        )
    if issubclass(kind, XLAStrategy):
        raise ConfigurationError(
            f"strategy={value!r} averages gradients after each device has clipped its own: expected one XLA device, "
            "devices=1 and strategy='single_xla'"
        )

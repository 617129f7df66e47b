"""Which of Lightning's strategies can train a policy that acts between its updates."""

from __future__ import annotations

from lightning.pytorch.strategies import (
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    Strategy,
    StrategyRegistry,
)
from lightning.pytorch.strategies.xla import XLAStrategy

from lightning_rl.validation import ConfigurationError

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

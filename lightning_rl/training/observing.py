"""Callbacks that report on updates: histograms, and the share of actions that the environment clips."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from gymnasium import spaces
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_warn  # type: ignore[attr-defined]
from torch import Tensor

from lightning_rl.nested import leaves, map_leaves, space_leaves
from lightning_rl.policies.sharding import whole
from lightning_rl.rollouts.batch import Batch
from lightning_rl.rollouts.rollout import Rollout
from lightning_rl.training.metrics import log_is_due

_WARNING_THRESHOLD = 0.1
# New policies have a large standard deviation, which shrinks in the first rollouts.
_FIRST_ROLLOUTS = 10


class SaturationCheck(Callback):
    """Logs the share of clipped action components, and warns once if it stays large; for action spaces with a `Box`.

    Actions outside the bounds differ in log-probability but not in effect, so learning from them adds noise.
    """

    def __init__(self) -> None:
        self._warned = False

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:  # noqa: ANN401
        """Record the share; it is logged as `train/action_saturation` with the update."""
        if not hasattr(pl_module.policy, "saturation") or not isinstance(batch, Rollout):
            return
        observations = map_leaves(lambda x: x[:-1], batch.observations)
        share: Tensor | None = pl_module.policy.saturation(observations, batch.actions, batch.valid)
        if share is not None:
            pl_module.steps.note(action_saturation=share)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: Any,  # noqa: ANN401
        outputs: Any,  # noqa: ANN401
        batch: Any,  # noqa: ANN401
        batch_idx: int,
    ) -> None:
        """Warn once if the share exceeds a tenth after the first rollouts."""
        share, number = pl_module.losses.get("action_saturation"), pl_module.policy_version - 1
        if self._warned or share is None or share <= _WARNING_THRESHOLD or number < _FIRST_ROLLOUTS:
            return
        self._warned = True
        leaves_of_space = space_leaves(pl_module.action_space).items()
        parts = [path for path, leaf in leaves_of_space if path and isinstance(leaf, spaces.Box)]
        where = f" for {', '.join(map(repr, parts))}" if parts else ""
        rank_zero_warn(
            f"{share:.0%} of the action components in rollout {number} lie outside the bounds of the space, and the "
            "environment clips them, so that different actions have the same effect: lower initial_log_std, or set "
            f"policy.action_distribution to 'squashed_gaussian' or 'beta'{where}, which need finite bounds. "
            "The share is logged as action_saturation"
        )


class HistogramLogger(Callback):
    """Logs `debug.histograms` of actions, advantages, parameters and gradients, after the first and the last pass."""

    def on_pass_end(self, model: Any, batch: Batch, name: str) -> None:  # noqa: ANN401
        """Log histograms after a pass over a batch, in the group `name`; advantages are shown standardized."""
        if not log_is_due(model.trainer):
            return
        shown = dict(_histograms(model, batch, model.estimator.standardized(batch)))
        for logger in histogram_loggers(model.trainer.loggers):
            for tag, values in shown.items():
                logger.experiment.add_histogram(f"{name}/{tag}", values.detach().cpu(), model.env_steps)


def histogram_loggers(loggers: Sequence[Logger]) -> list[TensorBoardLogger]:
    """Return the loggers that can show histograms."""
    return [logger for logger in loggers if isinstance(logger, TensorBoardLogger)]


def _histograms(model: Any, batch: Batch, advantages: Tensor) -> Iterator[tuple[str, Tensor]]:  # noqa: ANN401
    for path, actions in zip(space_leaves(model.action_space), leaves(batch.actions), strict=True):
        yield "/".join(filter(None, ("actions", path))), actions
    yield "advantages", advantages
    for name, parameter in model.policy.named_parameters():
        yield f"parameters/{name}", whole(parameter)
        if parameter.grad is not None:
            yield f"gradients/{name}", whole(parameter.grad)

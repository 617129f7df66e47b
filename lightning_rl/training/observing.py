"""Callbacks that look at a run: histograms, and actions that the bounds of the environment clip."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from gymnasium import spaces
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_warn  # type: ignore[attr-defined]
from torch import Tensor

from lightning_rl.nested import leaves, map_leaves, space_leaves
from lightning_rl.rollouts.batch import Batch
from lightning_rl.rollouts.rollout import Rollout
from lightning_rl.training.metrics import log_is_due

_MOST_SATURATED = 0.1
# Policies begin wide and narrow down on their own.
_FIRST_ROLLOUTS = 10


class SaturationCheck(Callback):
    """Logs the share of action components that are clipped, and warns once where it stays large.

    Clipped actions do the same, but have different log-probabilities: the policy learns from differences that there
    are not. `OnPolicyAlgorithm` adds it to every Trainer.
    """

    def __init__(self) -> None:
        self._warned = False

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:  # noqa: ANN401
        """Measure the share, which is logged as `train/action_saturation` with the updates from this rollout."""
        if not hasattr(pl_module.policy, "saturation") or not isinstance(batch, Rollout):
            return
        valid, actions = batch.valid, batch.actions
        share: Tensor | None = pl_module.policy.saturation(
            actions if valid is None else map_leaves(lambda x: x[valid], actions)
        )
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
        """Warn once if, after the first rollouts, more than a tenth is clipped."""
        share, number = pl_module.losses.get("action_saturation"), pl_module.policy_version - 1
        if self._warned or share is None or share <= _MOST_SATURATED or number < _FIRST_ROLLOUTS:
            return
        self._warned = True
        leaves_of_space = space_leaves(pl_module.action_space).items()
        parts = [path for path, leaf in leaves_of_space if path and isinstance(leaf, spaces.Box)]
        where = f" for {', '.join(map(repr, parts))}" if parts else ""
        rank_zero_warn(
            f"{share:.0%} of the action components in rollout {number} lie outside the bounds of the space and "
            "were clipped by the environment, so that different actions do the same: lower initial_log_std, or set "
            f"policy.action_distribution to 'squashed_gaussian' or 'beta'{where}, which need finite bounds. "
            "train/action_saturation has the share"
        )


class HistogramLogger(Callback):
    """Logs histograms of actions, advantages, parameters and gradients; the option `histograms` adds it.

    Of a rollout that is logged, at the end of its first and last pass, or of its only one.
    """

    def on_pass_end(self, model: Any, batch: Batch, name: str) -> None:  # noqa: ANN401
        """Log everything as it is after a pass.

        Args:
            model: The algorithm.
            batch: What was learned from; its advantages are shown standardized.
            name: The group that the histograms are shown in.
        """
        if not log_is_due(model.trainer):
            return
        shown = dict(_histograms(model, batch, model.estimator.standardized(batch)))
        for logger in histogram_loggers(model.trainer.loggers):
            for tag, values in shown.items():
                logger.experiment.add_histogram(f"{name}/{tag}", values.detach().cpu(), model.env_steps)


def histogram_loggers(loggers: Sequence[Logger]) -> list[TensorBoardLogger]:
    """Return those of Lightning's loggers that can show a histogram."""
    return [logger for logger in loggers if isinstance(logger, TensorBoardLogger)]


def _histograms(model: Any, batch: Batch, advantages: Tensor) -> Iterator[tuple[str, Tensor]]:  # noqa: ANN401
    """Yield names and values: each part of the actions, advantages, parameters, and their gradients as they are now."""
    for path, actions in zip(space_leaves(model.action_space), leaves(batch.actions), strict=True):
        yield "/".join(filter(None, ("actions", path))), actions
    yield "advantages", advantages
    for name, parameter in model.policy.named_parameters():
        yield f"parameters/{name}", parameter
        if parameter.grad is not None:
            yield f"gradients/{name}", parameter.grad

"""What a run logs: episodes, diagnostics and time, against the clock of environment steps."""

from __future__ import annotations

import math
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor

from lightning_rl.algorithms.histograms import histograms, that_show_histograms
from lightning_rl.algorithms.log_window import LogWindow
from lightning_rl.algorithms.updates import Updates
from lightning_rl.distributed import exact_dtype
from lightning_rl.metrics import EpisodeStatistics
from lightning_rl.rollouts.batch import Batch
from lightning_rl.rollouts.episode import Episode
from lightning_rl.rollouts.rollout import Rollout

# Of this there is one value for each rollout.
_FOR_EACH = "time/update_seconds"
_IN_PROGRESS_BAR = ("rollout/episode_return", "time/steps_per_second")


class Reports(Updates):
    """Evaluation steps and logging, the same for every algorithm."""

    def __init__(self) -> None:
        super().__init__()
        self.log_window, self.eval_episodes = LogWindow(), EpisodeStatistics()
        self.histograms = False
        self._logs_steps = self._logs_epochs = False
        self._clock_will_move = False

    def log(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - those of Lightning
        """Log a value as `LightningModule.log` does, against environment steps."""
        super().log(*args, **kwargs)
        if self.trainer.training:
            self._logs_steps, self._logs_epochs = True, self._logs_epochs or bool(kwargs.get("on_epoch"))
            if not self._clock_will_move:
                self._log_clock()

    def begin_step(self) -> None:
        """Take note that the clock will move: values logged from now on belong to the steps after that."""
        self._clock_will_move = True

    def end_step(self) -> None:
        """Set `step`, which names checkpoints, and which loggers take as their x-axis, to the environment steps."""
        self._clock_will_move = False
        # An integer of 64 bits, which Lightning casts to one of 32: larger numbers then wrap, and names still differ.
        self.trainer.callback_metrics["step"] = torch.tensor(self.env_steps)
        # Values that were logged earlier in the epoch come with the `step` of then, which takes precedence.
        if self._logs_steps or int(self.trainer.callback_metrics["step"]) != self.env_steps:
            self._log_clock()
        self._logs_steps = False

    def end_epoch(self) -> None:
        """Set the `step` of values that are logged once per epoch."""
        if self._logs_epochs:
            self._log_clock()
        self._logs_epochs = False

    def _log_clock(self) -> None:
        super().log("step", self._clock, reduce_fx="max")

    def validation_step(self, episodes: list[Episode], batch_idx: int) -> None:
        """Take in played episodes."""
        self.eval_episodes.update([e.episode_return for e in episodes], [e.length for e in episodes])

    def test_step(self, episodes: list[Episode], batch_idx: int) -> None:
        """Take in played episodes."""
        self.validation_step(episodes, batch_idx)

    def predict_step(self, episodes: list[Episode], batch_idx: int) -> list[Episode]:
        """Return the played episodes with observations, actions and rewards."""
        return episodes

    def on_validation_epoch_end(self) -> None:
        """Log returns and lengths."""
        self._log_evaluation("val")
        if self.trainer.state.fn == "fit":
            self._show_unlogged()

    def on_test_epoch_end(self) -> None:
        """Log returns and lengths."""
        self._log_evaluation("test")

    def on_train_epoch_end(self) -> None:
        """Let callbacks see what has not been logged yet."""
        self._show_unlogged()

    def _show_unlogged(self) -> None:
        """Let callbacks that monitor a value, as `EarlyStopping`, see it before it is logged; a collective call."""
        if not self.log_window.is_empty:
            known = self.log_window.compute()
            self.trainer.callback_metrics.update({name: torch.tensor(value) for name, value in known.items()})

    def on_train_end(self) -> None:
        """Log what happened since the last log, where it was not known that the rollout would be the last one.

        What a signal or an exception ends does not come here: it has not ended for the run that goes on from it.
        """
        if self.trainer.log_every_n_steps and not self.log_window.is_empty:  # type: ignore[attr-defined]
            self._log_training()

    def _log_evaluation(self, stage: str) -> None:
        values = {f"{stage}/{name}": value for name, value in self.eval_episodes.compute().items()}
        self.eval_episodes.reset()
        self.log_dict(self._to_log(values), sync_dist=True)
        self.log("step", self._clock, reduce_fx="max", sync_dist=True)

    @property
    def _clock(self) -> Tensor:
        # Loggers take the value of "step" as their x-axis. float64: float32 loses steps above 2^24.
        return torch.tensor(self.env_steps, dtype=exact_dtype(self._log_device), device=self._log_device)

    @property
    def _log_device(self) -> torch.device:
        # Lightning sums up what it logs there: on XLA in the graph of the next update, compiled anew for each variant.
        return torch.device("cpu") if self.device.type == "xla" else self.device

    def _to_log(self, values: dict[str, float]) -> dict[str, Tensor]:
        return {name: torch.tensor(value, device=self._log_device) for name, value in values.items()}

    def _log_rollout(self, rollout: Rollout, means: dict[str, float], update_seconds: float) -> None:
        """Take in one rollout; every `log_every_n_steps` of them, log what happened since, over all ranks."""
        scalars = {f"train/{name}": [value] if math.isfinite(value) else [] for name, value in means.items()}
        scalars |= {f"rollout/{key}": values for key, values in rollout.infos.items()}
        scalars |= {"time/rollout_seconds": [rollout.seconds], _FOR_EACH: [update_seconds]}
        scalars |= {f"time/{part}_seconds": [spent] for part, spent in rollout.parts_of_seconds.items()}
        self.log_window.add(rollout.episodes, scalars, self._counts_of(rollout))
        over = self._planned_env_steps is not None and self.env_steps >= self._planned_env_steps
        if self._log_is_due or (over and self.trainer.log_every_n_steps):  # type: ignore[attr-defined]
            self._log_training()

    def _counts_of(self, rollout: Rollout) -> dict[str, int]:
        """Return the counts that a rollout has, the same ones on every rank."""
        counts = {} if rollout.failures is None else {"rollout/env_restarts": len(rollout.failures)}
        if rollout.actor is not None:
            # Its updates are done: the version is one further.
            lag = self.policy_version - 1 - rollout.policy_version
            counts |= {"rollout/dropped": rollout.dropped, "train/policy_lag_max": lag}
        if rollout.actors_lost is not None:
            counts["rollout/actors_lost"] = rollout.actors_lost
        return counts

    @property
    def _log_is_due(self) -> bool:
        """Whether the rollout that is being learned from is one of every `log_every_n_steps`."""
        interval: int = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        return bool(interval) and (self.trainer.fit_loop.total_batch_idx + 1) % interval == 0

    def log_histograms(self, batch: Batch, name: str) -> None:
        """Log histograms as they are after an update, if that is wanted and the rollout is logged.

        Args:
            batch: What was learned from; its advantages are shown standardised.
            name: Which update it was: the group that the histograms are shown in.
        """
        if self.histograms and self._log_is_due:
            model: Any = self  # the parts that it logs are those of the subclass
            advantages = self.normalized_advantages(batch)
            for logger in that_show_histograms(self.trainer.loggers):
                for tag, values in histograms(batch, advantages, model.action_space, model.policy):
                    logger.experiment.add_histogram(f"{name}/{tag}", values.detach().cpu(), self.env_steps)

    def _log_training(self) -> None:
        window = self.log_window
        logged = window.compute()
        seconds = (logged["time/rollout_seconds"] + logged[_FOR_EACH]) * window.means.count(_FOR_EACH)
        logged["time/steps_per_second"] = (self.env_steps - window.since) / seconds
        if self.frames != self.env_steps:
            logged["time/frames"] = float(self.frames)
        self._log_reduced(logged)
        window.begin(self.env_steps)

    def _log_reduced(self, values: dict[str, float]) -> None:
        """Log scalars that are the same on every rank, as `log` does but for a hundredth of what it costs.

        One call of `log` takes Lightning as long as a gradient step of a small network, since it looks through the
        metadata of each value for tensors to move. What it does besides, to reduce over steps and ranks, is done.
        """
        trainer, tensors = self.trainer, {name: torch.tensor(value) for name, value in values.items()}
        trainer.callback_metrics.update(tensors)
        trainer.logged_metrics.update(tensors)
        trainer.progress_bar_metrics.update({name: values[name] for name in _IN_PROGRESS_BAR if name in values})
        for logger in trainer.loggers:
            logger.log_metrics(values, step=self.env_steps)


class StepMetric(Callback):
    """Keeps the metric `step` at the environment steps; `OnPolicyAlgorithm` adds it to every Trainer.

    A callback, because callbacks may log after the module, and `ModelCheckpoint` names files before its last hook.
    """

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:  # noqa: ANN401
        """Begin a rollout's updates."""
        pl_module.begin_step()

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:  # noqa: ANN401
        """Set `step` before checkpoints are saved and loggers are written."""
        pl_module.end_step()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:  # noqa: ANN401
        """Set `step` before loggers are written."""
        pl_module.end_epoch()

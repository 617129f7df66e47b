"""Logged values: episode statistics, means of the updates, and times, against environment steps."""

from __future__ import annotations

import copy
import functools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_rl.distributed import all_reduce, exact_dtype, world_size
from lightning_rl.rollouts.rollout import EpisodeSummary, Rollout

_CPU = torch.device("cpu")
_LARGEST = ("train/policy_lag_max",)
"""Counts of which the largest is logged, not the sum."""


def _add_up(total: float, values: Iterable[float]) -> float:
    """Add values one by one, so that rounding does not depend on how they are grouped."""
    return functools.reduce(operator.add, map(float, values), total)


def _over_ranks(values: Sequence[float], operation: Literal["sum", "max"], device: torch.device) -> list[float]:
    if world_size() == 1 or not values:
        return [*values]
    return all_reduce(torch.tensor(values, dtype=exact_dtype(device), device=device), operation).tolist()


class EpisodeStatistics:
    """Mean, minimum and maximum of returns and lengths of finished episodes, over all ranks."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.sums = [0.0] * 3  # of ones, returns and lengths
        self.maxima = [-math.inf] * 4  # of returns, lengths, and both with the opposite sign

    def update(self, returns: Sequence[float], lengths: Sequence[int]) -> None:
        if returns:
            columns = ([1.0] * len(returns), returns, lengths)
            self.sums = [_add_up(total, values) for total, values in zip(self.sums, columns, strict=True)]
            largest = (max(returns), max(lengths), -min(returns), -min(lengths))
            self.maxima = [max(old, float(new)) for old, new in zip(self.maxima, largest, strict=True)]

    def compute(self, device: torch.device = _CPU) -> dict[str, float]:
        """Return `episode_return`, `episode_length`, both with `_min` and `_max`, and `episodes`; {} without any.

        A collective call with tensors on `device`.
        """
        count, *sums = _over_ranks(self.sums, "sum", device)
        largest = _over_ranks(self.maxima, "max", device)
        if not count:
            return {}
        result = {"episodes": count}
        for k, name in enumerate(("episode_return", "episode_length")):
            result |= {name: sums[k] / count, f"{name}_min": -largest[k + 2], f"{name}_max": largest[k]}
        return result


class LogWindow:
    """Statistics of all rollouts since the last log, which began at `since` environment steps, over all ranks.

    `means` has sum and number of the values of each scalar, `counts` sums and maxima, both by logged name.
    """

    def __init__(self) -> None:
        self.begin(0)

    def begin(self, env_steps: int) -> None:
        """Start an empty window at an environment step."""
        self.since, self.num_rollouts = env_steps, 0
        self.episodes = EpisodeStatistics()
        self.means: dict[str, list[float]] = {}
        self.counts: dict[str, float] = {}

    @property
    def is_empty(self) -> bool:
        """Whether the window has no rollout; equal on all ranks."""
        return not self.num_rollouts

    def add(self, episodes: EpisodeSummary, scalars: Mapping[str, Sequence[float]], counts: Mapping[str, int]) -> None:
        """Add episodes, any number of values for each mean, and counts of this rank; all ranks use the same names."""
        self.num_rollouts += 1
        self.episodes.update(episodes.returns, episodes.lengths)
        for name, values in scalars.items():
            total, count = self.means.get(name, (0.0, 0))
            self.means[name] = [_add_up(total, values), count + len(values)]
        for name, value in counts.items():
            old = self.counts.get(name, 0)
            self.counts[name] = max(old, value) if name in _LARGEST else old + value

    def compute(self, device: torch.device = _CPU) -> dict[str, float]:
        """Return means, episode statistics and counts by logged name; a collective call with tensors on `device`."""
        names, counted = sorted(self.means), sorted(self.counts)  # ranks add their vectors entry by entry
        sums = [x for name in names for x in self.means[name]] + [self.counts[name] for name in counted]
        sums = _over_ranks(sums, "sum", device)
        means = {name: sums[2 * k] / sums[2 * k + 1] for k, name in enumerate(names) if sums[2 * k + 1]}
        counts = dict(zip(counted, map(float, sums[2 * len(names) :]), strict=True))
        largest = [name for name in counted if name in _LARGEST]
        counts |= zip(largest, _over_ranks([self.counts[name] for name in largest], "max", device), strict=True)
        return means | {f"rollout/{name}": value for name, value in self.episodes.compute(device).items()} | counts

    def snapshot(self) -> dict[str, Any]:
        """Return the statistics of this rank as plain values."""
        own = {"since": self.since, "num_rollouts": self.num_rollouts, "means": self.means, "counts": self.counts}
        return copy.deepcopy(own | {"episodes": vars(self.episodes)})

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        given = copy.deepcopy({**snapshot})
        vars(self.episodes).update(given.pop("episodes"))
        vars(self).update(given)


_IN_PROGRESS_BAR = ("rollout/episode_return", "time/steps_per_second")


class RolloutMetrics(LogWindow):
    """Logs rollouts and their updates against environment steps; names of values of updates begin with `prefix`."""

    def __init__(self) -> None:
        super().__init__()
        self.prefix = "train"
        self.eval_episodes = EpisodeStatistics()
        self._logs_steps = self._logs_epochs = False
        self._clock_will_move = False

    # ------------------------------------------------------------------ rollouts

    def add_rollout(self, model: Any, rollout: Rollout, means: Mapping[str, float], update_seconds: float) -> None:  # noqa: ANN401
        """Add a rollout with the means of its updates; log the window after every `log_every_n_steps` rollouts."""
        clock, interval = model.clock, model.trainer.log_every_n_steps
        scalars = {f"{self.prefix}/{name}": [value] if math.isfinite(value) else [] for name, value in means.items()}
        scalars |= {f"rollout/{key}": values for key, values in rollout.infos.items()}
        scalars |= {"time/rollout_seconds": [rollout.seconds], "time/update_seconds": [update_seconds]}
        scalars |= {f"time/{part}_seconds": [spent] for part, spent in rollout.parts_of_seconds.items()}
        self.add(rollout.episodes, scalars, _counts_of(rollout, clock.policy_version))
        over = clock.planned_env_steps is not None and clock.env_steps >= clock.planned_env_steps
        if log_is_due(model.trainer) or (over and interval):
            self._log(model)

    def show_unlogged(self, trainer: Trainer) -> None:
        """Show unlogged values to callbacks that monitor them, such as `EarlyStopping`; a collective call."""
        if not self.is_empty:
            values = self.compute(_log_device(trainer.lightning_module))
            trainer.callback_metrics.update({name: torch.tensor(value) for name, value in values.items()})

    def log_rest(self, model: Any) -> None:  # noqa: ANN401
        """Log an unfinished window at the end of a run."""
        if model.trainer.log_every_n_steps and not self.is_empty:
            self._log(model)

    def _log(self, model: Any) -> None:  # noqa: ANN401
        clock, logged = model.clock, self.compute(_log_device(model))
        seconds = (logged["time/rollout_seconds"] + logged["time/update_seconds"]) * self.num_rollouts
        logged["time/steps_per_second"] = (clock.env_steps - self.since) / seconds
        if clock.frames != clock.env_steps:
            logged["time/frames"] = float(clock.frames)
        _log_reduced(model.trainer, logged, clock.env_steps)
        self.begin(clock.env_steps)

    # ------------------------------------------------------------------ evaluation

    def log_evaluation(self, model: Any, stage: str) -> None:  # noqa: ANN401
        device = _log_device(model)
        values = {f"{stage}/{name}": value for name, value in self.eval_episodes.compute(device).items()}
        self.eval_episodes.reset()
        model.log_dict({name: torch.tensor(value, device=device) for name, value in values.items()})
        model.log("step", _clock_of(model), reduce_fx="max")

    # ------------------------------------------------------------------ the x-axis

    def logged(self, model: LightningModule, on_epoch: bool) -> None:
        """Log `step` with a value that a user logs, unless the clock is about to advance."""
        self._logs_steps, self._logs_epochs = True, self._logs_epochs or on_epoch
        if not self._clock_will_move:
            _log_clock(model)

    def begin_step(self) -> None:
        """Note that the clock will advance, so that values logged until `end_step` belong to the step after it."""
        self._clock_will_move = True

    def end_step(self, model: Any) -> None:  # noqa: ANN401
        """Set the metric `step`, the x-axis of loggers and part of checkpoint names, to the environment steps."""
        self._clock_will_move = False
        # An int64, which Lightning casts to int32: larger numbers wrap, and names still differ.
        model.trainer.callback_metrics["step"] = torch.tensor(model.env_steps)
        # Lightning rebuilds `callback_metrics` at each access, with an older `step` if one was logged in this epoch.
        if self._logs_steps or int(model.trainer.callback_metrics["step"]) != model.env_steps:
            _log_clock(model)
        self._logs_steps = False

    def end_epoch(self, model: LightningModule) -> None:
        """Set `step` for values that are logged once per epoch."""
        if self._logs_epochs:
            _log_clock(model)
        self._logs_epochs = False


def log_is_due(trainer: Trainer) -> bool:
    """Whether values are logged after the current rollout, by `log_every_n_steps`."""
    interval: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
    return bool(interval) and (trainer.fit_loop.total_batch_idx + 1) % interval == 0


def _counts_of(rollout: Rollout, policy_version: int) -> dict[str, int]:
    """Return the counts of a rollout, with the same names on all ranks."""
    counts = {} if rollout.failures is None else {"rollout/env_restarts": len(rollout.failures)}
    if rollout.actor is not None:
        # The version includes the update from this rollout.
        lag = policy_version - 1 - rollout.policy_version
        counts |= {"rollout/dropped": rollout.dropped, "train/policy_lag_max": lag}
    if rollout.actors_lost is not None:
        counts["rollout/actors_lost"] = rollout.actors_lost
    return counts


def _log_reduced(trainer: Trainer, values: Mapping[str, float], env_steps: int) -> None:
    """Log scalars already reduced over steps and ranks, a hundred times as fast as `LightningModule.log`."""
    tensors = {name: torch.tensor(value) for name, value in values.items()}
    trainer.callback_metrics.update(tensors)
    trainer.logged_metrics.update(tensors)
    trainer.progress_bar_metrics.update({name: values[name] for name in _IN_PROGRESS_BAR if name in values})
    for logger in trainer.loggers:
        logger.log_metrics({**values}, step=env_steps)


def _log_device(model: LightningModule) -> torch.device:
    # Lightning adds up logged values on this device. On XLA the sums would change the graph of the next update.
    return torch.device("cpu") if model.device.type == "xla" else model.device


def _clock_of(model: Any) -> Tensor:  # noqa: ANN401
    # In float64, because float32 is inexact above 2^24.
    device = _log_device(model)
    return torch.tensor(model.env_steps, dtype=exact_dtype(device), device=device)


def _log_clock(model: LightningModule) -> None:
    # Not the algorithm's own `log`, which would call this function.
    LightningModule.log(model, "step", _clock_of(model), reduce_fx="max")


class StepMetric(Callback):
    """Keeps the metric `step` equal to the environment steps; `OnPolicyAlgorithm` adds it to every Trainer.

    Callbacks log after the module, and `ModelCheckpoint` uses `step` before the module's last hook.
    """

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:  # noqa: ANN401
        pl_module.metrics.begin_step()

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:  # noqa: ANN401
        """Set `step` before checkpoints are saved and loggers are written."""
        pl_module.metrics.end_step(pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:  # noqa: ANN401
        pl_module.metrics.end_epoch(pl_module)

"""Logged values: episode statistics, means of the updates, and times, against environment steps."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_rl.distributed import exact_dtype, gather_tensors, world_size
from lightning_rl.policies.normalization import ExactStates
from lightning_rl.rollouts.rollout import EpisodeSummary, Rollout


def _add_in_order(sums: Tensor, values: Sequence[Sequence[float]]) -> Tensor:
    """Add several values to each sum, one by one, so that rounding does not depend on the number of calls."""
    return sums.new_tensor([functools.reduce(operator.add, v, s) for s, v in zip(sums.tolist(), values, strict=True)])


def _gather(x: Tensor, group: None = None) -> list[Tensor]:
    return [*gather_tensors(x)]


def _has_ranks() -> bool:
    return world_size() > 1


class _Window(ExactStates, Metric):
    """A metric whose state can be part of a checkpoint, and stays in float64."""

    full_state_update = False
    stays_off = ("xla",)  # which would compile for each number of values

    def __init__(self) -> None:
        super().__init__(dist_sync_fn=_gather, distributed_available_fn=_has_ranks)

    def snapshot(self) -> dict[str, Any]:
        states = {name: getattr(self, name).cpu().clone() for name in self.metric_state}
        return {"states": states, "update_called": self.update_called}

    def restore(self, snapshot: dict[str, Any]) -> None:
        for name, value in snapshot["states"].items():
            setattr(self, name, value.to(getattr(self, name).device))
        self._update_count = int(snapshot["update_called"])


class EpisodeStatistics(_Window):
    """Mean, minimum and maximum of returns and lengths of finished episodes, over all ranks."""

    count: Tensor
    sums: Tensor
    minima: Tensor
    maxima: Tensor

    def __init__(self) -> None:
        super().__init__()
        # The two entries of each vector are return and length.
        self.add_state("count", torch.zeros((), dtype=torch.float64), "sum")
        self.add_state("sums", torch.zeros(2, dtype=torch.float64), "sum")
        self.add_state("minima", torch.full((2,), torch.inf, dtype=torch.float64), "min")
        self.add_state("maxima", torch.full((2,), -torch.inf, dtype=torch.float64), "max")

    def update(self, returns: Sequence[float], lengths: Sequence[int]) -> None:
        if not returns:
            return
        values = torch.tensor([returns, lengths], dtype=self.sums.dtype, device=self.sums.device)
        # Not in place, because `Trainer.validate` leaves inference tensors.
        self.count = self.count + values.shape[1]
        self.sums = _add_in_order(self.sums, (returns, lengths))
        self.minima = torch.minimum(self.minima, values.amin(1))
        self.maxima = torch.maximum(self.maxima, values.amax(1))

    def compute(self) -> dict[str, float]:
        """Return `episode_return`, `episode_length`, both with `_min` and `_max`, and `episodes`; {} without any."""
        count = float(self.count)
        if not count:
            return {}
        result = {}
        for row, name in enumerate(("episode_return", "episode_length")):
            result[name] = float(self.sums[row]) / count
            result[f"{name}_min"] = float(self.minima[row])
            result[f"{name}_max"] = float(self.maxima[row])
        return result | {"episodes": count}


class Total(_Window):
    """A sum over all ranks."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros((), dtype=torch.float64), "sum")

    def update(self, value: float) -> None:
        self.total = self.total + value

    def compute(self) -> float:
        return float(self.total)


class Largest(_Window):
    """Maximum of non-negative numbers over all ranks."""

    largest: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("largest", torch.zeros((), dtype=torch.float64), "max")

    def update(self, value: float) -> None:
        self.largest = self.largest.clamp(min=value)

    def compute(self) -> float:
        return float(self.largest)


class ScalarMeans(_Window):
    """Means of named scalars over all ranks. Names are sorted, because ranks add their vectors entry by entry.

    Every rank must report the same names until `compute`, if necessary without values; `update` adds new names.
    """

    sums: Tensor
    counts: Tensor

    def __init__(self, names: Sequence[str] = ()) -> None:
        super().__init__()
        self.names = list(names)
        self.add_state("sums", torch.zeros(len(names), dtype=torch.float64), "sum")
        self.add_state("counts", torch.zeros(len(names), dtype=torch.float64), "sum")

    def update(self, values: Mapping[str, Sequence[float]]) -> None:
        names = sorted({*self.names, *values})
        if names != self.names:
            self._set_names(names)
        reported = [values.get(name, ()) for name in self.names]
        self.sums = _add_in_order(self.sums, reported)
        self.counts = self.counts + self.counts.new_tensor([len(v) for v in reported])

    def _set_names(self, names: list[str]) -> None:
        for state in ("sums", "counts"):
            old: Tensor = getattr(self, state)
            known = dict(zip(self.names, old.tolist(), strict=True))
            self.add_state(state, old.new_zeros(len(names)), "sum")
            setattr(self, state, old.new_tensor([known.get(name, 0.0) for name in names]))
        self.names = names

    def count(self, name: str) -> int:
        return int(self.counts[self.names.index(name)])

    def compute(self) -> dict[str, float]:
        pairs = zip(self.names, self.sums.tolist(), self.counts.tolist(), strict=True)
        return {name: total / count for name, total, count in pairs if count}


_Count: TypeAlias = Largest | Total
_COUNTS: dict[str, type[_Count]] = {
    "rollout/env_restarts": Total,
    "rollout/dropped": Total,
    "rollout/actors_lost": Total,
    "train/policy_lag_max": Largest,
}
# `Metric.update` takes about 50 µs per call, so the metrics are updated once for this many rollouts.
_MAX_PENDING = 32


class LogWindow(nn.Module):
    """Statistics of all rollouts since the last log, which began at `since` environment steps, over all ranks.

    `means` has means of scalars by logged name; `counts` has sums and maxima, created with the first value.
    """

    def __init__(self) -> None:
        super().__init__()
        self.since = 0
        self.episodes, self.means, self.counts = EpisodeStatistics(), ScalarMeans(), nn.ModuleDict()
        self._clear_pending()

    def _clear_pending(self) -> None:
        self._pending_rollouts = 0
        self._pending_episodes = EpisodeSummary([], [])
        self._pending_scalars: dict[str, list[float]] = {}

    @property
    def is_empty(self) -> bool:
        """Whether the window has no rollout; equal on all ranks."""
        return not (self._pending_rollouts or self.means.update_called)

    def begin(self, env_steps: int) -> None:
        """Start an empty window at an environment step."""
        self.since = env_steps
        self._clear_pending()
        for metric in (self.episodes, self.means, *self._counts().values()):
            metric.reset()

    def add(self, episodes: EpisodeSummary, scalars: Mapping[str, Sequence[float]], counts: Mapping[str, int]) -> None:
        """Add episodes, any number of values for each mean, and counts of this rank; all ranks use the same names."""
        self._pending_rollouts += 1
        self._pending_episodes.returns += episodes.returns
        self._pending_episodes.lengths += episodes.lengths
        for name, values in scalars.items():
            self._pending_scalars.setdefault(name, []).extend(values)
        for name, count in counts.items():
            self._count(name).update(count)
        if self._pending_rollouts >= _MAX_PENDING:
            self._flush()

    def compute(self) -> dict[str, float]:
        """Return means, episode statistics and counts by logged name; a collective call."""
        self._flush()
        episodes = {f"rollout/{name}": value for name, value in self.episodes.compute().items()}
        # A run that was resumed without actors has their counts from the checkpoint.
        counts = {name: count.compute() for name, count in self._counts().items() if count.update_called}
        return self.means.compute() | episodes | counts

    def snapshot(self) -> dict[str, Any]:
        self._flush()
        return {
            "since": self.since,
            "episodes": self.episodes.snapshot(),
            "names": [*self.means.names],
            "means": self.means.snapshot() if self.means.names else None,
            "counts": {name: count.snapshot() for name, count in self._counts().items()},
        }

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        self.begin(snapshot["since"])
        self.episodes.restore(snapshot["episodes"])
        self.means = ScalarMeans(snapshot["names"]).to(self.episodes.device)
        if snapshot["means"] is not None:
            self.means.restore(snapshot["means"])
        self.counts.clear()
        for name, count in snapshot["counts"].items():
            self._count(name).restore(count)

    def _flush(self) -> None:
        if self._pending_rollouts:
            self.episodes.update(self._pending_episodes.returns, self._pending_episodes.lengths)
            self.means.update(self._pending_scalars)
            self._clear_pending()

    def _count(self, name: str) -> _Count:
        if name not in self.counts:
            self.counts[name] = _COUNTS[name]().to(self.episodes.device)
        return cast(_Count, self.counts[name])

    def _counts(self) -> dict[str, _Count]:
        return cast(dict[str, _Count], dict(self.counts.items()))


_UPDATE_SECONDS = "time/update_seconds"
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
        scalars |= {"time/rollout_seconds": [rollout.seconds], _UPDATE_SECONDS: [update_seconds]}
        scalars |= {f"time/{part}_seconds": [spent] for part, spent in rollout.parts_of_seconds.items()}
        self.add(rollout.episodes, scalars, _counts_of(rollout, clock.policy_version))
        over = clock.planned_env_steps is not None and clock.env_steps >= clock.planned_env_steps
        if log_is_due(model.trainer) or (over and interval):
            self._log(model)

    def show_unlogged(self, trainer: Trainer) -> None:
        """Show unlogged values to callbacks that monitor them, such as `EarlyStopping`; a collective call."""
        if not self.is_empty:
            trainer.callback_metrics.update({name: torch.tensor(value) for name, value in self.compute().items()})

    def log_rest(self, model: Any) -> None:  # noqa: ANN401
        """Log an unfinished window at the end of a run."""
        if model.trainer.log_every_n_steps and not self.is_empty:
            self._log(model)

    def _log(self, model: Any) -> None:  # noqa: ANN401
        clock, logged = model.clock, self.compute()
        seconds = (logged["time/rollout_seconds"] + logged[_UPDATE_SECONDS]) * self.means.count(_UPDATE_SECONDS)
        logged["time/steps_per_second"] = (clock.env_steps - self.since) / seconds
        if clock.frames != clock.env_steps:
            logged["time/frames"] = float(clock.frames)
        _log_reduced(model.trainer, logged, clock.env_steps)
        self.begin(clock.env_steps)

    # ------------------------------------------------------------------ evaluation

    def log_evaluation(self, model: Any, stage: str) -> None:  # noqa: ANN401
        device = _log_device(model)
        values = {f"{stage}/{name}": value for name, value in self.eval_episodes.compute().items()}
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

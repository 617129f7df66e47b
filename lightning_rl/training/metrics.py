"""What a run logs: episodes, means of the updates, and times, against environment steps."""

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

from lightning_rl.distributed import exact_dtype
from lightning_rl.policies.normalization import ExactStates
from lightning_rl.rollouts.rollout import EpisodeSummary, Rollout


def _plus(sums: Tensor, values: Sequence[Sequence[float]]) -> Tensor:
    """Return sums with the values of each added one by one: to the last digit the same in however many calls."""
    return sums.new_tensor([functools.reduce(operator.add, v, s) for s, v in zip(sums.tolist(), values, strict=True)])


class _Window(ExactStates, Metric):
    """A metric of what happened since the last log, which a checkpoint can take along."""

    full_state_update = False
    # XLA would compile for each number of values.
    stays_off = ("xla",)

    def snapshot(self) -> dict[str, Any]:
        """Return this rank's state as plain data."""
        states = {name: getattr(self, name).cpu().clone() for name in self.metric_state}
        # Not how often: numbers may be taken in one by one or together.
        return {"states": states, "update_called": self.update_called}

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Take over what `snapshot` returned."""
        for name, value in snapshot["states"].items():
            setattr(self, name, value.to(getattr(self, name).device))
        was_updated = snapshot["update_count"] if "update_count" in snapshot else snapshot["update_called"]
        self._update_count = int(bool(was_updated))  # earlier checkpoints have a number


class EpisodeStatistics(_Window):
    """Mean, smallest and largest return and length of finished episodes, over all ranks.

    `compute` gives an empty dict where no episode has ended.
    """

    count: Tensor
    sums: Tensor
    minima: Tensor
    maxima: Tensor

    def __init__(self) -> None:
        super().__init__()
        # Entries of the vectors: return, length.
        self.add_state("count", torch.zeros((), dtype=torch.float64), "sum")
        self.add_state("sums", torch.zeros(2, dtype=torch.float64), "sum")
        self.add_state("minima", torch.full((2,), torch.inf, dtype=torch.float64), "min")
        self.add_state("maxima", torch.full((2,), -torch.inf, dtype=torch.float64), "max")

    def update(self, returns: Sequence[float], lengths: Sequence[int]) -> None:
        """Take in finished episodes."""
        if not returns:
            return
        values = torch.tensor([returns, lengths], dtype=self.sums.dtype, device=self.sums.device)
        # Not in place: what `Trainer.validate` left behind are inference tensors.
        self.count = self.count + values.shape[1]
        self.sums = _plus(self.sums, (returns, lengths))
        self.minima = torch.minimum(self.minima, values.amin(1))
        self.maxima = torch.maximum(self.maxima, values.amax(1))

    def compute(self) -> dict[str, float]:
        """Return `episode_return`, `episode_return_min`, `…_max`, `episode_length`, … and `episodes`."""
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
        """Add a number."""
        self.total = self.total + value

    def compute(self) -> float:
        """Return the sum."""
        return float(self.total)


class Largest(_Window):
    """The largest of some numbers that are not negative, over all ranks."""

    largest: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("largest", torch.zeros((), dtype=torch.float64), "max")

    def update(self, value: float) -> None:
        """Take in a number."""
        self.largest = self.largest.clamp(min=value)

    def compute(self) -> float:
        """Return the largest."""
        return float(self.largest)


class ScalarMeans(_Window):
    """Means of named scalars over all ranks; a name that nothing was reported for is left out.

    Every rank must report the same names, if need be without values; in which order, and which of them first, is all
    the same, since they are kept in that of the alphabet.

    Args:
        names: Names known beforehand; others join when they are first reported.
    """

    sums: Tensor
    counts: Tensor

    def __init__(self, names: Sequence[str] = ()) -> None:
        super().__init__()
        self.names = list(names)
        self.add_state("sums", torch.zeros(len(names), dtype=torch.float64), "sum")
        self.add_state("counts", torch.zeros(len(names), dtype=torch.float64), "sum")

    def update(self, values: Mapping[str, Sequence[float]]) -> None:
        """Take in values, any number for each name."""
        # Ranks add up their vectors place by place. Older checkpoints have names in another order.
        names = sorted({*self.names, *values})
        if names != self.names:
            self._arrange(names)
        reported = [values.get(name, ()) for name in self.names]
        self.sums = _plus(self.sums, reported)
        self.counts = self.counts + self.counts.new_tensor([len(v) for v in reported])

    def _arrange(self, names: list[str]) -> None:
        """Have an entry for each of these names, in this order, with what is known of it."""
        for state in ("sums", "counts"):
            old: Tensor = getattr(self, state)
            known = dict(zip(self.names, old.tolist(), strict=True))
            self.add_state(state, old.new_zeros(len(names)), "sum")
            setattr(self, state, old.new_tensor([known.get(name, 0.0) for name in names]))
        self.names = names

    def count(self, name: str) -> int:
        """Return how many values of a scalar this rank has taken in."""
        return int(self.counts[self.names.index(name)])

    def compute(self) -> dict[str, float]:
        """Return the mean of each scalar that has values."""
        pairs = zip(self.names, self.sums.tolist(), self.counts.tolist(), strict=True)
        return {name: total / count for name, total, count in pairs if count}


_Count: TypeAlias = Largest | Total
_COUNTS: dict[str, type[_Count]] = {
    "rollout/env_restarts": Total,
    "rollout/dropped": Total,
    "rollout/actors_lost": Total,
    "train/policy_lag_max": Largest,
}
# Rollouts whose numbers the metrics take in together, where they are not logged before.
_MOST_AT_ONCE = 32


class LogWindow(nn.Module):
    """Statistics of all rollouts since the last log, over all ranks.

    The metrics take in the numbers of several rollouts together, since a call for each would take as long as logging;
    to the last digit that is the same.

    Attributes:
        since: Environment steps of the run at which it began.
        episodes: Of episodes.
        means: Of scalars, by the name that they are logged by.
        counts: What is not a mean, by such a name, from the first rollout that has it on.
    """

    def __init__(self) -> None:
        super().__init__()
        self.since = 0
        self.episodes, self.means, self.counts = EpisodeStatistics(), ScalarMeans(), nn.ModuleDict()
        self._pending = _Pending()

    @property
    def is_empty(self) -> bool:
        """Whether there has been no rollout; the same on every rank."""
        return not (self._pending.rollouts or self.means.update_called)

    def begin(self, env_steps: int) -> None:
        """Forget what there is.

        Args:
            env_steps: Where the run is.
        """
        self.since, self._pending = env_steps, _Pending()
        for metric in (self.episodes, self.means, *self._counts().values()):
            metric.reset()

    def add(self, episodes: EpisodeSummary, scalars: Mapping[str, Sequence[float]], counts: Mapping[str, int]) -> None:
        """Take in a rollout of this rank; names are the same on every rank.

        Args:
            episodes: Those that ended.
            scalars: What means are wanted of, any number of values for each name.
            counts: What is added up, or the largest of which is wanted, by name.
        """
        self._pending.add(episodes, scalars)
        for name, count in counts.items():
            self._count(name).update(count)
        if self._pending.rollouts >= _MOST_AT_ONCE:
            self._flush()

    def compute(self) -> dict[str, float]:
        """Return means, statistics of episodes and counts by the name that they are logged by; a collective call."""
        self._flush()
        episodes = {f"rollout/{name}": value for name, value in self.episodes.compute().items()}
        # A run that goes on without actors has theirs from its checkpoint.
        counts = {name: count.compute() for name, count in self._counts().items() if count.update_called}
        return self.means.compute() | episodes | counts

    def snapshot(self) -> dict[str, Any]:
        """Return, as plain data, what this rank has taken in."""
        self._flush()
        return {
            "since": self.since,
            "episodes": self.episodes.snapshot(),
            "names": [*self.means.names],
            "means": self.means.snapshot() if self.means.names else None,
            "counts": {name: count.snapshot() for name, count in self._counts().items()},
        }

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Take over what `snapshot` returned, in place of what there is."""
        self.begin(snapshot["since"])
        self.episodes.restore(snapshot["episodes"])
        self.means = ScalarMeans(snapshot["names"]).to(self.episodes.device)
        if snapshot["means"] is not None:
            self.means.restore(snapshot["means"])
        self.counts.clear()
        for name, count in snapshot["counts"].items():
            self._count(name).restore(count)

    def _flush(self) -> None:
        """Have the metrics take in what is pending."""
        if self._pending.rollouts:
            self.episodes.update(self._pending.episodes.returns, self._pending.episodes.lengths)
            self.means.update(self._pending.scalars)
            self._pending = _Pending()

    def _count(self, name: str) -> _Count:
        if name not in self.counts:
            self.counts[name] = _COUNTS[name]().to(self.episodes.device)
        return cast(_Count, self.counts[name])

    def _counts(self) -> dict[str, _Count]:
        return cast(dict[str, _Count], dict(self.counts.items()))


class _Pending:
    """What rollouts have brought that the metrics have not taken in yet."""

    def __init__(self) -> None:
        self.rollouts = 0
        self.episodes = EpisodeSummary([], [])
        self.scalars: dict[str, list[float]] = {}

    def add(self, episodes: EpisodeSummary, scalars: Mapping[str, Sequence[float]]) -> None:
        """Take in one rollout."""
        self.rollouts += 1
        self.episodes.returns += episodes.returns
        self.episodes.lengths += episodes.lengths
        for name, values in scalars.items():
            self.scalars.setdefault(name, []).extend(values)


# Of this there is one value for each rollout.
_FOR_EACH = "time/update_seconds"
_IN_PROGRESS_BAR = ("rollout/episode_return", "time/steps_per_second")


class RolloutMetrics(LogWindow):
    """Takes in rollouts and what came of their updates, and logs them against environment steps.

    Attributes:
        eval_episodes: Of the evaluation under way.
    """

    def __init__(self) -> None:
        super().__init__()
        self.eval_episodes = EpisodeStatistics()
        self._logs_steps = self._logs_epochs = False
        self._clock_will_move = False

    # ------------------------------------------------------------------ rollouts

    def take_in(self, model: Any, rollout: Rollout, means: Mapping[str, float], update_seconds: float) -> None:  # noqa: ANN401
        """Take in one rollout; every `log_every_n_steps` of them, log what happened since, over all ranks.

        Args:
            model: The algorithm, whose clock counts the rollout already.
            rollout: What was learned from.
            means: What came of the updates.
            update_seconds: How long these took.
        """
        clock, interval = model.clock, model.trainer.log_every_n_steps
        scalars = {f"train/{name}": [value] if math.isfinite(value) else [] for name, value in means.items()}
        scalars |= {f"rollout/{key}": values for key, values in rollout.infos.items()}
        scalars |= {"time/rollout_seconds": [rollout.seconds], _FOR_EACH: [update_seconds]}
        scalars |= {f"time/{part}_seconds": [spent] for part, spent in rollout.parts_of_seconds.items()}
        self.add(rollout.episodes, scalars, _counts_of(rollout, clock.policy_version))
        over = clock.planned_env_steps is not None and clock.env_steps >= clock.planned_env_steps
        if log_is_due(model.trainer) or (over and interval):
            self._log(model)

    def show_unlogged(self, trainer: Trainer) -> None:
        """Let callbacks that monitor a value, as `EarlyStopping`, see it before it is logged; a collective call."""
        if not self.is_empty:
            trainer.callback_metrics.update({name: torch.tensor(value) for name, value in self.compute().items()})

    def log_rest(self, model: Any) -> None:  # noqa: ANN401
        """Log what happened since the last log, where it was not known that the rollout would be the last one."""
        if model.trainer.log_every_n_steps and not self.is_empty:
            self._log(model)

    def _log(self, model: Any) -> None:  # noqa: ANN401
        clock, logged = model.clock, self.compute()
        seconds = (logged["time/rollout_seconds"] + logged[_FOR_EACH]) * self.means.count(_FOR_EACH)
        logged["time/steps_per_second"] = (clock.env_steps - self.since) / seconds
        if clock.frames != clock.env_steps:
            logged["time/frames"] = float(clock.frames)
        _log_reduced(model.trainer, logged, clock.env_steps)
        self.begin(clock.env_steps)

    # ------------------------------------------------------------------ evaluation

    def log_evaluation(self, model: Any, stage: str) -> None:  # noqa: ANN401
        """Log returns and lengths of the episodes of an evaluation."""
        device = _log_device(model)
        values = {f"{stage}/{name}": value for name, value in self.eval_episodes.compute().items()}
        self.eval_episodes.reset()
        model.log_dict({name: torch.tensor(value, device=device) for name, value in values.items()}, sync_dist=True)
        model.log("step", _clock_of(model), reduce_fx="max", sync_dist=True)

    # ------------------------------------------------------------------ the x-axis

    def logged(self, model: LightningModule, on_epoch: bool) -> None:
        """Take note that somebody has logged a value, which belongs to the present environment step."""
        self._logs_steps, self._logs_epochs = True, self._logs_epochs or on_epoch
        if not self._clock_will_move:
            _log_clock(model)

    def begin_step(self) -> None:
        """Take note that the clock will move: values logged from now on belong to the steps after that."""
        self._clock_will_move = True

    def end_step(self, model: Any) -> None:  # noqa: ANN401
        """Set `step`, which names checkpoints, and which loggers take as their x-axis, to the environment steps."""
        self._clock_will_move = False
        # An integer of 64 bits, which Lightning casts to one of 32: larger numbers then wrap, and names still differ.
        model.trainer.callback_metrics["step"] = torch.tensor(model.env_steps)
        # Values that were logged earlier in the epoch come with the `step` of then, which takes precedence: Lightning
        # puts these metrics together anew whenever it is asked for them.
        if self._logs_steps or int(model.trainer.callback_metrics["step"]) != model.env_steps:
            _log_clock(model)
        self._logs_steps = False

    def end_epoch(self, model: LightningModule) -> None:
        """Set the `step` of values that are logged once per epoch."""
        if self._logs_epochs:
            _log_clock(model)
        self._logs_epochs = False


def log_is_due(trainer: Trainer) -> bool:
    """Whether the rollout that is being learned from is one of every `log_every_n_steps`."""
    interval: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
    return bool(interval) and (trainer.fit_loop.total_batch_idx + 1) % interval == 0


def _counts_of(rollout: Rollout, policy_version: int) -> dict[str, int]:
    """Return the counts that a rollout has, the same ones on every rank."""
    counts = {} if rollout.failures is None else {"rollout/env_restarts": len(rollout.failures)}
    if rollout.actor is not None:
        # Its updates are done: the version is one further.
        lag = policy_version - 1 - rollout.policy_version
        counts |= {"rollout/dropped": rollout.dropped, "train/policy_lag_max": lag}
    if rollout.actors_lost is not None:
        counts["rollout/actors_lost"] = rollout.actors_lost
    return counts


def _log_reduced(trainer: Trainer, values: Mapping[str, float], env_steps: int) -> None:
    """Log scalars that are the same on every rank, as `LightningModule.log` does but for a hundredth of what it costs.

    One call of `log` takes Lightning as long as a gradient step of a small network, since it looks through the metadata
    of each value for tensors to move. What it does besides, to reduce over steps and ranks, is done.
    """
    tensors = {name: torch.tensor(value) for name, value in values.items()}
    trainer.callback_metrics.update(tensors)
    trainer.logged_metrics.update(tensors)
    trainer.progress_bar_metrics.update({name: values[name] for name in _IN_PROGRESS_BAR if name in values})
    for logger in trainer.loggers:
        logger.log_metrics({**values}, step=env_steps)


def _log_device(model: LightningModule) -> torch.device:
    # Lightning sums up what it logs there: on XLA in the graph of the next update, compiled anew for each variant.
    return torch.device("cpu") if model.device.type == "xla" else model.device


def _clock_of(model: Any) -> Tensor:  # noqa: ANN401
    # Loggers take the value of "step" as their x-axis. float64: float32 loses steps above 2^24.
    device = _log_device(model)
    return torch.tensor(model.env_steps, dtype=exact_dtype(device), device=device)


def _log_clock(model: LightningModule) -> None:
    # Past the algorithm's own `log`, which would log the clock with it.
    LightningModule.log(model, "step", _clock_of(model), reduce_fx="max")


class StepMetric(Callback):
    """Keeps the metric `step` at the environment steps; `OnPolicyAlgorithm` adds it to every Trainer.

    A callback, because callbacks may log after the module, and `ModelCheckpoint` names files before its last hook.
    """

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:  # noqa: ANN401
        """Begin a rollout's updates."""
        pl_module.metrics.begin_step()

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:  # noqa: ANN401
        """Set `step` before checkpoints are saved and loggers are written."""
        pl_module.metrics.end_step(pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:  # noqa: ANN401
        """Set `step` before loggers are written."""
        pl_module.metrics.end_epoch(pl_module)

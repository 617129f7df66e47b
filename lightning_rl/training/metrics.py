"""Logged values: episode statistics, means of the updates, times, and histograms, against environment steps."""

from __future__ import annotations

import copy
import functools
import math
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from gymnasium import spaces
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_warn  # type: ignore[attr-defined]
from torch import Tensor

from lightning_rl.distributed import all_reduce, exact_dtype, world_size
from lightning_rl.nested import leaves, map_leaves, space_leaves
from lightning_rl.policies.sharding import whole
from lightning_rl.rollouts.batch import Batch
from lightning_rl.rollouts.rollout import OF_EPISODES, Episode, EpisodeSummary, Rollout, names_of_infos
from lightning_rl.validation import ConfigurationError

_CPU = torch.device("cpu")
# In the `state_key` of a `ModelCheckpoint`; Lightning has no other public name for this interval.
BY_GRADIENT_STEPS = re.compile(r"'every_n_train_steps': ([1-9]\d*)")
_LARGE_SATURATION = 0.1
# New policies have a large standard deviation, which shrinks in the first rollouts.
_FIRST_ROLLOUTS = 10


def _over_ranks(values: Sequence[float], operation: Literal["sum", "max"], device: torch.device) -> list[float]:
    if world_size() == 1 or not values:
        return [*values]
    return all_reduce(torch.tensor(values, dtype=exact_dtype(device), device=device), operation).tolist()


class LogWindow:
    """Statistics of all `num_rollouts` rollouts since the last log, which began at `since` environment steps.

    `means` and `counts` map each logged name to the sum and the number of its values, `maxima` to the largest value, or
    for a minimum to the smallest value with the opposite sign.
    """

    def __init__(self) -> None:
        self.begin(0)

    def begin(self, env_steps: int) -> None:
        """Start an empty window at an environment step."""
        self.since, self.num_rollouts = env_steps, 0
        self.means: dict[str, list[float]] = {}
        self.counts: dict[str, list[float]] = {}
        self.maxima: dict[str, float] = {}

    def add(
        self,
        episodes: EpisodeSummary,
        means: Mapping[str, Sequence[float]],
        counts: Mapping[str, float],
        maxima: Mapping[str, float],
    ) -> None:
        """Add episodes, values for each mean, counts and maxima of this rank, under the same names on all ranks."""
        self.num_rollouts += 1
        of_episodes: dict[str, Sequence[float]] = {
            "rollout/episode_return": episodes.returns,
            "rollout/episode_length": episodes.lengths,
        }
        _add_up(self.means, {**means, **of_episodes})
        _add_up(self.counts, {name: [value] for name, value in counts.items()})
        _add_up(self.counts, {"rollout/episodes": [1.0] * len(episodes.returns)})
        largest = {f"{name}_max": max(values, default=-math.inf) for name, values in of_episodes.items()}
        largest |= {f"{name}_min": -min(values, default=math.inf) for name, values in of_episodes.items()}
        for name, value in (largest | {**maxima}).items():
            self.maxima[name] = max(self.maxima.get(name, -math.inf), float(value))

    def compute(self, device: torch.device = _CPU) -> dict[str, float]:
        """Return the statistics that have a value by logged name; a collective call with tensors on `device`."""
        # Ranks add their vectors entry by entry, so the names are sorted.
        names = [(kind, name) for kind in (self.means, self.counts) for name in sorted(kind)]
        largest = sorted(self.maxima)
        sums = _over_ranks([x for kind, name in names for x in kind[name]], "sum", device)
        result = {}
        for (kind, name), total, count in zip(names, sums[::2], sums[1::2], strict=True):
            if count:
                result[name] = total / count if kind is self.means else total
        for name, value in zip(largest, _over_ranks([self.maxima[x] for x in largest], "max", device), strict=True):
            if value > -math.inf:
                result[name] = -value if name.endswith("_min") else value
        return result

    def snapshot(self) -> dict[str, Any]:
        """Return the statistics of this rank as plain values."""
        names = ("since", "num_rollouts", "means", "counts", "maxima")
        return {name: copy.deepcopy(getattr(self, name)) for name in names}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        vars(self).update(copy.deepcopy({**snapshot}))


def _add_up(sums: dict[str, list[float]], values: Mapping[str, Sequence[float]]) -> None:
    """Add values one by one, so that rounding does not depend on how they are grouped."""
    for name, some in values.items():
        total, count = sums.get(name, (0.0, 0))
        sums[name] = [functools.reduce(operator.add, map(float, some), total), count + len(some)]


_IN_PROGRESS_BAR = ("rollout/episode_return", "time/steps_per_second")


class RolloutMetrics(LogWindow):
    """Logs rollouts and their updates against environment steps; names of values of updates begin with `prefix`."""

    def __init__(self) -> None:
        super().__init__()
        self.prefix = "train"
        self.evaluation = LogWindow()
        self.logs_steps = self.logs_epochs = False
        self.clock_will_move = self._has_warned = False
        self.between_epochs = True  # where Lightning logs a value at the end of the epoch by default

    # ------------------------------------------------------------------ rollouts

    def add_rollout(self, model: Any, rollout: Rollout, means: Mapping[str, float], update_seconds: float) -> None:
        """Add a rollout with the means of its updates; log the window after every `log_every_n_steps` rollouts."""
        clock, interval = model.clock, model.trainer.log_every_n_steps
        scalars = {f"{self.prefix}/{name}": [value] if math.isfinite(value) else [] for name, value in means.items()}
        for key, x in (rollout.infos or {}).items():
            last_steps = torch.tensor(rollout.episodes.ends, dtype=torch.long).view(-1, 2)
            scalars |= _of_info(key, x.ravel(), x[last_steps.unbind(1)])
        scalars |= {"time/rollout_seconds": [rollout.seconds], "time/update_seconds": [update_seconds]}
        scalars |= {f"time/{part}_seconds": [spent] for part, spent in rollout.parts_of_seconds.items()}
        number = clock.policy_version - 1  # the version includes the update from this rollout
        lag = {} if rollout.actor is None else {"train/policy_lag_max": number - rollout.policy_version}
        self.add(rollout.episodes, scalars, _counts_of(rollout), lag)
        over = clock.planned_env_steps is not None and clock.env_steps >= clock.planned_env_steps
        if log_is_due(model.trainer) or (over and interval):
            self._log(model)
        self.warn_of_saturation(means.get("action_saturation", 0.0), number, model.action_space)

    def warn_of_saturation(self, share: float, number: int, space: spaces.Space[Any]) -> None:
        """Warn once if the environment clips more than a tenth of the actions, except in the first rollouts."""
        if self._has_warned or share <= _LARGE_SATURATION or number < _FIRST_ROLLOUTS:
            return
        self._has_warned = True
        parts = [path for path, leaf in space_leaves(space).items() if path and isinstance(leaf, spaces.Box)]
        where = f" for {', '.join(map(repr, parts))}" if parts else ""
        rank_zero_warn(
            f"{share:.0%} of the action components in rollout {number} lie outside the bounds of the space, and the "
            "environment clips them, so that different actions have the same effect: set policy.action_distribution to "
            f"'squashed_gaussian' or 'beta'{where}, which need finite bounds, or, if 0 is between the bounds, lower "
            "policy.initial_log_std. The share is logged as action_saturation"
        )

    def show_unlogged(self, trainer: Trainer) -> None:
        """Show unlogged values to callbacks that monitor them, such as `EarlyStopping`; a collective call.

        `ModelCheckpoint` gets NaN, the worst score, until an episode has ended; it would raise otherwise.
        """
        if self.num_rollouts:
            values = self.compute(_log_device(trainer.lightning_module))
            trainer.callback_metrics.update({name: torch.tensor(value) for name, value in values.items()})
        missing = {*collected(trainer)} - trainer.callback_metrics.keys()
        missing &= {getattr(callback, "monitor", None) for callback in trainer.checkpoint_callbacks}
        for name in missing - {callback.monitor for callback in trainer.early_stopping_callbacks}:
            trainer.callback_metrics[name] = torch.tensor(torch.nan)

    def log_rest(self, model: Any) -> None:
        """Log an unfinished window at the end of a run."""
        if model.trainer.log_every_n_steps and self.num_rollouts:
            self._log(model)

    def _log(self, model: Any) -> None:
        clock, logged = model.clock, self.compute(_log_device(model))
        seconds = (logged["time/rollout_seconds"] + logged["time/update_seconds"]) * self.num_rollouts
        logged["time/steps_per_second"] = (clock.env_steps - self.since) / seconds
        if clock.frames != clock.env_steps:
            logged["time/frames"] = float(clock.frames)
        _log_reduced(model.trainer, logged, clock.env_steps)
        self.begin(clock.env_steps)

    # ------------------------------------------------------------------ evaluation

    def add_evaluation(self, episodes: Sequence[Episode], info_keys: Sequence[str]) -> None:
        infos: dict[str, list[float]] = {}
        for key in info_keys:
            found = [torch.from_numpy(e.infos[key]) for e in episodes if key in e.infos]
            infos |= _of_info(key, *(torch.cat([torch.empty(0), *parts]) for parts in (found, [x[-1:] for x in found])))
        summary = EpisodeSummary([e.episode_return for e in episodes], [e.length for e in episodes])
        self.evaluation.add(summary, infos, {}, {})

    def log_evaluation(self, model: Any, stage: str) -> None:
        device = _log_device(model)
        values = {name.replace("rollout", stage, 1): value for name, value in self.evaluation.compute(device).items()}
        model.log_dict({name: torch.tensor(value, device=device) for name, value in values.items()})
        model.log("step", _clock_of(model), reduce_fx="max")

    # ------------------------------------------------------------------ the x-axis

    def logged(self, model: LightningModule, on_epoch: bool) -> None:
        """Log `step` with a value that a user logs, unless the clock is about to advance."""
        self.logs_steps, self.logs_epochs = True, self.logs_epochs or on_epoch or self.between_epochs
        if not self.clock_will_move:
            _log_clock(model)


def collected(trainer: Trainer) -> list[str]:
    """Return the names of values that are missing until an episode has ended."""
    infos = names_of_infos(getattr(trainer.datamodule, "info_keys", ()))  # type: ignore[attr-defined]
    return [f"rollout/{name}" for name in (*OF_EPISODES, *infos)]


def log_is_due(trainer: Trainer) -> bool:
    """Whether values are logged after the current rollout, by `log_every_n_steps`."""
    interval: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
    return bool(interval) and (trainer.fit_loop.total_batch_idx + 1) % interval == 0


def _of_info(key: str, *numbers: Tensor) -> dict[str, list[float]]:
    """Return the `numbers` of all steps and of the last steps of episodes by logged name, without NaN."""
    names = names_of_infos([key])
    return {f"rollout/{name}": x[~x.isnan()].tolist() for name, x in zip(names, numbers, strict=True)}


def _counts_of(rollout: Rollout) -> dict[str, int]:
    """Return the counts of a rollout, with the same names on all ranks."""
    counts = {} if rollout.failures is None else {"rollout/env_restarts": len(rollout.failures)}
    if rollout.actor is not None:
        counts["rollout/dropped"] = rollout.dropped
    if rollout.actors_lost is not None:
        counts["rollout/actors_lost"] = rollout.actors_lost
    return counts


def _log_reduced(trainer: Trainer, values: Mapping[str, float], env_steps: int) -> None:
    """Log scalars already reduced over steps and ranks, a hundred times as fast as `LightningModule.log`."""
    # Under bf16-true the default dtype would round values that callbacks monitor: 23.13 to 23.125, and 3001 to 3008.
    dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
    tensors = {name: torch.tensor(value, dtype=dtype) for name, value in values.items()}
    trainer.callback_metrics.update(tensors)
    trainer.logged_metrics.update(tensors)
    trainer.progress_bar_metrics.update({name: values[name] for name in _IN_PROGRESS_BAR if name in values})
    for logger in trainer.loggers:
        logger.log_metrics({**values}, step=env_steps)
        logger.save()  # `CSVLogger` writes its rows then


def _log_device(model: LightningModule) -> torch.device:
    # Lightning adds up logged values on this device. On XLA the sums would change the graph of the next update.
    return torch.device("cpu") if model.device.type == "xla" else model.device


def _clock_of(model: Any) -> Tensor:
    # In float64, because float32 is inexact above 2^24.
    device = _log_device(model)
    return torch.tensor(model.env_steps, dtype=exact_dtype(device), device=device)


def _log_clock(model: LightningModule) -> None:
    # Not the algorithm's own `log`, which would call this function.
    LightningModule.log(model, "step", _clock_of(model), reduce_fx="max")


class StepMetric(Callback):
    """Keeps the metric `step` equal to the environment steps; `OnPolicyAlgorithm` adds it to every Trainer."""

    # A callback, since callbacks log after the module, `ModelCheckpoint` uses `step` before the module's last hook, and
    # a subclass may override the hooks of the module without `super()`.
    def on_train_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
        if not trainer.log_every_n_steps:  # type: ignore[attr-defined]  # no log begins a new window
            pl_module.metrics.begin(pl_module.env_steps)

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
        for hook in ("setup", "on_fit_start", "on_train_start"):
            if hook not in pl_module.hooks_run:
                name = type(pl_module).__name__
                raise ConfigurationError(f"{name}.{hook} does not call super(), which checks and starts the run")
        pl_module.metrics.clock_will_move, pl_module.metrics.between_epochs = True, False
        self._version = pl_module.policy_version

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
        """Set `step` before checkpoints are saved and loggers are written."""
        metrics, env_steps = pl_module.metrics, pl_module.env_steps
        metrics.clock_will_move = False
        # An int64, since float64 of 2^31 and more would all become the same number when Lightning casts to int32.
        trainer.callback_metrics["step"] = torch.tensor(env_steps)
        # Lightning rebuilds `callback_metrics` at each access, with an older `step` if one was logged in this epoch.
        if metrics.logs_steps or int(trainer.callback_metrics["step"]) != env_steps:
            _log_clock(pl_module)
        metrics.logs_steps = False
        scored = [callback for callback in trainer.checkpoint_callbacks if getattr(callback, "monitor", None)]
        if any(BY_GRADIENT_STEPS.search(callback.state_key) for callback in scored):  # they may save now
            metrics.show_unlogged(trainer)
        if pl_module.policy_version == self._version:
            name = type(pl_module).__name__
            raise ConfigurationError(
                f"{name}.training_step does not call super(), which learns: override update instead"
            )

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        metrics = pl_module.metrics
        if metrics.logs_epochs:
            _log_clock(pl_module)
        metrics.logs_epochs, metrics.between_epochs = False, True
        if trainer.should_stop:  # before the last checkpoint, or a resumed run would log these rollouts again
            metrics.log_rest(pl_module)
        metrics.show_unlogged(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Log the last values. Lightning skips this hook when a signal or exception ends the run; it can be resumed."""
        pl_module.metrics.log_rest(pl_module)


def action_saturation(policy: Any, rollout: Rollout) -> dict[str, Tensor]:
    """Return the share of action components that the environment clipped, `action_saturation`; {} if it clips none."""
    # Actions outside the bounds differ in log-probability but not in effect, so learning from them adds noise.
    if not hasattr(policy, "saturation"):
        return {}
    observations = map_leaves(lambda x: x[:-1], rollout.observations)
    share: Tensor | None = policy.saturation(observations, rollout.actions, rollout.valid)
    return {} if share is None else {"action_saturation": share}


def log_histograms(model: Any, batch: Batch, name: str) -> None:
    """Log `debug.histograms` after a pass over advantages, shown standardized, in the group `name`."""
    if not (model.options["debug.histograms"] and "advantages" in batch.fields and log_is_due(model.trainer)):
        return
    shown = dict(_histograms(model, batch, model.estimator.standardized(batch)))
    for logger in histogram_loggers(model.trainer.loggers):
        for tag, values in shown.items():
            logger.experiment.add_histogram(f"{name}/{tag}", values.detach().cpu(), model.env_steps)


def histogram_loggers(loggers: Sequence[Logger]) -> list[TensorBoardLogger]:
    """Return the loggers that can show histograms."""
    return [logger for logger in loggers if isinstance(logger, TensorBoardLogger)]


def _histograms(model: Any, batch: Batch, advantages: Tensor) -> Iterator[tuple[str, Tensor]]:
    for path, actions in zip(space_leaves(model.action_space), leaves(batch.actions), strict=True):
        yield "/".join(filter(None, ("actions", path))), actions
    yield "advantages", advantages
    for name, parameter in model.policy.named_parameters():
        yield f"parameters/{name}", whole(parameter)
        if parameter.grad is not None:
            yield f"gradients/{name}", whole(parameter.grad)

"""What to try where a run waits for its environments more than for anything else."""

from __future__ import annotations

import os
import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info  # type: ignore[attr-defined]

from lightning_rl.environments.registry import find_spec
from lightning_rl.environments.spec import EnvironmentSpec

# Of a run, seconds after which it is judged, and the share of them above which environments are its bottleneck.
_JUDGED_AFTER = 60.0
_SHARE = 0.5


class BottleneckHint(Callback):
    """Says once what might be quicker, where a run waits for its environments; `OnPolicyAlgorithm` adds it."""

    def __init__(self) -> None:
        self._watch: BottleneckWatch | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to watch the environments of a run."""
        data = trainer.datamodule  # type: ignore[attr-defined]
        spec = getattr(data, "spec", None)
        self._watch = None if spec is None else BottleneckWatch(spec, data.num_envs)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:  # noqa: ANN401
        """Look at the time that a rollout took."""
        seconds = getattr(batch, "parts_of_seconds", {}).get("env")
        if self._watch is None or seconds is None or batch.actor is not None:
            return
        if (hint := self._watch.check(seconds, time.perf_counter())) is not None:
            rank_zero_info(hint)


class BottleneckWatch:
    """Compares the time in environments with that of the whole run, and says once what might be quicker.

    Args:
        spec: Of the environments.
        num_envs: How many there are.
    """

    def __init__(self, spec: EnvironmentSpec, num_envs: int) -> None:
        self._spec, self._num_envs = spec, num_envs
        self._env_seconds = 0.0
        self._begin: float | None = None
        self._is_judged = False

    def check(self, env_seconds: float, now: float) -> str | None:
        """Return what to tell the user, mostly nothing; call it after each rollout.

        Args:
            env_seconds: What the environments took for it.
            now: Of a clock, in seconds.
        """
        if self._is_judged:
            return None
        if self._begin is None:  # the first rollout makes the environments, and warms everything up
            self._begin = now
            return None
        self._env_seconds += env_seconds
        elapsed = now - self._begin
        if elapsed < _JUDGED_AFTER:
            return None
        self._is_judged = True
        share = self._env_seconds / elapsed
        if share <= _SHARE:
            return None
        return (
            f"environments take {share:.0%} of the time (time/env_seconds), with backend={self._spec.backend!r} and "
            f"num_envs={self._num_envs}; what might be quicker: {'; '.join(self._ideas())}"
        )

    def _ideas(self) -> list[str]:
        ideas = []
        backend, cores = self._spec.backend, os.cpu_count() or 1
        if backend in ("sync", "async"):
            if getattr(find_spec(self._spec.env_id), "vector_entry_point", None) is not None:
                ideas.append("backend='native', which this environment has")
            ideas.append("backend='envpool', if EnvPool has this environment")
        if backend == "sync" and cores > 1:
            ideas.append(f"backend='async', a process for each environment, on {cores} cores")
        if backend == "async" and self._num_envs > 2 * cores:
            ideas.append(f"fewer environments: their processes share {cores} cores")
        if backend in ("native", "envpool", "torch"):
            ideas.append("a larger num_envs with a shorter rollout_length, since environments step together")
        if cores > 1 and backend not in ("async", "torch"):
            ideas.append("actors.count, with an algorithm that corrects for older policies")
        return ideas

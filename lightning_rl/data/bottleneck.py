"""Suggests faster settings to runs that wait for their environments."""

from __future__ import annotations

import os
import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info  # type: ignore[attr-defined]

from lightning_rl.environments.registry import find_spec
from lightning_rl.environments.spec import EnvironmentSpec

# The hint comes once, after so many seconds, if environments took more than this share of them.
_SECONDS = 60.0
_SHARE = 0.5


class BottleneckHint(Callback):
    """Logs one hint if environments take most of a run's first minute; every algorithm adds this callback."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin: float | None = None
        self._env_seconds = 0.0
        self._is_done = not hasattr(trainer.datamodule, "spec")  # type: ignore[attr-defined]

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:  # noqa: ANN401
        seconds = getattr(batch, "parts_of_seconds", {}).get("env")
        if self._is_done or seconds is None or batch.actor is not None:
            return
        if self._begin is None:  # the first rollout includes the start of the environments
            self._begin = time.perf_counter()
            return
        self._env_seconds += seconds
        elapsed = time.perf_counter() - self._begin
        if elapsed < _SECONDS:
            return
        self._is_done = True
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        if (share := self._env_seconds / elapsed) > _SHARE:
            rank_zero_info(
                f"environments take {share:.0%} of the time (time/env_seconds), with backend={data.spec.backend!r} and "
                f"num_envs={data.num_envs}; to try: {'; '.join(_ideas(data.spec, data.num_envs))}"
            )


def _ideas(spec: EnvironmentSpec, num_envs: int) -> list[str]:
    ideas = []
    backend, cores = spec.backend, os.cpu_count() or 1
    if backend in ("sync", "async"):
        if getattr(find_spec(spec.env_id), "vector_entry_point", None) is not None:
            ideas.append("backend='native', which this environment has")
        ideas.append("backend='envpool', if EnvPool has this environment")
    if backend == "sync" and cores > 1:
        ideas.append(f"backend='async', a process for each environment, on {cores} cores")
    if backend == "async" and num_envs > 2 * cores:
        ideas.append(f"fewer environments: their processes share {cores} cores")
    if backend in ("native", "envpool", "torch"):
        ideas.append("a larger num_envs with a shorter rollout_length, since environments step together")
    if cores > 1 and backend not in ("async", "torch"):
        ideas.append("actors.count, with an algorithm that corrects for older policies")
    return ideas

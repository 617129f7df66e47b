"""A curriculum: training environments that change from stage to stage."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from statistics import fmean
from typing import Annotated, Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info  # type: ignore[attr-defined]
from lightning.pytorch.utilities.types import STEP_OUTPUT

from lightning_rl.callbacks.video import data_of
from lightning_rl.distributed import gather_ranks
from lightning_rl.environments.contract import to_tensors
from lightning_rl.options import OrDict, changed
from lightning_rl.rollouts.rollout import Rollout
from lightning_rl.training.clock import env_steps_of
from lightning_rl.validation import PositiveInt, Range, check, check_positive_int


@dataclass(frozen=True)
class CurriculumStage:
    """One stage of a curriculum, which ends when either limit is reached; the last stage has no limit.

    Args:
        attributes: Values of attributes of the environment or of a wrapper, the same names in all stages.
        reset_options: `options` of `reset` (backends `sync` and `async`).
        until_return: The stage ends once the mean return of recent training episodes reaches this number.
        until_env_steps: The stage ends at this environment step of the run.
    """

    attributes: dict[str, Any] = field(default_factory=dict)
    reset_options: dict[str, Any] = field(default_factory=dict)
    until_return: Annotated[float, Range()] | None = None
    until_env_steps: PositiveInt | None = None


Stages = Sequence[OrDict[CurriculumStage]]


class Curriculum(Callback):
    """Change attributes or reset options of the training environments from stage to stage.

    With the backends `sync` and `async`, an environment changes at the start of its next episode; with `native` and
    `torch`, all change at once. Evaluation environments do not change. Each rollout logs the stage of the next one as
    `curriculum/stage`, counted from 0, and its numeric attributes as `curriculum/<attribute>`. A resumed run continues
    in its stage. An invalid stage raises a `ConfigurationError`.

    Args:
        stages: The stages, as `CurriculumStage` or dicts of its fields.
        episodes: Number of recent training episodes of all ranks in the mean return of `until_return`. Not counted in a
            stage are earlier episodes, rollouts that actors began earlier, and then one episode per environment.
    """

    def __init__(self, stages: Stages, episodes: int = 50) -> None:
        self.stages = [changed(f"stages[{number}]", CurriculumStage(), stage) for number, stage in enumerate(stages)]
        check(len(self.stages) > 1, "stages", stages, "a list of at least two stages")
        check_positive_int("episodes", episodes)
        for number, stage in enumerate(self.stages):
            name = f"stages[{number}]"
            names, expected = sorted(stage.attributes), sorted(self.stages[0].attributes)
            check(names == expected, f"{name}.attributes", names, f"{expected}, as in the first stage")
            to_tensors({"attributes": stage.attributes, "reset_options": stage.reset_options}, name)  # for checkpoints
            ends = stage.until_return is not None or stage.until_env_steps is not None
            is_last = number == len(self.stages) - 1
            check(ends != is_last, name, stage, "until_return or until_env_steps, but in the last stage neither")
        steps = [stage.until_env_steps for stage in self.stages if stage.until_env_steps is not None]
        check(all(x < y for x, y in pairwise(steps)), "stages: until_env_steps", steps, "increasing numbers")
        self.stage = 0
        self._returns: deque[float] = deque(maxlen=episodes)
        self._unfinished = 0  # episodes that began in an earlier stage

    def state_dict(self) -> dict[str, Any]:
        return {"stage": self.stage, "returns": list(self._returns), "unfinished": self._unfinished}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.stage, self._unfinished = state_dict["stage"], state_dict.get("unfinished", 0)
        self._returns.clear()
        self._returns.extend(state_dict["returns"])

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        data_of(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not env_steps_of(pl_module):  # a new run, whose callback may have served another one
            self.stage = self._unfinished = 0
            self._returns.clear()
        count = len(self.stages)
        check(self.stage < count, "stages: length", count, f"more than {self.stage}, the stage in the checkpoint")
        self._change(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: STEP_OUTPUT, batch: Rollout, batch_idx: int
    ) -> None:
        # Actors finish rollouts that were requested in an earlier stage.
        ended = [*chain(*gather_ranks([] if batch.has_old_settings else batch.episodes.returns))]
        self._returns.extend(ended[self._unfinished :])
        self._unfinished = max(0, self._unfinished - len(ended))
        before = self.stage
        while self._is_over(env_steps_of(pl_module)):
            self.stage += 1
            self._returns.clear()
        if self.stage > before:
            data = data_of(trainer)
            self._unfinished = data.num_envs * max(1, data.num_actors) * trainer.world_size
            rank_zero_info(f"Curriculum: stage {self.stage} begins at {pl_module.env_steps} environment steps")
            self._change(trainer)
        values = {"stage": self.stage, **self.stages[self.stage].attributes}
        for name, value in values.items():
            if isinstance(value, int | float):
                pl_module.log(f"curriculum/{name}", float(value))

    def _is_over(self, env_steps: int) -> bool:
        stage = self.stages[self.stage]
        if stage.until_env_steps is not None and env_steps >= stage.until_env_steps:
            return True
        is_full = len(self._returns) == self._returns.maxlen
        return is_full and fmean(self._returns) >= (math.inf if stage.until_return is None else stage.until_return)

    def _change(self, trainer: Trainer) -> None:
        stage = self.stages[self.stage]
        data_of(trainer).set_env_settings(stage.attributes, stage.reset_options)

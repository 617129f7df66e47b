"""A harder CartPole, learned from stage to stage and from the beginning.

    OMP_NUM_THREADS=1 python benchmarks/curriculum.py [--seeds 5] [--save]

The pole has 4 % of its usual length and the track 4 % of its usual width, so that unskilled episodes last a few steps.
The curriculum begins with a longer pole. Both runs take equally many environment steps, and are evaluated on the hard
task. The result goes to `benchmarks/results/curriculum/cartpole.json`.
"""

from __future__ import annotations

import statistics
from typing import Any

import gymnasium
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from lightning.pytorch import seed_everything
from short_runs import Scores, main, quiet_trainer

from lightning_rl import PPO, Curriculum, EnvStepLimit, RolloutDataModule

ENV_ID, STEPS = "ShortPole-v0", 100_000
STAGES: list[dict[str, Any]] = [
    {"attributes": {"length": 0.1}, "until_return": 150},
    {"attributes": {"length": 0.04}, "until_return": 150},
    {"attributes": {"length": 0.02}},
]
DATA: dict[str, Any] = {"rollouts_per_epoch": 10, "evaluation": {"episodes": 20}}
SETTINGS: dict[str, Any] = {
    "learning_rate": 1e-3,
    "num_epochs": 10,
    "num_minibatches": 8,
    "optimizer": {"anneal": True},
}
EPISODES = 20


class ShortPole(CartPoleEnv):
    """CartPole with half the `length` of the pole, in meters, and the half width of the track."""

    def __init__(self, length: float = 0.02, x_threshold: float = 0.1) -> None:
        super().__init__()
        self.x_threshold, self.length = x_threshold, length

    @property
    def length(self) -> float:
        """Half the length of the pole."""
        return self._length

    @length.setter
    def length(self, length: float) -> None:
        self._length, self.polemass_length = length, self.masspole * length


gymnasium.register(ENV_ID, ShortPole, max_episode_steps=500)


def run(seed: int, stages: list[dict[str, Any]] | None) -> dict[str, Any]:
    """Return steps and returns of the evaluations of one run, and the step at which the last stage began."""
    seed_everything(seed)
    data = RolloutDataModule(ENV_ID, seed=seed, **DATA)
    model = PPO(data.observation_space, data.action_space, **SETTINGS)
    scores, began = Scores(), []

    class Watched(Curriculum):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
            before = self.stage
            super().on_train_batch_end(trainer, pl_module, *args)
            began.extend([pl_module.env_steps] * (self.stage - before))

    callbacks = [EnvStepLimit(STEPS), scores, *([Watched(stages, EPISODES)] if stages else [])]
    quiet_trainer(*callbacks, max_epochs=-1).fit(model, data)
    return {"seed": seed, "env_steps": scores.env_steps, "returns": scores.returns, "stages_began": began}


def compare(seeds: int) -> dict[str, Any]:
    """Return the runs of every seed; `final` is the mean of the last three evaluations."""
    result: dict[str, Any] = {"env_id": ENV_ID, "steps": STEPS, "stages": STAGES, "episodes": EPISODES}
    result |= {"data": DATA, "settings": SETTINGS}
    for name, stages in (("curriculum", STAGES), ("from_the_beginning", None)):
        runs = [run(seed, stages) for seed in range(seeds)]
        final = [round(statistics.fmean(one["returns"][-3:]), 1) for one in runs]
        result[name] = {"final": final, "mean_final": round(statistics.fmean(final), 1), "runs": runs}
    return result


if __name__ == "__main__":
    main(__doc__, "curriculum/cartpole", compare, seeds=5)

"""Count the decisions that PPO needs to solve MountainCar, with and without learned action repeat.

    OMP_NUM_THREADS=1 python benchmarks/repeats.py [--seeds 3] [--save]

In MountainCar each step has the reward -1 until the car is on the hill. 200 steps of random actions almost never reach
it, because the car must be pushed in one direction for a while and then in the other. A decision is one action of the
policy, taken for 1 to `MAX_REPEATS` steps. The policy is evaluated after every `EVERY` decisions, and trains until it
reaches the score `GOAL`. The result is `benchmarks/results/repeats/mountain_car.json`.
"""

from __future__ import annotations

import statistics
from typing import Any

from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import EarlyStopping
from short_runs import Scores, main, quiet_trainer

from lightning_rl import PPO, RolloutDataModule

ENV_ID, GOAL = "MountainCar-v0", -120.0
EPOCHS, MAX_REPEATS = 60, 16
DATA: dict[str, Any] = {"num_envs": 16, "rollout_length": 64, "rollouts_per_epoch": 4, "evaluation": {"episodes": 20}}
EVERY = DATA["num_envs"] * DATA["rollout_length"] * DATA["rollouts_per_epoch"]
SETTINGS: dict[str, Any] = {
    "learning_rate": 1e-3,
    "num_epochs": 4,
    "num_minibatches": 16,
    "gae_lambda": 0.98,
    "normalization": {"observations": True, "rewards": True},
}


def run(seed: int, repeats: int | None) -> dict[str, Any]:
    """Return decisions and steps up to the goal or the limit, and the final policy's score and decisions."""
    seed_everything(seed)
    data = RolloutDataModule(ENV_ID, env={"learned_action_repeat": repeats}, seed=seed, **DATA)
    model = PPO(data.observation_space, data.action_space, **SETTINGS)
    kept = Scores()
    at_goal = EarlyStopping("val/episode_return", mode="max", stopping_threshold=GOAL, patience=EPOCHS)
    quiet_trainer(kept, at_goal, max_epochs=EPOCHS).fit(model, data)
    return {
        "reached": kept.returns[-1] >= GOAL,
        "decisions": model.env_steps,
        "steps_of_the_environment": model.clock.frames,
        "score": kept.returns[-1],
        "decisions_of_an_episode": kept.lengths[-1],
        "scores": list(zip(kept.env_steps, kept.returns, strict=True)),
    }


def compare(seeds: int) -> dict[str, Any]:
    """Return the results of every seed, with and without repeats."""
    limit = EPOCHS * EVERY
    result: dict[str, Any] = {"env_id": ENV_ID, "goal": GOAL, "decisions_at_most": limit}
    result |= {"settings": SETTINGS, "data": DATA}
    for name, repeats in (("each_step", None), (f"up_to_{MAX_REPEATS}_steps", MAX_REPEATS)):
        runs = [run(seed, repeats) for seed in range(seeds)]
        means = ("decisions", "steps_of_the_environment", "score", "decisions_of_an_episode")
        result[name] = {"reached": [one["reached"] for one in runs]}
        result[name] |= {what: round(statistics.fmean(one[what] for one in runs), 2) for what in means}
        result[name]["runs"] = runs
    return result


if __name__ == "__main__":
    main(__doc__, "repeats/mountain_car", compare)

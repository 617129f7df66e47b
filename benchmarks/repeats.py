"""How many decisions PPO needs for the same score with actions that it may hold for a while, and without.

    OMP_NUM_THREADS=1 python benchmarks/repeats.py [--seeds 3]

Acrobot, whose score is the number of its steps until the tip is up, whoever decides in how many of them. The policy is
evaluated all along; a decision is one action of the policy, held for 1 to `MAX_REPEATS` steps. The result
goes to `benchmarks/results/repeats/acrobot.json`.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from lightning.pytorch import seed_everything
from short_runs import Scores, quiet_trainer, write_result

from lightning_rl import PPO, RolloutDataModule

ENV_ID, GOAL = "Acrobot-v1", -100.0
EPOCHS, MAX_REPEATS = 12, 4
DATA: dict[str, Any] = {"num_envs": 8, "rollout_length": 128, "rollouts_per_epoch": 4, "eval_episodes": 20}
SETTINGS: dict[str, Any] = {
    "learning_rate": 1e-3,
    "num_epochs": 4,
    "num_minibatches": 16,
    "gae_lambda": 0.94,
    "normalize_rewards": True,
}


def run(seed: int, repeats: int | None) -> dict[str, Any]:
    """Return the score and the decisions of an episode at every evaluation, and when the goal was reached first."""
    seed_everything(seed)
    data = RolloutDataModule(ENV_ID, learned_action_repeat=repeats, seed=seed, **DATA)
    model = PPO(data.observation_space, data.action_space, **SETTINGS)
    kept = Scores()
    quiet_trainer(kept, max_epochs=EPOCHS).fit(model, data)
    reached = [steps for steps, score in zip(kept.env_steps, kept.returns, strict=True) if score >= GOAL]
    return {
        "decisions_to_goal": reached[0] if reached else None,
        "final_score": kept.returns[-1],
        "final_decisions_of_an_episode": kept.lengths[-1],
        "scores": list(zip(kept.env_steps, kept.returns, strict=True)),
    }


def compare(seeds: int) -> dict[str, Any]:
    """Return what both take with every seed."""
    result: dict[str, Any] = {"env_id": ENV_ID, "goal": GOAL, "settings": SETTINGS, "data": DATA}
    for name, repeats in (("each_step", None), (f"up_to_{MAX_REPEATS}_steps", MAX_REPEATS)):
        runs = [run(seed, repeats) for seed in range(seeds)]
        means = ("final_score", "final_decisions_of_an_episode")
        result[name] = {what: round(statistics.fmean(one[what] for one in runs), 2) for what in means}
        result[name] |= {"decisions_to_goal": [one["decisions_to_goal"] for one in runs], "runs": runs}
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    seeds = parser.parse_args().seeds
    write_result("repeats/acrobot", lambda: compare(seeds))

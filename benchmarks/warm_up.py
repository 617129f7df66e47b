"""What becomes of a cloned policy in its first updates, with a critic that was warmed up and with a fresh one.

    OMP_NUM_THREADS=1 python benchmarks/warm_up.py [--seeds 3]

A policy is cloned from episodes of the controller that comes with LunarLander, and PPO goes on from there: at once, or
after `critic_warmup_steps` in which the values alone are learned. Its mode is evaluated after every one of
its first updates. The result goes to `benchmarks/results/warm_up/lunarlander.json`.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.box2d.lunar_lander import heuristic
from lightning.pytorch import seed_everything
from short_runs import Scores, quiet_trainer, write_result

from lightning_rl import PPO, BehaviourCloning, RecordedEpisodes, RolloutDataModule
from lightning_rl.evaluation import Episode

ENV_ID = "LunarLander-v3"
UPDATES, WARM_UP_ROLLOUTS = 20, 10
DATA: dict[str, Any] = {"num_envs": 8, "rollout_length": 128, "eval_episodes": 10}
CLONING: dict[str, Any] = {"learning_rate": 3e-3}
CLONING_BATCHES = 100
SETTINGS: dict[str, Any] = {
    "learning_rate": 1e-3,
    "num_epochs": 4,
    "num_minibatches": 16,
    "gamma": 0.999,
    "gae_lambda": 0.98,
}


def controlled(episodes: int = 40) -> list[Episode]:
    """Return episodes of the controller."""
    env, played = gymnasium.make(ENV_ID), []
    for seed in range(episodes):
        observations, actions, rewards, over = [env.reset(seed=seed)[0]], [], [], False
        while not over:
            actions.append(int(heuristic(env, observations[-1])))
            observation, reward, terminated, truncated, _ = env.step(actions[-1])
            observations.append(observation)
            rewards.append(float(reward))
            over = terminated or truncated
        episode = Episode(sum(rewards), len(rewards), terminated)
        episode.observations, episode.actions = np.stack(observations), np.array(actions)
        episode.rewards = np.array(rewards)
        played.append(episode)
    return played


def scores(seed: int, episodes: list[Episode], folder: Path) -> dict[str, list[float]]:
    """Return what the cloned policy scores, and what PPO makes of it in its first updates."""
    seed_everything(seed)
    recorded = RecordedEpisodes(ENV_ID, episodes, rollouts_per_epoch=CLONING_BATCHES, seed=seed, **DATA)
    cloned = BehaviourCloning(recorded.observation_space, recorded.action_space, **CLONING)
    kept = Scores()
    cloning = quiet_trainer(kept, max_epochs=1)
    cloning.fit(cloned, recorded)
    cloning.save_checkpoint(folder / "cloned.ckpt")
    found = {"cloned": kept.returns}
    for name, rollouts in (("ppo", 0), ("ppo_with_warm_up", WARM_UP_ROLLOUTS)):
        seed_everything(seed)
        data = RolloutDataModule(ENV_ID, rollouts_per_epoch=1, seed=seed, **DATA)
        warm_up = rollouts * data.rollout_length * data.num_envs
        model = PPO(data.observation_space, data.action_space, critic_warmup_steps=warm_up, **SETTINGS)
        model.init_from(folder / "cloned.ckpt")
        kept = Scores()
        quiet_trainer(kept, max_epochs=rollouts + UPDATES).fit(model, data)
        assert kept.returns[:rollouts] == found["cloned"] * rollouts, "the policy is not learned before"
        found[name] = kept.returns[rollouts:]
    return found


def compare(seeds: int) -> dict[str, Any]:
    """Return the scores of every seed, and the lowest share of the cloned policy's in any of the first updates."""
    episodes = controlled()
    with tempfile.TemporaryDirectory() as folder:
        runs = [scores(seed, episodes, Path(folder)) for seed in range(seeds)]
    shares = {
        name: [round(min(run[name]) / run["cloned"][-1], 4) for run in runs] for name in ("ppo", "ppo_with_warm_up")
    }
    return {
        "env_id": ENV_ID,
        "updates": UPDATES,
        "warm_up_rollouts": WARM_UP_ROLLOUTS,
        "data": DATA,
        "cloning": CLONING | {"batches": CLONING_BATCHES},
        "settings": SETTINGS,
        "lowest_share_of_the_cloned_score": shares,
        "mean_score_after_each_update": {
            name: [round(statistics.fmean(at), 2) for at in zip(*(run[name] for run in runs), strict=True)]
            for name in shares
        },
        "scores": runs,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    seeds = parser.parse_args().seeds
    write_result("warm_up/lunarlander", lambda: compare(seeds))

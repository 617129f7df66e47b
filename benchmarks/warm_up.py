"""What becomes of a cloned policy in its first updates, with a critic that was warmed up and with a fresh one.

    OMP_NUM_THREADS=1 python benchmarks/warm_up.py [--seeds 3]

A policy is cloned from episodes of the controller that comes with LunarLander, and PPO goes on from there: at once, or
after `critic_warmup_steps` in which the values alone are learned. Policy and critic share an encoder: that is where the
loss of values that are worth nothing does its harm, and with encoders of their own the policy stood both. Its mode is
evaluated after each of its first updates. The result goes to `benchmarks/results/warm_up/lunarlander.json`.
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
UPDATES, WARM_UP_ROLLOUTS = 6, 20
DATA: dict[str, Any] = {"num_envs": 8, "rollout_length": 128, "eval_episodes": 12, "reward_scale": 0.1}
CLONING: dict[str, Any] = {"learning_rate": 3e-3, "shared_encoder": True}
CLONING_BATCHES = 100
SETTINGS: dict[str, Any] = {
    "learning_rate": 1e-3,
    "num_epochs": 4,
    "num_minibatches": 16,
    "gamma": 0.999,
    "gae_lambda": 0.98,
    "shared_encoder": True,
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
    """Return the scores of every seed, and which share of the cloned policy's score they are."""
    episodes = controlled()
    with tempfile.TemporaryDirectory() as folder:
        runs = [scores(seed, episodes, Path(folder)) for seed in range(seeds)]
    result: dict[str, Any] = {
        "env_id": ENV_ID,
        "updates": UPDATES,
        "warm_up_rollouts": WARM_UP_ROLLOUTS,
        "data": DATA,
        "cloning": CLONING | {"batches": CLONING_BATCHES},
        "settings": SETTINGS,
        "controller": round(statistics.fmean(episode.episode_return for episode in episodes), 2),
    }
    for name in ("ppo", "ppo_with_warm_up"):
        shares = [[score / run["cloned"][-1] for score in run[name]] for run in runs]
        result[name] = {
            "mean_share_of_the_cloned_score": [round(statistics.fmean(share), 4) for share in shares],
            "lowest_share_of_the_cloned_score": [round(min(share), 4) for share in shares],
        }
    return result | {"scores": runs}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    seeds = parser.parse_args().seeds
    write_result("warm_up/lunarlander", lambda: compare(seeds))

"""Measure the first updates of PPO after behavior cloning, with a pretrained and with an untrained critic.

    OMP_NUM_THREADS=1 python benchmarks/warm_up.py [--seeds 3] [--save]

The policy is cloned from episodes of a controller of MountainCar that pushes in the direction of motion. PPO then
starts from this policy, at once or after `optimizer.critic_warmup_steps` that train only the critic. The values of an
untrained critic do not depend on the action: its advantages only reflect the number of remaining steps. Sampled actions
are evaluated after each of the first updates. Needs the extra `envpool`. The result is
`benchmarks/results/warm_up/mountain_car.json`.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from lightning.pytorch import seed_everything
from short_runs import Scores, main, quiet_trainer

from lightning_rl import PPO, BehaviourCloning, RecordedEpisodes, RolloutDataModule
from lightning_rl.rollouts.rollout import Episode

ENV_ID = "MountainCar-v0"
UPDATES, WARM_UP_ROLLOUTS = 6, 150
DATA: dict[str, Any] = {
    "num_envs": 32,
    "rollout_length": 128,
    "backend": "envpool",
    "evaluation": {"episodes": 40, "deterministic": False},
}
CLONING: dict[str, Any] = {"learning_rate": 3e-3}
CLONING_BATCHES = 600
CRITIC: dict[str, Any] = {"critic": {"learning_rate": 1e-3}}
SETTINGS: dict[str, Any] = {"learning_rate": 1e-3, "optimizer": CRITIC, "num_minibatches": 16}


def controlled(episodes: int = 40) -> list[Episode]:
    """Return episodes of the controller."""
    env, played = gymnasium.make(ENV_ID), []
    for seed in range(episodes):
        observations, actions, rewards, over = [env.reset(seed=seed)[0]], [], [], False
        while not over:
            actions.append(2 if observations[-1][1] >= 0 else 0)
            observation, reward, terminated, truncated, _ = env.step(actions[-1])
            observations.append(observation)
            rewards.append(float(reward))
            over = terminated or truncated
        episode = Episode(episode_return=sum(rewards), length=len(rewards), terminated=terminated)
        episode.observations, episode.actions = np.stack(observations), np.array(actions)
        episode.rewards = np.array(rewards)
        played.append(episode)
    return played


def scores(seed: int, episodes: list[Episode], folder: Path) -> dict[str, list[float]]:
    """Return the scores of the cloned policy, and of the policy after each of the first updates of PPO."""
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
        begun, *found[name] = first_updates(folder, rollouts, seed)
        assert [begun] == found["cloned"], "the policy is not learned before"
    return found


def first_updates(folder: Path, rollouts: int, seed: int) -> list[float]:
    """Return the score of the initial policy, and the scores after each of the first updates of PPO.

    Args:
        folder: Folder with the checkpoint of the cloned policy.
        rollouts: Number of warm-up rollouts before those updates, without evaluation.
        seed: Seed of the environments.
    """
    data = RolloutDataModule(ENV_ID, rollouts_per_epoch=1, seed=seed, **DATA)

    def make_model(critic_warmup_steps: int = 0) -> PPO:
        options = SETTINGS | {"optimizer": CRITIC | {"critic_warmup_steps": critic_warmup_steps}}
        model = PPO(data.observation_space, data.action_space, **options)
        model.init_from(folder / "cloned.ckpt")
        return model

    warm = None
    if rollouts:
        warming = quiet_trainer(max_epochs=rollouts, limit_val_batches=0)
        # Reset steps do not count as environment steps, so the warm-up must be limited by rollouts.
        warming.fit(make_model(critic_warmup_steps=2 * rollouts * data.rollout_length * data.num_envs), data)
        warming.save_checkpoint(warm := folder / "warm.ckpt")
    model = make_model()
    kept = Scores()
    learning = quiet_trainer(kept, max_epochs=rollouts + UPDATES)
    learning.validate(model, data, verbose=False)
    learning.fit(model, data, ckpt_path=warm and str(warm))
    return kept.returns


def compare(seeds: int) -> dict[str, Any]:
    """Return the scores of every seed, and the share of the cloned policy's score that remains.

    A score is minus the number of steps of the car. The share is 0.5 if the car takes twice as many steps; its minimum
    is about 60 %, since episodes are truncated after 200 steps.
    """
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
        shares = [[run["cloned"][-1] / score for score in run[name]] for run in runs]
        result[name] = {
            "mean_share_of_the_cloned_score": [round(statistics.fmean(share), 4) for share in shares],
            "lowest_share_of_the_cloned_score": [round(min(share), 4) for share in shares],
        }
    return result | {"scores": runs}


if __name__ == "__main__":
    main(__doc__, "warm_up/mountain_car", compare)

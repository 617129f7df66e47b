"""Stable-Baselines3's PPO on a workload, with its vector environment, normalization and networks."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import measure

run = measure.begin()

import stable_baselines3  # noqa: E402
import torch  # noqa: E402
from environments import EPISODE_RETURNS, factories  # noqa: E402
from sb3_ticks import Ticks  # noqa: E402
from stable_baselines3 import PPO  # noqa: E402
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecNormalize  # noqa: E402

run.imported()
workload = run.workload

environments: VecEnv = DummyVecEnv(factories(workload, own_normalization=True))
if workload["normalize"]:
    environments = VecNormalize(environments, gamma=workload["gamma"])
policy, policy_options = "CnnPolicy", {}
if workload["hidden"]:
    layers = {"pi": workload["hidden"], "vf": workload["hidden"]}
    policy, policy_options = "MlpPolicy", {"net_arch": layers, "activation_fn": torch.nn.Tanh}
PPO(
    policy,
    environments,
    learning_rate=workload["lr"],
    n_steps=workload["num_steps"],
    batch_size=workload["minibatch"],
    n_epochs=workload["epochs"],
    gamma=workload["gamma"],
    gae_lambda=workload["gae_lambda"],
    clip_range=workload["clip"],
    normalize_advantage=workload["norm_adv"],
    ent_coef=workload["ent_coef"],
    # SB3's value loss lacks the factor ½ that the workloads mean.
    vf_coef=workload["vf_coef"] / 2,
    max_grad_norm=workload["max_grad_norm"],
    policy_kwargs=policy_options,
    device="cpu",
    seed=run.args.seed,
).learn(workload["rollouts"] * workload["rows"], callback=Ticks(run.clock))
run.report("sb3", stable_baselines3.__version__, EPISODE_RETURNS)

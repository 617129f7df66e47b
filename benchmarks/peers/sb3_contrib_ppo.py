"""SB3-Contrib's RecurrentPPO on the workload with memory: separate LSTMs of actor and critic, followed by layers."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import measure

run = measure.begin()

import sb3_contrib  # noqa: E402
import torch  # noqa: E402
from environments import EPISODE_RETURNS, factories  # noqa: E402
from sb3_contrib import RecurrentPPO  # noqa: E402
from sb3_ticks import Ticks  # noqa: E402
from stable_baselines3.common.vec_env import DummyVecEnv  # noqa: E402

run.imported()
workload = run.workload
layers = {"pi": workload["hidden"], "vf": workload["hidden"]}
RecurrentPPO(
    "MlpLstmPolicy",
    DummyVecEnv(factories(workload, own_normalization=True)),
    learning_rate=workload["lr"],
    n_steps=workload["num_steps"],
    batch_size=workload["minibatch"],
    n_epochs=workload["epochs"],
    gamma=workload["gamma"],
    gae_lambda=workload["gae_lambda"],
    clip_range=workload["clip"],
    normalize_advantage=workload["norm_adv"],
    ent_coef=workload["ent_coef"],
    # Its value loss lacks the factor ½ that the workloads mean.
    vf_coef=workload["vf_coef"] / 2,
    max_grad_norm=workload["max_grad_norm"],
    policy_kwargs={"net_arch": layers, "activation_fn": torch.nn.Tanh, "lstm_hidden_size": workload["lstm"]},
    device="cpu",
    seed=run.args.seed,
).learn(workload["rollouts"] * workload["rows"], callback=Ticks(run.clock))
run.report("sb3_contrib", sb3_contrib.__version__, EPISODE_RETURNS)

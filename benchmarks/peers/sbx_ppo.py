"""SBX's PPO on a workload: Stable-Baselines3's loop and environments, with the update compiled by JAX."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import measure

os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
run = measure.begin(images=False)

import sbx  # noqa: E402
import torch  # noqa: E402, F401 - of Stable-Baselines3's loop; gets as many threads as the others
from environments import EPISODE_RETURNS, factories  # noqa: E402
from flax import linen  # noqa: E402
from sb3_ticks import Ticks  # noqa: E402
from stable_baselines3.common.vec_env import DummyVecEnv  # noqa: E402

run.imported()
workload = run.workload
sbx.PPO(
    "MlpPolicy",
    DummyVecEnv(factories(workload, own_normalization=False)),
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
    policy_kwargs={"net_arch": workload["hidden"], "activation_fn": linen.tanh},
    seed=run.args.seed,
).learn(workload["rollouts"] * workload["rows"], callback=Ticks(run.clock))
run.report("sbx", sbx.__version__, EPISODE_RETURNS, note="update compiled by JAX")

"""sheeprl's PPO on a workload by its command line, over its `SyncVectorEnv`.

Its Gaussian policies have standard deviations that depend on the observation.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

import measure

run = measure.begin()

import gymnasium  # noqa: E402
from environments import EPISODE_RETURNS, factories  # noqa: E402
from gymnasium.wrappers import FrameStackObservation  # noqa: E402
from sheeprl.algos.ppo import ppo  # noqa: E402
from sheeprl.cli import run as run_sheeprl  # noqa: E402

run.imported()
workload = run.workload
train = ppo.train


def make_environment() -> gymnasium.Env[Any, Any]:
    """Return one environment; sheeprl stacks frames."""
    environment = factories(workload, own_normalization=False)[0]()
    return environment.env if isinstance(environment, FrameStackObservation) else environment


def train_and_tick(*arguments: Any, **options: Any) -> int:
    steps: int = train(*arguments, **options)
    run.tick()
    return steps


ppo.train = train_and_tick
scratch = tempfile.mkdtemp()
settings = {
    "exp": "ppo",
    "seed": run.args.seed,
    "num_threads": measure.THREADS,
    "log_root": scratch,
    "hydra.run.dir": scratch,
    "metric.log_level": 0,
    "metric.disable_timer": True,
    "checkpoint.every": 10**9,
    "checkpoint.save_last": False,
    "buffer.memmap": False,
    "env.id": "workload",
    "env.wrapper._target_": "__main__.make_environment",
    "~env.wrapper.id": None,
    "~env.wrapper.render_mode": None,
    "env.num_envs": workload["num_envs"],
    "env.sync_env": True,
    "env.capture_video": False,
    "algo.run_test": False,
    "algo.total_steps": workload["rollouts"] * workload["rows"],
    "algo.rollout_steps": workload["num_steps"],
    "algo.per_rank_batch_size": workload["minibatch"],
    "algo.update_epochs": workload["epochs"],
    "algo.normalize_advantages": workload["norm_adv"],
    "algo.gamma": workload["gamma"],
    "algo.gae_lambda": workload["gae_lambda"],
    "algo.clip_coef": workload["clip"],
    "algo.ent_coef": workload["ent_coef"],
    # Its value loss lacks the factor ½ that the workloads mean.
    "algo.vf_coef": workload["vf_coef"] / 2,
    "algo.max_grad_norm": workload["max_grad_norm"],
    "algo.optimizer.lr": workload["lr"],
    "algo.optimizer.eps": workload["adam_eps"],
    "algo.encoder.mlp_layers": 0,
    "algo.encoder.mlp_features_dim": "null",
}
if not workload["hidden"]:
    settings |= {
        "algo.mlp_keys.encoder": "[]",
        "algo.cnn_keys.encoder": "[image]",
        "algo.actor.mlp_layers": 0,
        "algo.actor.dense_units": 512,  # what the head expects
        "algo.critic.mlp_layers": 0,
        "env.frame_stack": 4,
        "env.screen_size": 84,
        "env.grayscale": True,
    }
sys.argv[1:] = [name if value is None else f"{name}={value}" for name, value in settings.items()]
with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
    run_sheeprl()
run.report("sheeprl", version("sheeprl"), EPISODE_RETURNS)

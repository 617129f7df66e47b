"""rl_games' PPO on a workload, over Gymnasium's `SyncVectorEnv`, with its model compiled, as is its default.

Advantages are normalized over the whole rollout, and the epsilon of its Adam is fixed.
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

import numpy as np  # noqa: E402
from environments import EPISODE_RETURNS, factories  # noqa: E402
from gymnasium import spaces  # noqa: E402
from gymnasium.vector import AutoresetMode, SyncVectorEnv  # noqa: E402
from rl_games.common import env_configurations, vecenv  # noqa: E402
from rl_games.common.algo_observer import AlgoObserver  # noqa: E402
from rl_games.common.ivecenv import IVecEnv  # noqa: E402
from rl_games.torch_runner import Runner  # noqa: E402

run.imported()
workload = run.workload


class Environments(IVecEnv):  # type: ignore[misc]
    """Gymnasium's environments with the interface of rl_games: one array of flags, the time limit in the infos."""

    def __init__(self) -> None:
        makers = factories(workload, own_normalization=False)
        self.env: Any = SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)

    def reset(self) -> Any:
        return self._observed(self.env.reset(seed=run.args.seed)[0])

    def step(self, actions: Any) -> Any:
        observations, rewards, terminated, truncated, _ = self.env.step(actions)
        return (
            self._observed(observations),
            rewards.astype(np.float32),
            terminated | truncated,
            {"time_outs": truncated},
        )

    def get_env_info(self) -> dict[str, Any]:
        observed = self.env.single_observation_space
        if observed.dtype != np.uint8:
            observed = spaces.Box(-np.inf, np.inf, observed.shape, np.float32)
        # Without wrappers: actions are scaled to the bounds, which `ClipAction` takes away.
        return {"observation_space": observed, "action_space": self.env.envs[0].unwrapped.action_space, "agents": 1}

    def _observed(self, observations: Any) -> Any:
        return observations if observations.dtype == np.uint8 else observations.astype(np.float32)


class Ticks(AlgoObserver):  # type: ignore[misc]
    """Ticks the clock; rl_games calls it twice after each update, and only the first call counts."""

    epoch = 0

    def after_print_stats(self, frame: int, epoch_num: int, total_time: float) -> None:
        if epoch_num > self.epoch:
            self.epoch = epoch_num
            run.tick()


def orthogonal(gain: float) -> dict[str, Any]:
    return {"name": "orthogonal_initializer", "gain": gain}


def network() -> dict[str, Any]:
    hidden = workload["hidden"] or [512]
    wanted: dict[str, Any] = {
        "name": "actor_critic",
        "separate": bool(workload["hidden"]),
        "mlp": {"units": hidden, "activation": workload["activation"], "initializer": orthogonal(2**0.5)},
        "space": {"discrete": None},
    }
    if workload["normalize"]:
        gaussian = {"mu_activation": "None", "sigma_activation": "None", "mu_init": orthogonal(0.01)}
        gaussian |= {"sigma_init": {"name": "const_initializer", "val": 0}, "fixed_sigma": True}
        wanted["space"] = {"continuous": gaussian}
    if not workload["hidden"]:
        layers = ((32, 8, 4), (64, 4, 2), (64, 3, 1))
        wanted["cnn"] = {
            "type": "conv2d",
            "permute_input": False,
            "activation": "relu",
            "initializer": orthogonal(2**0.5),
            "convs": [{"filters": n, "kernel_size": size, "strides": step, "padding": 0} for n, size, step in layers],
        }
    return wanted


vecenv.register("GYMNASIUM", lambda name, num_actors, **options: Environments())
env_configurations.register("workload", {"vecenv_type": "GYMNASIUM", "env_creator": lambda **options: None})
kind = "continuous" if workload["normalize"] else "discrete"
params = {
    "seed": run.args.seed,
    "torch_threads": measure.THREADS,
    "algo": {"name": f"a2c_{kind}"},
    "model": {"name": "continuous_a2c_logstd" if kind == "continuous" else "discrete_a2c"},
    "network": network(),
    "config": {
        "name": "benchmark",
        "env_name": "workload",
        "train_dir": tempfile.mkdtemp(),
        "device": "cpu",
        "device_name": "cpu",
        "num_actors": workload["num_envs"],
        "horizon_length": workload["num_steps"],
        "minibatch_size": workload["minibatch"],
        "mini_epochs": workload["epochs"],
        "max_epochs": workload["rollouts"],
        "gamma": workload["gamma"],
        "tau": workload["gae_lambda"],
        "learning_rate": workload["lr"],
        "lr_schedule": None,
        "truncate_grads": True,
        "grad_norm": workload["max_grad_norm"],
        "e_clip": workload["clip"],
        "clip_value": False,
        "critic_coef": workload["vf_coef"],
        "entropy_coef": workload["ent_coef"],
        "bounds_loss_coef": 0.0,
        "normalize_advantage": workload["norm_adv"],
        "normalize_input": False,
        "normalize_value": False,
        "value_bootstrap": False,
        "reward_shaper": {"scale_value": 1.0},
        "score_to_win": float("inf"),
        "print_stats": False,
        "save_frequency": 0,
        "save_best_after": 10**9,
    },
}
with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
    os.chdir(tempfile.mkdtemp())
    runner = Runner(Ticks())
    runner.load({"params": params})
    runner.run({"train": True})
note = "advantages normalised over the rollout; compiled model"
run.report("rl_games", version("rl-games"), EPISODE_RETURNS, note=note)

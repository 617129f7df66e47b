"""DI-engine's on-policy PPG on a workload, by its serial pipeline.

It learns policy and value in separate passes with equal numbers of gradient steps, and clips values. Its auxiliary
phase has minibatches of the same size. Both packages have two networks, and one auxiliary value head on the policy.
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
import torch  # noqa: E402
from ding.entry.serial_entry_onpolicy_ppg import serial_pipeline_onpolicy_ppg  # noqa: E402
from ding.envs import BaseEnv, BaseEnvTimestep  # noqa: E402
from ding.policy.ppg import PPGPolicy  # noqa: E402
from easydict import EasyDict  # noqa: E402
from environments import EPISODE_RETURNS, factories  # noqa: E402

run.imported()
workload = run.workload


class Environment(BaseEnv):  # type: ignore[misc]
    """One environment of the workload with the interface of DI-engine."""

    def __init__(self, cfg: Any) -> None:
        self._env = factories(workload, own_normalization=False)[0]()
        self._seed: int | None = None
        self._return = 0.0
        self.observation_space, self.action_space = self._env.observation_space, self._env.action_space
        self.reward_space = None

    def seed(self, seed: int, dynamic_seed: bool = True) -> None:
        self._seed = seed

    def reset(self) -> Any:
        observation, _ = self._env.reset(seed=self._seed)
        self._seed, self._return = None, 0.0
        return observation

    def step(self, action: Any) -> BaseEnvTimestep:
        observation, reward, terminated, truncated, info = self._env.step(int(np.asarray(action).item()))
        self._return += float(reward)
        done = terminated or truncated
        if done:
            info["eval_episode_return"] = self._return
        return BaseEnvTimestep(observation, np.array([reward], np.float32), done, info)

    def close(self) -> None:
        self._env.close()

    def __repr__(self) -> str:
        return f"Environment({workload['env_id']})"


learn = PPGPolicy._forward_learn


def learn_and_tick(self: PPGPolicy, data: Any) -> Any:
    found = learn(self, data)
    run.tick()
    return found


PPGPolicy._forward_learn = learn_and_tick
never = 10**9
settings = {
    "exp_name": "benchmark",
    "env": {
        "collector_env_num": workload["num_envs"],
        "evaluator_env_num": 1,
        "n_evaluator_episode": 1,
        "stop_value": never,
    },
    "policy": {
        "cuda": False,
        "on_policy": True,
        "model": {
            "obs_shape": 4,
            "action_shape": 2,
            "share_encoder": False,
            "encoder_hidden_size_list": workload["hidden"],
            "actor_head_hidden_size": workload["hidden"][-1],
            "critic_head_hidden_size": workload["hidden"][-1],
            "activation": torch.nn.Tanh(),
        },
        "learn": {
            "actor_epoch_per_collect": workload["epochs"],
            "critic_epoch_per_collect": workload["epochs"],
            "batch_size": workload["minibatch"],
            "learning_rate": workload["lr"],
            # Its value loss has the factor ½ already, as ours.
            "value_weight": workload["vf_coef"],
            "entropy_weight": workload["ent_coef"],
            "clip_ratio": workload["clip"],
            "adv_norm": workload["norm_adv"],
            "aux_freq": workload["policy_iterations"],
            "aux_train_epoch": workload["aux_epochs"],
            "aux_bc_weight": 1,
            "learner": {"hook": {"save_ckpt_after_iter": never, "log_show_after_iter": never}},
        },
        "collect": {
            "n_sample": workload["rows"],
            "unroll_len": 1,
            "discount_factor": workload["gamma"],
            "gae_lambda": workload["gae_lambda"],
        },
        "eval": {"evaluator": {"eval_freq": never}},
    },
}
kinds = {
    "env": {"type": "cartpole", "import_names": []},
    "env_manager": {"type": "base"},
    "policy": {"type": "ppg"},
}
os.chdir(tempfile.mkdtemp())
with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
    serial_pipeline_onpolicy_ppg(
        (EasyDict(settings), EasyDict(kinds)),
        seed=run.args.seed,
        env_setting=[Environment, [EasyDict()] * workload["num_envs"], [EasyDict()]],
        max_env_step=workload["rollouts"] * workload["rows"],
    )
note = "policy and value learned in separate passes"
run.report("ding", version("DI-engine"), EPISODE_RETURNS, note=note)

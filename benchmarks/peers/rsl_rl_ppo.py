"""rsl_rl's PPO and runner on a workload, over Gymnasium's `SyncVectorEnv`.

It supports continuous actions only: on CartPole the sign of one Gaussian selects the action, so its policy differs.
Workloads with images are not supported. Gymnasium's wrappers normalize observations, as for other peers.
"""

from __future__ import annotations

import contextlib
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

import measure

run = measure.begin(images=False)

import numpy as np  # noqa: E402
import torch  # noqa: E402
from environments import EPISODE_RETURNS, factories  # noqa: E402
from gymnasium.spaces import Discrete  # noqa: E402
from gymnasium.vector import AutoresetMode, SyncVectorEnv  # noqa: E402
from rsl_rl.env import VecEnv  # noqa: E402
from rsl_rl.runners import OnPolicyRunner  # noqa: E402
from tensordict import TensorDict  # noqa: E402
from torch import Tensor  # noqa: E402

run.imported()
workload = run.workload
torch.manual_seed(run.args.seed)


class Environments(VecEnv):  # type: ignore[misc]
    """Gymnasium's environments with the interface of rsl_rl: tensors, joint flags, the time limit in the extras."""

    def __init__(self) -> None:
        makers = factories(workload, own_normalization=False)
        self.env: Any = SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)
        self.discrete = isinstance(self.env.single_action_space, Discrete)
        self.num_envs, self.device, self.cfg = workload["num_envs"], "cpu", {}
        self.num_actions = 1 if self.discrete else self.env.single_action_space.shape[0]
        self.max_episode_length = 1000
        self.episode_length_buf = torch.zeros(self.num_envs, dtype=torch.long)
        self.observations = self._observed(self.env.reset(seed=run.args.seed)[0])

    def get_observations(self) -> TensorDict:
        return self.observations

    def step(self, actions: Tensor) -> tuple[TensorDict, Tensor, Tensor, dict[str, Any]]:
        chosen = (actions[:, 0] > 0).long() if self.discrete else actions
        observations, rewards, terminated, truncated, _ = self.env.step(chosen.numpy())
        self.observations = self._observed(observations)
        # Without "time_outs" in the extras a time limit is an end, as in the other peers on these environments.
        ended = torch.from_numpy(terminated | truncated)
        return self.observations, torch.from_numpy(rewards.astype(np.float32)), ended, {}

    def _observed(self, observations: Any) -> TensorDict:
        return TensorDict({"policy": torch.from_numpy(observations.astype(np.float32))}, batch_size=[self.num_envs])


model = {
    "class_name": "MLPModel",
    "hidden_dims": workload["hidden"],
    "activation": workload["activation"],
    "obs_normalization": False,
}
settings = {
    "num_steps_per_env": workload["num_steps"],
    "save_interval": 10**9,
    "obs_groups": {"actor": ["policy"], "critic": ["policy"]},
    "actor": model | {"distribution_cfg": {"class_name": "GaussianDistribution", "init_std": 1.0, "std_type": "log"}},
    "critic": model,
    "algorithm": {
        "class_name": "PPO",
        "num_learning_epochs": workload["epochs"],
        "num_mini_batches": workload["minibatches"],
        "clip_param": workload["clip"],
        "gamma": workload["gamma"],
        "lam": workload["gae_lambda"],
        # Its value loss lacks the factor ½ that the workloads mean.
        "value_loss_coef": workload["vf_coef"] / 2,
        "entropy_coef": workload["ent_coef"],
        "learning_rate": workload["lr"],
        "max_grad_norm": workload["max_grad_norm"],
        "use_clipped_value_loss": False,
        "schedule": "fixed",
        "normalize_advantage_per_mini_batch": workload["norm_adv"],
    },
}
with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
    runner = OnPolicyRunner(Environments(), settings, log_dir=None, device="cpu")
    update = runner.alg.update

    def update_and_tick() -> Any:
        losses = update()
        run.tick()
        return losses

    runner.alg.update = update_and_tick
    runner.learn(workload["rollouts"])
note = "a Gaussian's sign chooses the action" if run.args.workload == "W1" else ""
run.report("rsl_rl", version("rsl-rl-lib"), EPISODE_RETURNS, note=note)

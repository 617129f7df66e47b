"""One update of rsl_rl's PPO: `python make_rsl_rl.py`, with rsl-rl-lib 5.5.1."""

import numpy as np
import torch
from rsl_rl.env import VecEnv
from rsl_rl.runners import OnPolicyRunner
from scripted import (
    HIDDEN,
    LEARNING_RATE,
    LENGTH,
    NUM_ENVS,
    NUM_EPOCHS,
    NUM_MINIBATCHES,
    ScriptedVector,
    perturb,
    save,
    weights,
)
from tensordict import TensorDict

randperm, orders = torch.randperm, []


def recorded_randperm(*args, **kwargs):
    orders.append(randperm(*args, **kwargs))
    return orders[-1]


class Environments(VecEnv):
    def __init__(self):
        self.env = ScriptedVector()
        self.num_envs, self.num_actions, self.device, self.cfg = NUM_ENVS, 2, "cpu", {}
        self.max_episode_length = 1000
        self.episode_length_buf = torch.zeros(NUM_ENVS, dtype=torch.long)
        self.observations = self._observed(self.env.reset())

    def get_observations(self):
        return self.observations

    def step(self, actions):
        observations, _, rewards, terminated, truncated = self.env.step()
        self.observations = self._observed(observations)
        dones, time_outs = torch.from_numpy(terminated | truncated), torch.from_numpy(truncated)
        return self.observations, torch.from_numpy(rewards), dones, {"time_outs": time_outs}

    def _observed(self, observations):
        return TensorDict({"policy": torch.from_numpy(observations)}, batch_size=[NUM_ENVS])


def all_weights(algorithm):
    actor, critic = algorithm.actor, algorithm.critic
    layers = {"actor": [actor.mlp[i] for i in (0, 2, 4)], "critic": [critic.mlp[i] for i in (0, 2, 4)]}
    return weights(layers, actor.distribution.log_std_param)


model = {"class_name": "MLPModel", "hidden_dims": list(HIDDEN), "activation": "tanh", "obs_normalization": False}
gaussian = {"class_name": "GaussianDistribution", "init_std": 1.0, "std_type": "log"}
settings = {
    "num_steps_per_env": LENGTH,
    "save_interval": 10**9,
    "obs_groups": {"actor": ["policy"], "critic": ["policy"]},
    "actor": model | {"distribution_cfg": gaussian},
    "critic": model,
    "algorithm": {
        "class_name": "PPO",
        "num_learning_epochs": NUM_EPOCHS,
        "num_mini_batches": NUM_MINIBATCHES,
        "learning_rate": LEARNING_RATE,
        "schedule": "fixed",
    },
}
torch.manual_seed(0)
runner = OnPolicyRunner(Environments(), settings, log_dir=None, device="cpu")
algorithm = runner.alg
perturb([*algorithm.actor.parameters(), *algorithm.critic.parameters()])
initial, recorded, update = all_weights(algorithm), {}, algorithm.update


def recorded_update():
    storage = algorithm.storage
    for name in ("actions", "actions_log_prob", "values"):
        recorded[name] = getattr(storage, name).numpy().copy()
    torch.randperm = recorded_randperm
    losses = update()
    torch.randperm = randperm
    return losses


algorithm.update = recorded_update
runner.learn(1)
save(
    "rsl_rl_ppo_continuous",
    initial=initial,
    final=all_weights(algorithm),
    orders=orders * NUM_EPOCHS,
    actions=recorded["actions"],
    log_probs=recorded["actions_log_prob"].squeeze(-1),
    values=recorded["values"].squeeze(-1),
    torch=np.array(torch.__version__),
)

"""One update of rl_games' PPO: `python make_rl_games.py`, with rl-games 1.6.5."""

import os
import tempfile

import numpy as np
import torch
from rl_games.common import env_configurations, vecenv
from rl_games.common.ivecenv import IVecEnv
from rl_games.torch_runner import Runner
from scripted import (
    HIDDEN,
    LEARNING_RATE,
    LENGTH,
    NUM_ENVS,
    NUM_EPOCHS,
    NUM_MINIBATCHES,
    OBSERVATION_SPACE,
    ROWS,
    SPACES,
    ScriptedVector,
    perturb,
    save,
    time_major,
    weights,
)


class Environments(IVecEnv):
    def __init__(self, kind):
        self.env, self.kind = ScriptedVector(), kind

    def reset(self):
        return self.env.reset()

    def step(self, actions):
        observations, _, rewards, terminated, truncated = self.env.step()
        return observations, rewards, terminated | truncated, {"time_outs": truncated}

    def get_env_info(self):
        return {"observation_space": OBSERVATION_SPACE, "action_space": SPACES[self.kind], "agents": 1}


def all_weights(network):
    actor, critic = network.actor_mlp, network.critic_mlp
    head = network.mu if hasattr(network, "mu") else network.logits
    layers = {"actor": [actor[0], actor[2], head], "critic": [critic[0], critic[2], network.value]}
    return weights(layers, getattr(network, "sigma", None))


def config(kind):
    gaussian = {"mu_activation": "None", "sigma_activation": "None", "mu_init": {"name": "default"}}
    gaussian |= {"sigma_init": {"name": "const_initializer", "val": 0}, "fixed_sigma": True}
    return {
        "seed": 0,
        "torch_threads": 1,
        "algo": {"name": f"a2c_{kind}"},
        "model": {"name": "continuous_a2c_logstd" if kind == "continuous" else "discrete_a2c"},
        "network": {
            "name": "actor_critic",
            "separate": True,
            "mlp": {"units": list(HIDDEN), "activation": "tanh", "initializer": {"name": "default"}},
            "space": {"continuous": gaussian} if kind == "continuous" else {"discrete": None},
        },
        "config": {
            "name": "parity",
            "env_name": kind,
            "train_dir": tempfile.mkdtemp(),
            "device": "cpu",
            "device_name": "cpu",
            "num_actors": NUM_ENVS,
            "horizon_length": LENGTH,
            "minibatch_size": ROWS // NUM_MINIBATCHES,
            "mini_epochs": NUM_EPOCHS,
            "max_epochs": 1,
            "gamma": 0.99,
            "tau": 0.95,
            "learning_rate": LEARNING_RATE,
            "lr_schedule": None,
            "truncate_grads": True,
            "grad_norm": 1.0,
            "e_clip": 0.2,
            "clip_value": True,
            "critic_coef": 2.0,
            "entropy_coef": 0.01,
            "bounds_loss_coef": 0.0,
            "normalize_advantage": True,
            "normalize_input": False,
            "normalize_value": False,
            "value_bootstrap": True,
            "reward_shaper": {"scale_value": 1.0},
            "score_to_win": float("inf"),
            "print_stats": False,
            "save_frequency": 0,
            "save_best_after": 10**9,
        },
    }


folder = os.getcwd()
vecenv.register("SCRIPTED", lambda name, num_actors, **options: Environments(name))
for kind in SPACES:
    env_configurations.register(kind, {"vecenv_type": "SCRIPTED", "env_creator": lambda **options: None})
    os.chdir(tempfile.mkdtemp())
    runner = Runner()
    runner.load({"params": config(kind)})
    agent = runner.algo_factory.create(runner.algo_name, base_name="run", params=runner.params)
    network = agent.model.a2c_network
    perturb(network.parameters())
    initial, recorded, prepare = all_weights(network), {}, agent.prepare_dataset

    def recorded_prepare(batch, recorded=recorded, prepare=prepare):
        recorded |= {name: batch[name].numpy().copy() for name in ("actions", "neglogpacs", "values")}
        prepare(batch)

    agent.prepare_dataset = recorded_prepare
    agent.train()
    os.chdir(folder)
    rows = {name: array.reshape(NUM_ENVS, LENGTH, *array.shape[1:]).swapaxes(0, 1) for name, array in recorded.items()}
    save(
        f"rl_games_ppo_{kind}",
        initial=initial,
        final=all_weights(network),
        # Its minibatches are not shuffled: some environments after the others.
        orders=[time_major(np.arange(ROWS))] * NUM_EPOCHS,
        actions=rows["actions"],
        log_probs=-rows["neglogpacs"],
        values=rows["values"].squeeze(-1),
        torch=np.array(torch.__version__),
    )

"""One update of Stable-Baselines3's PPO and A2C: `python make_sb3.py`, with stable_baselines3 2.9.2."""

import functools
import itertools

import numpy as np
import torch
from scripted import (
    HIDDEN,
    LEARNING_RATE,
    LENGTH,
    NUM_ENVS,
    NUM_EPOCHS,
    NUM_MINIBATCHES,
    ROWS,
    SPACES,
    Scripted,
    perturb,
    recorded_permutations,
    save,
    time_major,
    weights,
)
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.vec_env import DummyVecEnv

orders = recorded_permutations()


def all_weights(policy):
    actor = [policy.mlp_extractor.policy_net[0], policy.mlp_extractor.policy_net[2], policy.action_net]
    critic = [policy.mlp_extractor.value_net[0], policy.mlp_extractor.value_net[2], policy.value_net]
    return weights({"actor": actor, "critic": critic}, getattr(policy, "log_std", None))


ppo = {"batch_size": ROWS // NUM_MINIBATCHES, "n_epochs": NUM_EPOCHS}
for (name, algorithm, options), kind in itertools.product((("ppo", PPO, ppo), ("a2c", A2C, {})), SPACES):
    orders.clear()
    Scripted.made = 0
    model = algorithm(
        "MlpPolicy",
        DummyVecEnv([functools.partial(Scripted, kind)] * NUM_ENVS),
        learning_rate=LEARNING_RATE,
        n_steps=LENGTH,
        policy_kwargs={"net_arch": list(HIDDEN)},
        device="cpu",
        seed=0,
        **options,
    )
    perturb(model.policy.parameters())
    initial = all_weights(model.policy)
    model.learn(ROWS)
    buffer = model.rollout_buffer

    def rows(array, buffer=buffer):
        """The buffer is flattened over environments when minibatches are taken."""
        return array.reshape(NUM_ENVS, LENGTH, *array.shape[1:]).swapaxes(0, 1)

    save(
        f"sb3_{name}_{kind}",
        initial=initial,
        final=all_weights(model.policy),
        orders=[time_major(order) for order in orders],
        actions=rows(buffer.actions).squeeze(-1).astype(np.int64) if kind == "discrete" else rows(buffer.actions),
        log_probs=rows(buffer.log_probs).squeeze(-1),
        values=rows(buffer.values).squeeze(-1),
        torch=np.array(torch.__version__),
    )

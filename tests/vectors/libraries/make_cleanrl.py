"""One update of CleanRL's PPO: `python make_cleanrl.py <folder of its scripts>`.

Runs `ppo.py` and `ppo_continuous_action.py` for one iteration (commit fe8d8a0, gymnasium 0.29.1) and reads their
variables.
"""

import os
import runpy
import sys
import tempfile

import gymnasium
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
    Scripted,
    perturb,
    save,
    weights,
)

scripts = os.path.abspath(sys.argv[1])
shuffle, adam, linear = np.random.shuffle, torch.optim.Adam, torch.nn.Linear
orders, initial = [], {}


def recorded_shuffle(indices):
    shuffle(indices)
    orders.append(indices.copy())


def small_linear(inputs, outputs):
    """CleanRL's layers of 64 units are fixed in its scripts."""
    sizes = {64: HIDDEN[0]}
    return linear(sizes.get(inputs, inputs), sizes.get(outputs, outputs))


def recorded_adam(parameters, **options):
    parameters = list(parameters)
    perturb(parameters)
    initial.update({id(parameter): parameter.detach().clone() for parameter in parameters})
    return adam(parameters, **options)


def all_weights(agent, of=lambda layer: layer):
    actor = agent.actor if hasattr(agent, "actor") else agent.actor_mean
    layers = {"actor": [of(actor[i]) for i in (0, 2, 4)], "critic": [of(agent.critic[i]) for i in (0, 2, 4)]}
    return weights(layers, agent.actor_logstd if hasattr(agent, "actor_logstd") else None)


def all_initial_weights(agent):
    final = {parameter: parameter.detach().clone() for parameter in agent.parameters()}
    with torch.no_grad():
        for parameter in final:
            parameter.copy_(initial[id(parameter)])
        found = all_weights(agent)
        for parameter, value in final.items():
            parameter.copy_(value)
    return found


np.random.shuffle, torch.optim.Adam, torch.nn.Linear = recorded_shuffle, recorded_adam, small_linear
folder = os.path.dirname(os.path.abspath(__file__))
for kind, script in (("discrete", "ppo.py"), ("continuous", "ppo_continuous_action.py")):
    orders.clear()
    initial.clear()
    Scripted.made = 0
    gymnasium.register(f"Scripted-{kind}-v0", entry_point=Scripted, kwargs={"kind": kind}, disable_env_checker=True)
    os.chdir(tempfile.mkdtemp())
    options = {
        "env-id": f"Scripted-{kind}-v0",
        "total-timesteps": ROWS,
        "num-envs": NUM_ENVS,
        "num-steps": LENGTH,
        "num-minibatches": NUM_MINIBATCHES,
        "update-epochs": NUM_EPOCHS,
        "learning-rate": LEARNING_RATE,
    }
    sys.argv = [script, "--no-cuda", *(f"--{name}={value}" for name, value in options.items())]
    found = runpy.run_path(os.path.join(scripts, script), run_name="__main__")
    agent = found["agent"]
    os.chdir(folder)
    save(
        f"cleanrl_ppo_{kind}",
        initial=all_initial_weights(agent),
        final=all_weights(agent),
        orders=orders,
        actions=found["actions"].numpy().astype(np.int64) if kind == "discrete" else found["actions"].numpy(),
        log_probs=found["logprobs"].numpy(),
        values=found["values"].numpy(),
        # After the normalization by Gymnasium's wrappers in the continuous script.
        observations=torch.cat([found["obs"], found["next_obs"].unsqueeze(0)]).numpy(),
        rewards=found["rewards"].numpy(),
        torch=np.array(torch.__version__),
    )

"""One update of skrl's PPO: `python make_skrl.py`, with skrl 2.1.1.

The agent is given the observation that really followed a truncated step; skrl's trainer gives it the first one of the
next episode if the environments reset themselves.
"""

import tempfile

import numpy as np
import torch
from scripted import (
    LEARNING_RATE,
    LENGTH,
    NUM_ENVS,
    NUM_EPOCHS,
    NUM_MINIBATCHES,
    OBSERVATION_SPACE,
    SPACES,
    ScriptedVector,
    mlp,
    perturb,
    save,
    weights,
)
from skrl.agents.torch.ppo import PPO, PPO_CFG
from skrl.memories.torch import RandomMemory
from skrl.models.torch import CategoricalMixin, DeterministicMixin, GaussianMixin, Model
from torch import nn


class DiscreteActor(CategoricalMixin, Model):
    def __init__(self, **spaces):
        Model.__init__(self, **spaces)
        CategoricalMixin.__init__(self, unnormalized_log_prob=True)
        self.net = mlp(self.num_actions)

    def compute(self, inputs, role):
        return self.net(inputs["observations"]), {}


class GaussianActor(GaussianMixin, Model):
    def __init__(self, **spaces):
        Model.__init__(self, **spaces)
        GaussianMixin.__init__(self, clip_actions=False)
        self.net = mlp(self.num_actions)
        self.log_std = nn.Parameter(torch.zeros(self.num_actions))

    def compute(self, inputs, role):
        return self.net(inputs["observations"]), {"log_std": self.log_std}


class Critic(DeterministicMixin, Model):
    def __init__(self, **spaces):
        Model.__init__(self, **spaces)
        DeterministicMixin.__init__(self)
        self.net = mlp(1)

    def compute(self, inputs, role):
        return self.net(inputs["observations"]), {}


def all_weights(agent):
    layers = {
        part: [net[i] for i in (0, 2, 4)] for part, net in (("actor", agent.policy.net), ("critic", agent.value.net))
    }
    return weights(layers, getattr(agent.policy, "log_std", None))


def column(array):
    return torch.from_numpy(array).unsqueeze(1)


randperm = torch.randperm
for kind, space in SPACES.items():
    torch.manual_seed(0)
    spaces = {"observation_space": OBSERVATION_SPACE, "action_space": space, "device": "cpu"}
    settings = PPO_CFG(
        rollouts=LENGTH,
        learning_epochs=NUM_EPOCHS,
        mini_batches=NUM_MINIBATCHES,
        learning_rate=LEARNING_RATE,
        value_clip=0.0,
        time_limit_bootstrap=True,
    )
    settings.experiment.write_interval = settings.experiment.checkpoint_interval = 0
    settings.experiment.directory = tempfile.mkdtemp()
    agent = PPO(
        models={
            "policy": (DiscreteActor if kind == "discrete" else GaussianActor)(**spaces),
            "value": Critic(**spaces),
        },
        memory=RandomMemory(memory_size=LENGTH, num_envs=NUM_ENVS, device="cpu"),
        cfg=settings,
        **spaces,
    )
    agent.init()
    agent.enable_training_mode(True)
    agent.enable_models_training_mode(False)
    perturb([*agent.policy.parameters(), *agent.value.parameters()])
    initial, orders = all_weights(agent), []

    def recorded_randperm(*args, orders=orders, **kwargs):
        orders.append(randperm(*args, **kwargs))
        return orders[-1]

    torch.randperm = recorded_randperm
    environments = ScriptedVector()
    observations = torch.from_numpy(environments.reset())
    kept = {"actions": [], "log_probs": [], "values": []}
    for t in range(LENGTH):
        times = {"timestep": t, "timesteps": LENGTH}
        agent.pre_interaction(**times)
        with torch.no_grad():
            actions, outputs = agent.act(observations, None, **times)
            kept["actions"].append(actions.numpy().copy())
            kept["log_probs"].append(outputs["log_prob"].numpy().copy())
            kept["values"].append(agent._current_values.numpy().copy())
            following, finals, rewards, terminated, truncated = environments.step()
            agent.record_transition(
                observations=observations,
                states=None,
                actions=actions,
                rewards=column(rewards),
                next_observations=torch.from_numpy(finals),
                next_states=None,
                terminated=column(terminated),
                truncated=column(truncated),
                infos={},
                **times,
            )
        observations = torch.from_numpy(following)
        agent.post_interaction(**times)
    torch.randperm = randperm
    arrays = {name: np.stack(rows) for name, rows in kept.items()}
    save(
        f"skrl_ppo_{kind}",
        initial=initial,
        final=all_weights(agent),
        orders=orders,
        actions=arrays["actions"].squeeze(-1) if kind == "discrete" else arrays["actions"],
        log_probs=arrays["log_probs"].squeeze(-1),
        values=arrays["values"].squeeze(-1),
        torch=np.array(torch.__version__),
    )

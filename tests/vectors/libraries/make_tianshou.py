"""One update of Tianshou's PPO, with `max_grad_norm=0.5`: `python make_tianshou.py`, with tianshou 2.0.1."""

import numpy as np
import torch
from scripted import (
    LEARNING_RATE,
    LENGTH,
    NUM_ENVS,
    NUM_EPOCHS,
    NUM_MINIBATCHES,
    ROWS,
    SPACES,
    mlp,
    perturb,
    recorded_permutations,
    recorded_script,
    save,
    time_major,
    weights,
)
from tianshou.algorithm import PPO
from tianshou.algorithm.modelfree.reinforce import DiscreteActorPolicy, ProbabilisticActorPolicy
from tianshou.algorithm.optim import AdamOptimizerFactory
from tianshou.data import Batch, VectorReplayBuffer
from torch import nn
from torch.distributions import Categorical, Independent, Normal

orders = recorded_permutations()


class Net(nn.Module):
    """An actor, or a critic without `actions`."""

    def __init__(self, actions=None, has_std=False):
        super().__init__()
        self.net, self.is_actor = mlp(actions or 1), actions is not None
        self.log_std = nn.Parameter(torch.zeros(actions)) if has_std else None

    def forward(self, obs, state=None, info=None):
        out = self.net(torch.as_tensor(obs))
        if self.log_std is not None:
            out = out, self.log_std.exp().expand_as(out)
        return (out, state) if self.is_actor else out


def gaussian(parameters):
    return Independent(Normal(*parameters), 1)


for kind, space in SPACES.items():
    np.random.seed(0)
    torch.manual_seed(0)
    if kind == "discrete":
        actor = Net(int(space.n))
        policy = DiscreteActorPolicy(actor=actor, dist_fn=lambda logits: Categorical(logits=logits), action_space=space)
    else:
        actor = Net(space.shape[0], has_std=True)
        unbounded = {"action_scaling": False, "action_bound_method": None}
        policy = ProbabilisticActorPolicy(actor=actor, dist_fn=gaussian, action_space=space, **unbounded)
    critic = Net()
    perturb([*actor.parameters(), *critic.parameters()])
    algorithm = PPO(policy=policy, critic=critic, optim=AdamOptimizerFactory(lr=LEARNING_RATE), max_grad_norm=0.5)

    def all_weights(actor=actor, critic=critic):
        return weights({"actor": actor.net[::2], "critic": critic.net[::2]}, actor.log_std)

    script, actions = recorded_script(), []
    buffer = VectorReplayBuffer(ROWS, NUM_ENVS)
    for t in range(LENGTH):
        with torch.no_grad():
            actions.append(policy(Batch(obs=script["observations"][t], info=Batch())).dist.sample().numpy())
        step = {name: script[name][t] for name in ("terminated", "truncated")}
        step |= {"obs": script["observations"][t], "act": actions[t], "rew": script["rewards"][t]}
        buffer.add(Batch(obs_next=script["finals"][t], info=[{}] * NUM_ENVS, **step), buffer_ids=np.arange(NUM_ENVS))
    initial = all_weights()
    orders.clear()
    batch, indices = buffer.sample(0)
    batch = algorithm._preprocess_batch(batch, buffer, indices)
    algorithm._update_with_batch(batch, ROWS // NUM_MINIBATCHES, NUM_EPOCHS)
    of_rollout = {"log_probs": batch.logp_old, "values": batch.v_s}
    save(
        f"tianshou_ppo_{kind}",
        initial=initial,
        final=all_weights(),
        orders=[time_major(order) for order in orders[-NUM_EPOCHS:]],
        actions=np.stack(actions),
        **{name: x.detach().numpy().reshape(NUM_ENVS, LENGTH).T for name, x in of_rollout.items()},
        torch=np.array(torch.__version__),
    )

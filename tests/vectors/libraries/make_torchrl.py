"""One update of TorchRL's PPO, `GAE` and `ClipPPOLoss`: `python make_torchrl.py`, with torchrl 0.14.1.

The losses have their defaults, and the gradients are clipped as in TorchRL's own examples.
"""

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
    recorded_script,
    save,
    weights,
)
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torch.distributions import Categorical
from torchrl.modules import IndependentNormal, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE


class Gaussian(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net, self.log_std = net, nn.Parameter(torch.zeros(net[-1].out_features))

    def forward(self, observation):
        mean = self.net(observation)
        return mean, self.log_std.exp().expand_as(mean)


for kind, space in SPACES.items():
    torch.manual_seed(0)
    actor_net, critic_net = mlp(space.n if kind == "discrete" else space.shape[0]), mlp(1)
    if kind == "discrete":
        module, keys, distribution = actor_net, ["logits"], Categorical
        options = {}
    else:
        module, keys, distribution = Gaussian(actor_net), ["loc", "scale"], IndependentNormal
        options = {"tanh_loc": False}
    perturb([*module.parameters(), *critic_net.parameters()])
    actor = ProbabilisticActor(
        TensorDictModule(module, ["observation"], keys),
        in_keys=keys,
        distribution_class=distribution,
        distribution_kwargs=options,
        return_log_prob=True,
        default_interaction_type="random",
    )
    critic = ValueOperator(critic_net, in_keys=["observation"])

    def all_weights(module=module, actor_net=actor_net, critic_net=critic_net):
        return weights({"actor": actor_net[::2], "critic": critic_net[::2]}, getattr(module, "log_std", None))

    # Batches of TorchRL are `[B, T]`.
    script = {name: torch.from_numpy(x).transpose(0, 1) for name, x in recorded_script().items()}
    terminated, truncated = script["terminated"].unsqueeze(-1), script["truncated"].unsqueeze(-1)
    following = {
        "observation": script["finals"],
        "reward": script["rewards"].unsqueeze(-1),
        "done": terminated | truncated,
        "terminated": terminated,
    }
    data = TensorDict({"observation": script["observations"][:, :-1], "next": following}, [NUM_ENVS, LENGTH])
    with torch.no_grad():
        data = actor(data)
        GAE(gamma=0.99, lmbda=0.95, value_network=critic)(data)
    rows = data.transpose(0, 1).reshape(ROWS)
    initial, orders = all_weights(), []
    loss_module = ClipPPOLoss(actor, critic)
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=LEARNING_RATE)
    for _ in range(NUM_EPOCHS):
        orders.append(torch.randperm(ROWS))
        for chosen in orders[-1].chunk(NUM_MINIBATCHES):
            losses = loss_module(rows[chosen])
            optimizer.zero_grad()
            sum(loss for name, loss in losses.items() if name.startswith("loss_")).backward()
            nn.utils.clip_grad_norm_(loss_module.parameters(), 0.5)
            optimizer.step()
    of_rollout = {
        "actions": data["action"],
        "log_probs": data["action_log_prob"],
        "values": data["state_value"][..., 0],
    }
    save(
        f"torchrl_ppo_{kind}",
        initial=initial,
        final=all_weights(),
        orders=torch.stack(orders).numpy(),
        **{name: x.transpose(0, 1).numpy() for name, x in of_rollout.items()},
        torch=np.array(torch.__version__),
    )

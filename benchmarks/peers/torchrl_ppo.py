"""TorchRL's PPO on a workload of vectors: its environments, collector, estimator, buffer and loss in a plain loop.

Advantages are computed once for each rollout; TorchRL's example computes them in each epoch, which is slower.
"""

from __future__ import annotations

import itertools
import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

import measure

run = measure.begin(images=False)

import torch  # noqa: E402
import torchrl  # noqa: E402
from environments import EPISODE_RETURNS, factories  # noqa: E402
from gymnasium import spaces  # noqa: E402
from tensordict.nn import TensorDictModule  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.distributions import Categorical  # noqa: E402
from torchrl.collectors import Collector  # noqa: E402
from torchrl.data import LazyTensorStorage, SamplerWithoutReplacement, TensorDictReplayBuffer  # noqa: E402
from torchrl.envs import SerialEnv  # noqa: E402
from torchrl.envs.libs.gym import GymWrapper  # noqa: E402
from torchrl.modules import IndependentNormal, ProbabilisticActor, ValueOperator  # noqa: E402
from torchrl.objectives import ClipPPOLoss  # noqa: E402
from torchrl.objectives.value import GAE  # noqa: E402

run.imported()
workload = run.workload
torch.manual_seed(run.args.seed)

makers = factories(workload, own_normalization=False)
example = makers[0]()
space, action_space = example.observation_space, example.action_space
assert space.shape is not None


def mlp(outputs: int, gain: float) -> nn.Sequential:
    sizes = [*space.shape, *workload["hidden"]]
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(sizes):
        layers += [nn.Linear(before, after), nn.Tanh()]
    layers.append(nn.Linear(sizes[-1], outputs))
    for layer in layers[::2]:
        nn.init.orthogonal_(layer.weight, gain if layer is layers[-1] else 2**0.5)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)


class MeanAndDeviation(nn.Module):
    def __init__(self, actions: int) -> None:
        super().__init__()
        self.mean = mlp(actions, 0.01)
        self.log_deviation = nn.Parameter(torch.zeros(actions))

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        mean = self.mean(observation)
        return mean, self.log_deviation.exp().expand_as(mean)


environments = SerialEnv(
    workload["num_envs"],
    [partial(lambda make: GymWrapper(make(), categorical_action_encoding=True), m) for m in makers],
)
environments.set_seed(run.args.seed)
kind: dict[str, Any]
if isinstance(action_space, spaces.Discrete):
    head = TensorDictModule(mlp(int(action_space.n), 0.01), in_keys=["observation"], out_keys=["logits"])
    kind = {"in_keys": ["logits"], "distribution_class": Categorical}
else:
    head = TensorDictModule(MeanAndDeviation(action_space.shape[0]), in_keys=["observation"], out_keys=["loc", "scale"])
    kind = {"in_keys": ["loc", "scale"], "distribution_class": IndependentNormal}
actor = ProbabilisticActor(head, spec=environments.full_action_spec_unbatched, return_log_prob=True, safe=False, **kind)
critic = ValueOperator(mlp(1, 1.0), in_keys=["observation"])
advantages = GAE(gamma=workload["gamma"], lmbda=workload["gae_lambda"], value_network=critic, average_gae=False)
loss = ClipPPOLoss(
    actor,
    critic,
    clip_epsilon=workload["clip"],
    entropy_coeff=workload["ent_coef"],
    # Its value loss lacks the factor ½ that the workloads mean.
    critic_coeff=workload["vf_coef"] / 2,
    loss_critic_type="l2",
    normalize_advantage=workload["norm_adv"],
)
optimizer = torch.optim.Adam(loss.parameters(), lr=workload["lr"], eps=workload["adam_eps"])
collector = Collector(
    environments,
    actor,
    frames_per_batch=workload["rows"],
    total_frames=workload["rollouts"] * workload["rows"],
)
buffer = TensorDictReplayBuffer(
    storage=LazyTensorStorage(workload["rows"]),
    sampler=SamplerWithoutReplacement(),
    batch_size=workload["minibatch"],
)
for rollout in collector:
    with torch.no_grad():
        advantages(rollout)
    buffer.empty()
    buffer.extend(rollout.reshape(-1))
    for _ in range(workload["epochs"]):
        for minibatch in buffer:
            losses = loss(minibatch)
            optimizer.zero_grad()
            (losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]).backward()
            nn.utils.clip_grad_norm_(loss.parameters(), workload["max_grad_norm"])
            optimizer.step()
    run.tick()
collector.shutdown()
run.report("torchrl", torchrl.__version__, EPISODE_RETURNS)

"""Tianshou's PPO on a workload of vectors, with its vector environment, buffer, collector and trainer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

import measure

run = measure.begin(images=False)

import numpy as np  # noqa: E402
import tianshou  # noqa: E402
import torch  # noqa: E402
from environments import EPISODE_RETURNS, factories  # noqa: E402
from gymnasium import spaces  # noqa: E402
from tianshou.algorithm.modelfree.ppo import PPO  # noqa: E402
from tianshou.algorithm.modelfree.reinforce import ProbabilisticActorPolicy  # noqa: E402
from tianshou.algorithm.optim import AdamOptimizerFactory  # noqa: E402
from tianshou.data import Collector, VectorReplayBuffer  # noqa: E402
from tianshou.env import DummyVectorEnv  # noqa: E402
from tianshou.trainer import OnPolicyTrainerParams  # noqa: E402
from tianshou.utils.net.common import Net  # noqa: E402
from tianshou.utils.net.continuous import ContinuousActorProbabilistic, ContinuousCritic  # noqa: E402
from tianshou.utils.net.discrete import DiscreteActor, DiscreteCritic  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.distributions import Categorical, Distribution, Independent, Normal  # noqa: E402

run.imported()
workload = run.workload
torch.manual_seed(run.args.seed)
np.random.seed(run.args.seed)

makers = factories(workload, own_normalization=False)
example = makers[0]()
space, action_space = example.observation_space, example.action_space
environments = DummyVectorEnv(makers)
environments.seed(run.args.seed)


def network() -> Net:
    return Net(state_shape=space.shape, hidden_sizes=workload["hidden"], activation=nn.Tanh)


def gaussian(mean_and_deviation: tuple[Tensor, Tensor]) -> Distribution:
    return Independent(Normal(*mean_and_deviation), 1)


actor: Any
critic: Any
if isinstance(action_space, spaces.Discrete):
    actor = DiscreteActor(preprocess_net=network(), action_shape=int(action_space.n), softmax_output=False)
    critic = DiscreteCritic(preprocess_net=network())
else:
    actor = ContinuousActorProbabilistic(preprocess_net=network(), action_shape=action_space.shape, unbounded=True)
    critic = ContinuousCritic(preprocess_net=network())
for layer in [*actor.modules(), *critic.modules()]:
    if isinstance(layer, nn.Linear):
        nn.init.orthogonal_(layer.weight, 2**0.5)
        nn.init.zeros_(layer.bias)
policy = ProbabilisticActorPolicy(
    actor=actor,
    dist_fn=(lambda logits: Categorical(logits=logits)) if isinstance(action_space, spaces.Discrete) else gaussian,
    action_space=action_space,
    # Gymnasium's wrapper clips actions, where they are numbers.
    action_scaling=False,
    action_bound_method=None,
)
algorithm = PPO(
    policy=policy,
    critic=critic,
    optim=AdamOptimizerFactory(lr=workload["lr"], eps=workload["adam_eps"]),
    eps_clip=workload["clip"],
    value_clip=False,
    advantage_normalization=workload["norm_adv"],
    # Its value loss lacks the factor ½ that the workloads mean.
    vf_coef=workload["vf_coef"] / 2,
    ent_coef=workload["ent_coef"],
    max_grad_norm=workload["max_grad_norm"],
    gae_lambda=workload["gae_lambda"],
    gamma=workload["gamma"],
    max_batchsize=workload["rows"],
)
update = algorithm.update


def update_and_tick(*arguments: Any, **options: Any) -> Any:
    found = update(*arguments, **options)
    run.tick()
    return found


algorithm.update = update_and_tick
buffer = VectorReplayBuffer(workload["rows"], workload["num_envs"])
algorithm.run_training(
    OnPolicyTrainerParams(
        training_collector=Collector(algorithm, environments, buffer, raise_on_nan_in_buffer=False),
        max_epochs=1,
        epoch_num_steps=workload["rollouts"] * workload["rows"],
        collection_step_num_env_steps=workload["rows"],
        batch_size=workload["minibatch"],
        update_step_num_repetitions=workload["epochs"],
        verbose=False,
        show_progress=False,
    )
)
run.report("tianshou", tianshou.__version__, EPISODE_RETURNS)

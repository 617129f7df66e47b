"""skrl's PPO and sequential trainer on a workload, over Gymnasium's `SyncVectorEnv`.

Advantages are normalized over the whole rollout, the only choice in skrl.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

import measure

run = measure.begin()

import skrl  # noqa: E402
import torch  # noqa: E402
from environments import EPISODE_RETURNS, factories  # noqa: E402
from gymnasium import spaces  # noqa: E402
from gymnasium.vector import AutoresetMode, SyncVectorEnv  # noqa: E402
from skrl.agents.torch.ppo import PPO, PPO_CFG  # noqa: E402
from skrl.envs.wrappers.torch import wrap_env  # noqa: E402
from skrl.memories.torch import RandomMemory  # noqa: E402
from skrl.models.torch import CategoricalMixin, DeterministicMixin, GaussianMixin, Model  # noqa: E402
from skrl.trainers.torch import SequentialTrainer  # noqa: E402
from skrl.utils import set_seed  # noqa: E402
from torch import Tensor, nn  # noqa: E402

run.imported()
workload = run.workload
set_seed(run.args.seed)
environments = wrap_env(
    SyncVectorEnv(factories(workload, own_normalization=False), autoreset_mode=AutoresetMode.SAME_STEP)
)
SPACES = {
    "observation_space": environments.observation_space,
    "action_space": environments.action_space,
    "device": "cpu",
}


def orthogonal(layer: Any, gain: float = 2**0.5) -> Any:
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def mlp(inputs: int, outputs: int, gain: float) -> nn.Sequential:
    sizes = [inputs, *workload["hidden"]]
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(sizes):
        layers += [orthogonal(nn.Linear(before, after)), nn.Tanh()]
    return nn.Sequential(*layers, orthogonal(nn.Linear(sizes[-1], outputs), gain))


class DiscreteActor(CategoricalMixin, Model):
    def __init__(self) -> None:
        Model.__init__(self, **SPACES)
        CategoricalMixin.__init__(self, unnormalized_log_prob=True)
        self.net = mlp(self.num_observations, self.num_actions, 0.01)

    def compute(self, inputs: dict[str, Tensor], role: str) -> tuple[Tensor, dict[str, Tensor]]:
        return self.net(inputs["observations"]), {}


class GaussianActor(GaussianMixin, Model):
    def __init__(self) -> None:
        Model.__init__(self, **SPACES)
        GaussianMixin.__init__(self, clip_actions=False)
        self.net = mlp(self.num_observations, self.num_actions, 0.01)
        self.log_std = nn.Parameter(torch.zeros(self.num_actions))

    def compute(self, inputs: dict[str, Tensor], role: str) -> tuple[Tensor, dict[str, Tensor]]:
        return self.net(inputs["observations"]), {"log_std": self.log_std}


class Critic(DeterministicMixin, Model):
    def __init__(self) -> None:
        Model.__init__(self, **SPACES)
        DeterministicMixin.__init__(self)
        self.net = mlp(self.num_observations, 1, 1.0)

    def compute(self, inputs: dict[str, Tensor], role: str) -> tuple[Tensor, dict[str, Tensor]]:
        return self.net(inputs["observations"]), {}


class ImageActorCritic(CategoricalMixin, DeterministicMixin, Model):
    """Nature CNN for policy and value; the value reuses the policy's features, as in skrl's documentation."""

    def __init__(self) -> None:
        Model.__init__(self, **SPACES)
        CategoricalMixin.__init__(self, unnormalized_log_prob=True, role="policy")
        DeterministicMixin.__init__(self, role="value")
        self.encoder = nn.Sequential(
            orthogonal(nn.Conv2d(4, 32, 8, 4)),
            nn.ReLU(),
            orthogonal(nn.Conv2d(32, 64, 4, 2)),
            nn.ReLU(),
            orthogonal(nn.Conv2d(64, 64, 3, 1)),
            nn.ReLU(),
            nn.Flatten(),
            orthogonal(nn.Linear(3136, 512)),
            nn.ReLU(),
        )
        self.logits = orthogonal(nn.Linear(512, self.num_actions), 0.01)
        self.value = orthogonal(nn.Linear(512, 1), 1.0)
        self.features: Tensor | None = None

    def act(self, inputs: dict[str, Tensor], *, role: str = "") -> Any:
        kind = CategoricalMixin if role == "policy" else DeterministicMixin
        return kind.act(self, inputs, role=role)

    def compute(self, inputs: dict[str, Tensor], role: str) -> tuple[Tensor, dict[str, Tensor]]:
        features, self.features = self.features, None
        if role == "policy" or features is None:
            features = self.encoder(inputs["observations"].view(-1, 4, 84, 84).float() / 255)
        if role == "policy":
            self.features = features
            return self.logits(features), {}
        return self.value(features), {}


if workload["hidden"]:
    discrete = isinstance(environments.action_space, spaces.Discrete)
    models = {"policy": DiscreteActor() if discrete else GaussianActor(), "value": Critic()}
else:
    both = ImageActorCritic()
    models = {"policy": both, "value": both}
settings = PPO_CFG(
    rollouts=workload["num_steps"],
    learning_epochs=workload["epochs"],
    mini_batches=workload["minibatches"],
    discount_factor=workload["gamma"],
    gae_lambda=workload["gae_lambda"],
    learning_rate=workload["lr"],
    grad_norm_clip=workload["max_grad_norm"],
    ratio_clip=workload["clip"],
    value_clip=0.0,
    entropy_loss_scale=workload["ent_coef"],
    # skrl's value loss lacks the factor ½ that the workloads mean.
    value_loss_scale=workload["vf_coef"] / 2,
)
settings.experiment.write_interval = settings.experiment.checkpoint_interval = 0
settings.experiment.directory = tempfile.mkdtemp()
agent = PPO(
    models=models,
    memory=RandomMemory(memory_size=workload["num_steps"], num_envs=workload["num_envs"], device="cpu"),
    cfg=settings,
    **SPACES,
)
update = agent.update


def update_and_tick(**kwargs: Any) -> None:
    update(**kwargs)
    run.tick()


agent.update = update_and_tick
SequentialTrainer(
    env=environments,
    agents=agent,
    cfg={
        "timesteps": workload["rollouts"] * workload["num_steps"],
        "headless": True,
        "disable_progressbar": True,
        "close_environment_at_exit": False,
    },
).train()
run.report("skrl", skrl.__version__, EPISODE_RETURNS, note="advantages normalised over the rollout")

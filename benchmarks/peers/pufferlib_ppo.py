"""PufferLib 3's PuffeRL on a workload, over Gymnasium's environments in its serial vectorization.

Its PPO draws whole segments of environments with replacement, and recomputes advantages and values
for each minibatch. Its environments in C are not in the package `pufferlib-core`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

import measure

run = measure.begin(images=False)

import pufferlib.emulation  # noqa: E402
import pufferlib.pytorch  # noqa: E402
import pufferlib.vector  # noqa: E402
import torch  # noqa: E402
from environments import EPISODE_RETURNS, factories  # noqa: E402
from pufferlib.pufferl import PuffeRL  # noqa: E402
from torch import Tensor, nn  # noqa: E402

run.imported()
workload = run.workload
torch.manual_seed(run.args.seed)


def mlp(outputs: int, gain: float) -> nn.Sequential:
    layers: list[nn.Module] = []
    inputs = environments.single_observation_space.shape[0]
    for width in workload["hidden"]:
        layers += [pufferlib.pytorch.layer_init(nn.Linear(inputs, width)), nn.Tanh()]
        inputs = width
    return nn.Sequential(*layers, pufferlib.pytorch.layer_init(nn.Linear(inputs, outputs), std=gain))


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = mlp(environments.single_action_space.n, 0.01), mlp(1, 1.0)

    def forward(self, observations: Tensor, state: Any = None) -> tuple[Tensor, Tensor]:
        return self.actor(observations), self.critic(observations)

    forward_eval = forward


class Silent(PuffeRL):  # type: ignore[misc]
    def print_dashboard(self, *_: Any, **__: Any) -> None:
        """Draw nothing: the others are measured without a display too."""


make = factories(workload, own_normalization=False)[0]
environments = pufferlib.vector.make(
    pufferlib.emulation.GymnasiumPufferEnv,
    env_kwargs={"env_creator": make},
    backend="Serial",
    num_envs=workload["num_envs"],
    seed=run.args.seed,
)
settings = {
    "seed": run.args.seed,
    "torch_deterministic": True,
    "device": "cpu",
    "cpu_offload": False,
    "use_rnn": False,
    "compile": False,
    "precision": "float32",
    "batch_size": workload["rows"],
    "bptt_horizon": workload["num_steps"],
    "minibatch_size": workload["minibatch"],
    "max_minibatch_size": workload["minibatch"],
    "update_epochs": workload["epochs"],
    "total_timesteps": workload["rollouts"] * workload["rows"],
    "optimizer": "adam",
    "learning_rate": workload["lr"],
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_eps": workload["adam_eps"],
    "anneal_lr": False,
    "gamma": workload["gamma"],
    "gae_lambda": workload["gae_lambda"],
    "clip_coef": workload["clip"],
    "vf_clip_coef": 1e9,
    "vf_coef": workload["vf_coef"],
    "ent_coef": workload["ent_coef"],
    "max_grad_norm": workload["max_grad_norm"],
    # No V-trace, and all segments alike.
    "vtrace_rho_clip": 1.0,
    "vtrace_c_clip": 1.0,
    "prio_alpha": 0.0,
    "prio_beta0": 1.0,
    "checkpoint_interval": 10**9,
    "data_dir": tempfile.mkdtemp(),
}
with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
    trainer = Silent(settings, environments, ActorCritic())
    for _ in range(workload["rollouts"]):
        trainer.evaluate()
        trainer.train()
        run.tick()
    trainer.utilization.stop()
note = "segments with replacement, advantages anew for each minibatch"
run.report("pufferlib", version("pufferlib-core"), EPISODE_RETURNS, note=note)

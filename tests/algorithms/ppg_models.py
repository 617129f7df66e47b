"""Small PPGs, and rollouts made up for them to learn from."""

import functools
from typing import Any

import torch
from gymnasium import spaces
from lightning.pytorch import Callback

from lightning_rl import PPG, PPO, OffPolicyPPG
from tests.helpers import DISCRETE, VECTOR, FixedRollouts, Recorder, make_trainer, merged, random_rollout

SMALL: dict[str, Any] = {"policy": {"hidden_sizes": (8,)}, "num_minibatches": 2, "learning_rate": 3e-3}
PHASE: dict[str, Any] = SMALL | {"num_policy_iterations": 2, "num_aux_epochs": 3, "num_aux_minibatches": 4}
REUSED: dict[str, Any] = SMALL | {
    "num_policy_iterations": 3,
    "updates_per_rollout": 2,
    "batch_size": 32,
    "policy_buffer_size": 64,
    "policy_max_use": 2,
    "value_buffer_size": 128,
    "num_aux_epochs": 2,
    "num_aux_minibatches": 3,
}
ROWS = 48  # of each rollout
HEAD = "policy.auxiliary_head"


def make(algorithm: type[PPG] = PPG, space: spaces.Space[Any] = DISCRETE, **options: Any) -> Any:
    torch.manual_seed(0)
    defaults = REUSED if issubclass(algorithm, OffPolicyPPG) else PHASE
    return algorithm(VECTOR, space, **merged(defaults, options))


def fit(model: PPO, num_rollouts: int, *callbacks: Callback, **options: Any) -> Recorder:
    """Learn from rollouts made up beforehand."""
    rollouts = [random_rollout(model.policy, seed=seed, off_policy=0.0) for seed in range(num_rollouts)]
    recorder = Recorder()
    make_trainer(callbacks=[recorder, *callbacks], **options).fit(model, FixedRollouts(rollouts, model))
    return recorder


@functools.cache
def learned(algorithm: type[PPG] = PPG) -> Any:
    """A model with the default options that has learned from four rollouts, which tests compare others with."""
    fit(model := make(algorithm), 4)
    return model


def change(model: PPG, before: dict[str, torch.Tensor], part: str = "") -> float:
    changes = [(p.detach() - before[n]).abs().max() for n, p in model.named_parameters() if n.startswith(part)]
    return float(torch.stack(changes).max())

"""Combinations of kinds: one process with all environments, and ranks with a half of them each."""

import copy
from typing import Any

import torch
from torch import Tensor

from lightning_rl import PPO, Rollout
from lightning_rl.nested import map_leaves
from tests.combination_probes import SAMPLE, Combination, data_options, model_options
from tests.helpers import FixedRollouts, Recorder, make_data, make_trainer, parameters_of

RANKED = [combination for combination in SAMPLE if combination.observation in ("image", "dict", "nested")]
NUM_ENVS = 2


def make(combination: Combination, observation_space: Any, action_space: Any) -> PPO:
    """One minibatch in each pass, so that the order of rows does not matter, and statistics over all of them."""
    torch.manual_seed(0)
    options = {"num_epochs": 2, "num_minibatches": 1, "advantages": {"normalize": "rollout"}, "learning_rate": 1e-3}
    return PPO(observation_space, action_space, **options, **model_options(combination))


class Copies(Recorder):
    """Keeps every rollout; the storage of one is that of the next."""

    def __init__(self) -> None:
        super().__init__()
        self.rollouts: list[Rollout] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Rollout, batch_idx: int) -> None:
        self.rollouts.append(copy.deepcopy(batch))


def learn_alone(combination: Combination) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What one process learned, and what the ranks need: spaces, and their halves of the rollouts."""
    data = make_data(**data_options(combination) | {"num_envs": 2 * NUM_ENVS})
    spaces = data.observation_space, data.action_space
    model, copies = make(combination, *spaces), Copies()
    make_trainer(precision="64-true", callbacks=[copies]).fit(model, data)
    halves = [[half(rollout, rank) for rollout in copies.rollouts] for rank in range(2)]
    return parameters_of(model), {"spaces": spaces, "halves": halves}


def learn_as_rank(combination: Combination, rank: int, recorded: dict[str, Any]) -> dict[str, Any]:
    """What a rank learns from its half, and how far it was from the policy that acted."""
    model, recorder = make(combination, *recorded["spaces"]), Recorder()
    trainer = make_trainer(precision="64-true", callbacks=[recorder], devices=2, strategy="ddp")
    trainer.fit(model, FixedRollouts(recorded["halves"][rank], model))
    return {"parameters": parameters_of(model), "errors": recorder.column("first_ratio_error")}


def half(rollout: Rollout, rank: int) -> Rollout:
    """The environments of one rank."""

    def mine(name: str) -> Any:
        return map_leaves(lambda x: x[:, rank * NUM_ENVS : (rank + 1) * NUM_ENVS], getattr(rollout, name))

    names = ["observations", "actions", "rewards", "terminated", "truncated", "log_probs", "values", "next_values"]
    names += ["starts"] if rollout.memory is None else ["starts", "memory"]
    ends_here = rollout.final_indices[:, 1] // NUM_ENVS == rank
    assert rollout.valid is None
    return Rollout(
        **{name: mine(name) for name in names},
        final_indices=rollout.final_indices[ends_here] - torch.tensor([0, rank * NUM_ENVS]),
        final_observations=map_leaves(lambda x: x[ends_here], rollout.final_observations),
        burn_in=rollout.burn_in,
    )

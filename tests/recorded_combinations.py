"""Kinds of spaces, memory and agents: one process with all environments, and ranks with a half of them each."""

import copy
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor

from lightning_rl import MAPPO, PPO, Rollout
from lightning_rl.nested import map_leaves
from tests.combination_probes import SAMPLE, data_options, model_options
from tests.environments.test_pettingzoo import BOX, RELAY
from tests.helpers import FixedRollouts, Recorder, make_data, make_trainer, merged, parameters_of

NUM_ENVS = 2
MEMORIES: dict[str, dict[str, Any]] = {
    "mingru": {"kind": "mingru", "hidden_size": 4, "sequence_length": 4, "burn_in": 2},
    "gtrxl": {"kind": "gtrxl", "hidden_size": 4, "sequence_length": 4, "context_length": 3},
}
# Two agents with different spaces, of which one leaves early.
AGENTS = RELAY | {
    "rollout_length": 8,
    "env": {"kwargs": {"state": "joint", "sizes": (2, 3), "choices": (BOX, spaces.Box(-1, 1, (1,)))}},
}
RANKED: dict[str, tuple[type[PPO], dict[str, Any], dict[str, Any]]] = {
    **{
        str(one): (PPO, data_options(one), model_options(one))
        for one in SAMPLE
        if one.observation in ("image", "dict", "nested")
    },
    **{
        kind: (PPO, data_options(SAMPLE[1]), merged(model_options(SAMPLE[1]), {"policy": {"memory": memory}}))
        for kind, memory in MEMORIES.items()
    },
    "agents-shared": (MAPPO, AGENTS, {}),
    "agents-separate": (MAPPO, AGENTS, {"share_policy": False}),
    "agents-memory": (MAPPO, AGENTS, {"policy": {"memory": MEMORIES["mingru"]}}),
}
"""Algorithm, options of the data and options of the model, by name."""


def make(name: str, observation_space: Any, action_space: Any) -> PPO:
    """One minibatch in each pass, so that the order of rows does not matter, and statistics over all of them."""
    torch.manual_seed(0)
    options = {"num_epochs": 2, "num_minibatches": 1, "advantages": {"normalize": "rollout"}, "learning_rate": 1e-3}
    algorithm, _, own = RANKED[name]
    return algorithm(observation_space, action_space, **options, **own)


class Copies(Recorder):
    """Keeps every rollout; the storage of one is that of the next."""

    def __init__(self) -> None:
        super().__init__()
        self.rollouts: list[Rollout] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Rollout, batch_idx: int) -> None:
        self.rollouts.append(copy.deepcopy(batch))


def learn_alone(name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What one process learned, and what the ranks need: spaces, and their halves of the rollouts."""
    data = make_data(**RANKED[name][1] | {"num_envs": 2 * NUM_ENVS})
    both = data.observation_space, data.action_space
    model, copies = make(name, *both), Copies()
    make_trainer(precision="64-true", callbacks=[copies]).fit(model, data)
    halves = [[half(rollout, rank) for rollout in copies.rollouts] for rank in range(2)]
    return parameters_of(model), {"spaces": both, "halves": halves}


def learn_as_rank(name: str, rank: int, recorded: dict[str, Any]) -> dict[str, Any]:
    """What a rank learns from its half, and how far it was from the policy that acted."""
    model, recorder = make(name, *recorded["spaces"]), Recorder()
    trainer = make_trainer(precision="64-true", callbacks=[recorder], devices=2, strategy="ddp")
    trainer.fit(model, FixedRollouts(recorded["halves"][rank], model))
    return {"parameters": parameters_of(model), "errors": recorder.column("first_ratio_error")}


def half(rollout: Rollout, rank: int) -> Rollout:
    """The environments of one rank."""

    def mine(name: str) -> Any:
        return map_leaves(lambda x: x[:, rank * NUM_ENVS : (rank + 1) * NUM_ENVS], getattr(rollout, name))

    names = ["observations", "actions", "rewards", "terminated", "truncated", "log_probs", "values", "next_values"]
    names += ["starts"] if rollout.memory is None else ["starts", "memory"]
    names += [] if rollout.valid is None else ["valid"]
    ends_here = rollout.final_indices[:, 1] // NUM_ENVS == rank
    return Rollout(
        **{name: mine(name) for name in names},
        final_indices=rollout.final_indices[ends_here] - torch.tensor([0, rank * NUM_ENVS]),
        final_observations=map_leaves(lambda x: x[ends_here], rollout.final_observations),
        burn_in=rollout.burn_in,
    )

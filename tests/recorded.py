"""One process with all environments, and ranks with a half of them each, on the same recorded rollouts."""

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from lightning_rl import IMPALA, PPG, PPO, RND, VMPO, PPOKLPenalty, Rollout, fast
from lightning_rl.algorithms.base import OnPolicyAlgorithm
from lightning_rl.environments.contract import MINIBATCHES, derive_seed
from lightning_rl.nested import map_leaves, map_stacked
from lightning_rl.policies.actor_critic import ActorCritic
from lightning_rl.rollouts.batch import Batch
from lightning_rl.rollouts.rollout import EpisodeSummary
from lightning_rl.rollouts.sequences import Sequences
from tests.helpers import (
    DISCRETE,
    VECTOR,
    FixedRollouts,
    MemoryLogger,
    make_trainer,
    merged,
    parameters_of,
    random_rollout,
)
from tests.memory_probes import random_memory

NUM_ENVS, ROLLOUTS, EPOCHS, MINIBATCHES_OF_A_PASS = 3, 5, 2, 3
FEW_STEPS = {2: 2, 3: 0}
NORMALIZED = {"normalization": {"observations": True, "rewards": True}}
OPTIONS: dict[str, dict[str, Any]] = {
    "minibatch": {"clipping": {"value": 0.2}, "learning_rate": 5e-3, "target_kl": 3e-4},
    "memory": {
        "advantages": {"normalize": "rollout"},
        "policy": {"memory": {"kind": "lstm", "hidden_size": 6, "sequence_length": 4, "burn_in": 3}},
        "learning_rate": 1e-3,
    },
    # In one minibatch each, whose rows are the same in any order.
    "phases": {
        "algorithm": PPG,
        "num_policy_iterations": 2,
        "num_aux_epochs": 2,
        "num_minibatches": 1,
        "num_aux_minibatches": 1,
        "learning_rate": 5e-3,
    },
    "unrolls": {
        "algorithm": IMPALA,
        "reduction": "sum",
        "learning_rate": 1e-3,
        "normalization": {"values": "running_std"},
    },
    "rollout": {
        "advantages": {"normalize": "rollout"},
        "clipping": {"value": 0.2},
        "optimizer": {"num_value_epochs": EPOCHS - 1},
        "entropy_coef": 0.01,
    },
    "none": {
        "advantages": {"normalize": "none"},
        "optimizer": {"max_grad_norm": None},
        "normalization": {"values": "popart"},
    },
    "two_optimizers": {
        "optimizer": {
            "critic": {"learning_rate": 1e-3},
            "num_value_epochs": EPOCHS + 1,
            "adaptive_learning_rate": {"target_kl": 1e-3},
        },
        "clipping": {"rollback": True},
        "advantages": {"recompute_advantages": True},
        "target_kl": 1e-2,
    },
    "compiled": {"debug": {"fast_paths": "compiled"}, "learning_rate": 5e-3, "entropy_coef": 0.01},
    # DDP has several buckets for parameters of more than 1 MiB.
    "compiled_buckets": {
        "debug": {"fast_paths": "compiled"},
        "policy": {"hidden_sizes": (512, 600)},
        "learning_rate": 1e-4,
        "entropy_coef": 0.01,
    },
    "better_half": {"learning_rate": 1e-3},
    "weighted_half": {"learning_rate": 1e-3},
    "intrinsic": {"predictor_fraction": 1.0, "learning_rate": 1e-3},
    "penalties": {
        "kl_cutoff_coef": 100.0,
        "adaptive_kl_target": 1e-4,
        "optimizer": {"l2": {"policy": 1e-3}},
        "learning_rate": 3e-3,
    },
}
PRECISIONS = {"32-true": torch.float32, "64-true": torch.float64}
CASES = [(option, precision) for option in OPTIONS for precision in PRECISIONS]
# Where cloning begins its gradient is 0, and Adam makes much of what rounding in float32 leaves of that.
CASES.remove(("phases", "32-true"))
UPDATES = dict.fromkeys(OPTIONS, ROLLOUTS * EPOCHS * MINIBATCHES_OF_A_PASS)
UPDATES["two_optimizers"] = ROLLOUTS * (EPOCHS + 1) * MINIBATCHES_OF_A_PASS
UPDATES["unrolls"] = ROLLOUTS
UPDATES["phases"] = ROLLOUTS * EPOCHS + 2 * 2


class Weighing(PPOKLPenalty):
    """KL penalties, and steps that count differently."""

    def step_weights(self, rollout: Rollout) -> Tensor:
        return 0.5 + rollout.observations[:-1, ..., 0].abs()


class WeighingVMPO(VMPO):
    """Steps that count differently."""

    step_weights = Weighing.step_weights


def fixed_model(option: str = "minibatch", precision: str = "64-true", alone: bool = False) -> PPO:
    """PPO, or the algorithm of the option, with the same initial weights each time."""
    torch.manual_seed(0)
    classes: dict[str, tuple[type[Any], type[Any]]] = {
        "better_half": (VMPO, AloneVMPO),
        "weighted_half": (WeighingVMPO, AloneWeighingVMPO),
        "intrinsic": (RND, AloneRND),
        "penalties": (Weighing, AloneWeighing),
    }
    cls = classes.get(option, (PPO, Alone))[alone]
    # Ranks have no fast paths: their rounding is that of plain PyTorch.
    small = {
        "policy": {"hidden_sizes": (8,)},
        "debug": {"fast_paths": "none"},
        "num_epochs": EPOCHS,
        "num_minibatches": MINIBATCHES_OF_A_PASS,
    }
    options = merged(small, NORMALIZED, OPTIONS[option], {"debug": {"fast_paths": "none"}} if alone else {})
    algorithm: type[PPO] = options.pop("algorithm", cls)
    if not issubclass(algorithm, PPO | VMPO):  # one step for each rollout
        options = {name: x for name, x in options.items() if name not in ("num_epochs", "num_minibatches")}
    return algorithm(VECTOR, DISCRETE, **options).to(PRECISIONS[precision])


class UnionOfRanks(OnPolicyAlgorithm):
    """One process whose minibatches are the unions of those that two ranks draw from their halves."""

    def on_train_start(self) -> None:
        super().on_train_start()
        seeds = [derive_seed(torch.initial_seed(), MINIBATCHES, rank, 0) for rank in range(2)]
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def training_step(self, rollout: Rollout, batch_idx: int) -> Any:
        assert rollout.valid is not None
        rank = torch.arange(2 * NUM_ENVS).div(NUM_ENVS, rounding_mode="floor")
        self.rank_of_row = rank.expand(rollout.shape)[rollout.valid]
        return super().training_step(rollout, batch_idx)

    def one_pass(self, batch: Batch, num_minibatches: int) -> Iterator[Batch]:
        of_ranks = []
        for rank, generator in enumerate(self.generators):
            of_ranks.append(self.half(batch, rank).shuffled(generator).split(num_minibatches))
        for parts in zip(*of_ranks, strict=True):
            fields = {name: torch.cat([part.fields[name] for part in parts]) for name in batch.fields}
            sequences = None if batch.sequences is None else together([part.sequences for part in parts])
            made = Batch(fields, sequences=sequences)
            made.is_normalized = batch.is_normalized
            yield made

    def half(self, batch: Batch, rank: int) -> Batch:
        """The rows of one rank, or its sequences, those of all environments of each span of time side by side."""
        if batch.sequences is None:
            return Batch({name: x[self.rank_of_row == rank] for name, x in batch.fields.items()})
        env = torch.arange(len(batch.sequences)) % (2 * NUM_ENVS)
        rows, sequences = batch.sequences.select((env // NUM_ENVS == rank).nonzero().squeeze(1))
        return Batch({name: x[rows] for name, x in batch.fields.items()}, sequences=sequences)


def together(parts: list[Sequences]) -> Sequences:
    """One after another."""
    burn_ins = [part.burn_in for part in parts]
    return Sequences(
        torch.cat([part.lengths for part in parts]),
        torch.cat([part.starts for part in parts]),
        map_stacked(torch.cat, [part.memory for part in parts]),
        None if burn_ins[0] is None else together(burn_ins),
        None if burn_ins[0] is None else torch.cat([part.burn_in_observations for part in parts]),
    )


class Alone(UnionOfRanks, PPO):
    """PPO."""


class AloneRND(UnionOfRanks, RND):
    """PPO with intrinsic rewards."""


class AloneWeighing(UnionOfRanks, Weighing):
    """PPO with penalties and weights."""


class AloneVMPO(UnionOfRanks, VMPO):
    """V-MPO."""


class AloneWeighingVMPO(UnionOfRanks, WeighingVMPO):
    """V-MPO with weights."""


class Recording:
    """A train loader that makes rollouts up with the parameters of the moment, and keeps the halves of the ranks.

    All steps of the first rank are real; of the second those of a backend that resets on a step of its own, and in
    two rollouts fewer than a pass has minibatches, or none.
    """

    def __init__(self, model: PPO) -> None:
        self.model = model
        # Gives the random numbers of what a policy with memory is said to have done.
        self.plain = fixed_model("none", "64-true").policy.to(next(model.parameters()).dtype)
        self.pairs: list[list[Rollout]] = []

    def __len__(self) -> int:
        return ROLLOUTS

    def __iter__(self) -> Iterator[Rollout]:
        for number in range(ROLLOUTS):
            self.pairs.append([self._half(number, rank) for rank in range(2)])
            rollout = side_by_side(*self.pairs[-1])
            rollout.policy_version = self.model.policy_version
            yield rollout

    def _half(self, number: int, rank: int) -> Rollout:
        options: dict[str, Any] = {
            "num_envs": NUM_ENVS,
            "off_policy": 0.0,
            "valid": rank == 1,
            "seed": 2 * number + rank,
        }
        if self.model.policy.memory is None:
            rollout = random_rollout(self.model.policy, **options)
        else:
            rollout = random_rollout(self.plain, **options)
            remember(self.model.policy, rollout)
        if rank == 1 and number in FEW_STEPS:
            assert rollout.valid is not None
            rollout.valid[:] = False
            rollout.valid[0, : FEW_STEPS[number]] = True
            rollout.num_steps = FEW_STEPS[number]
        rollout.episodes = EpisodeSummary([float(number)] * (1 + rank), [number + rank] * (1 + rank))
        return rollout


def remember(policy: ActorCritic, rollout: Rollout) -> None:
    """Say of a rollout what a policy remembered of it, made up of random numbers."""
    length, num_envs = rollout.shape
    begins = rollout.dones if rollout.valid is None else rollout.dones | ~rollout.valid
    rollout.starts = torch.cat([begins[-1:], begins[:-1]])
    steps = policy.memory.stored_steps(length)
    rollout.memory = map_stacked(torch.stack, [random_memory(policy, num_envs, seed=step) for step in steps])
    rollout.burn_in = policy.memory.burn_in


def side_by_side(one: Rollout, other: Rollout) -> Rollout:
    """The environments of two rollouts in one."""

    def beside(name: str) -> Tensor:
        return torch.cat([getattr(one, name), getattr(other, name)], 1)

    names = ["observations", "actions", "rewards", "terminated", "truncated", "log_probs", "values", "next_values"]
    valid = [torch.ones(r.shape, dtype=torch.bool) if r.valid is None else r.valid for r in (one, other)]
    shift = torch.tensor([0, one.shape[1]])
    remembered = {}
    if one.memory is not None:
        remembered = {
            "starts": beside("starts"),
            "memory": map_leaves(lambda x, y: torch.cat([x, y], 1), one.memory, other.memory),
            "burn_in": one.burn_in,
        }
    return Rollout(
        **remembered,
        **{name: beside(name) for name in names},
        valid=torch.cat(valid, 1),
        final_indices=torch.cat([one.final_indices, other.final_indices + shift]),
        final_observations=torch.cat([one.final_observations, other.final_observations]),
        episodes=EpisodeSummary(
            one.episodes.returns + other.episodes.returns, one.episodes.lengths + other.episodes.lengths
        ),
    )


def learn(model: PPO, loader: FixedRollouts | Recording, precision: str, **trainer_options: Any) -> dict[str, Any]:
    """Learn from the rollouts of a loader; return everything that ranks and one process should agree on."""
    logger = MemoryLogger()
    trainer = make_trainer(precision=precision, logger=logger, log_every_n_steps=1, **trainer_options)
    trainer.fit(model, loader)
    assert model.reward_normalizer is not None
    return {
        "parameters": parameters_of(model),
        "moments": dict(model.policy.observation_normalizer.moments.named_buffers()),
        "reward_moments": dict(model.reward_normalizer.moments.named_buffers()),
        "updates": trainer.global_step,
        "env_steps": model.env_steps,
        "logged": [(step, row) for row, step in logger.calls if "train/policy_loss" in row],
    }


def learn_alone(option: str, precision: str) -> tuple[dict[str, Any], list[list[Rollout]]]:
    """What one process learns, and the halves of the rollouts it learned from."""
    model = fixed_model(option, precision, alone=True)
    loader = Recording(model)
    return learn(model, loader, precision), loader.pairs


def learn_as_rank(option: str, precision: str, rollouts: list[Rollout]) -> dict[str, Any]:
    """What a rank learns from its halves."""
    model = fixed_model(option, precision)
    with patch.object(fast.programs, "Compiled", lambda function, *_: function):  # compiling takes seconds
        learned = learn(model, FixedRollouts(rollouts, model), precision, devices=2, strategy="ddp")
    assert isinstance(model.steps.engine, fast.CompiledEngine) == option.startswith("compiled")
    return learned

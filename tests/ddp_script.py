"""Run by `test_ddp` on two processes: `python -m tests.ddp_script <folder>`; each rank leaves there what it saw.

The folder holds the rollouts that one process recorded, for the ranks to learn from too.
"""

import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from lightning_rl import CLEAR, PPG, PPO, VMPO, OffPolicyPPG
from lightning_rl.distributed import gather_on_rank_zero
from tests.helpers import (
    DISCRETE,
    VECTOR,
    FixedRollouts,
    MemoryLogger,
    Recorder,
    make_data,
    make_model,
    make_trainer,
    merged,
    parameters_of,
    precision_options,
    random_rollout,
)
from tests.recorded import NORMALIZED, fixed_model, learn_as_rank
from tests.recorded_combinations import learn_as_rank as combine_as_rank

DDP = {"devices": 2, "strategy": "ddp"}


def train_on_environments() -> dict[str, Any]:
    """An ordinary run: CartPole, validation of three episodes after each epoch, updates that stop early."""
    data = make_data(rollouts_per_epoch=3, evaluation={"episodes": 3})
    model = make_model(data, target_kl=1e-3, num_epochs=4, learning_rate=3e-3, **NORMALIZED)
    seen: dict[str, Any] = {"observations": [], "episodes": [], "logged": []}

    class Spy(Recorder):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            seen["observations"].append(batch.observations.clone())

        def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            seen["episodes"].append([episode.episode_return for episode in batch])

        def on_train_batch_end(self, trainer, pl_module, *args):
            super().on_train_batch_end(trainer, pl_module, *args)
            seen["logged"].append({name: value.item() for name, value in trainer.callback_metrics.items()})

    spy, logger = Spy("env_steps", "policy_version"), MemoryLogger()
    trainer = make_trainer(
        max_epochs=2, limit_val_batches=1, callbacks=[spy], logger=logger, log_every_n_steps=1, **DDP
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(model, data)
    return seen | {
        "parameters": parameters_of(model),
        "rows": spy.rows,
        "updates": trainer.global_step,
        "moments": dict(model.policy.observation_normalizer.moments.named_buffers()),
        "reward_moments": dict(model.reward_normalizer.moments.named_buffers()),
        "discounted_return": model.reward_normalizer.discounted_return,
        "validated": {name: value.item() for name, value in trainer.callback_metrics.items()},
        "log_calls": logger.calls,
        "warnings": [str(w.message) for w in caught],
    }


def fail_on_one_rank(rank: int, folder: Path) -> str:
    """One rank's rollout is not finite: both must say so, and neither may wait for the other."""
    model = fixed_model("rollout")
    rollout = random_rollout(model.policy, seed=rank)
    if rank == 1:
        rollout.rewards[0, 0] = float("nan")
    before = parameters_of(model)
    try:
        make_trainer(precision="64-true", default_root_dir=folder, **DDP).fit(model, FixedRollouts([rollout], model))
    except FloatingPointError as error:
        same = all(torch.equal(p, before[name]) for name, p in model.named_parameters())
        return f"{'unchanged' if same else 'changed'}: {error}"
    return "nothing was raised"


def count_restarts(rank: int) -> list[float]:
    """Two rollouts in which environments were replaced, more of them on one rank than on the other."""
    model, logger = fixed_model(), MemoryLogger()
    rollouts = [random_rollout(model.policy, seed=10 * rank + index, num_envs=3 + rank) for index in range(2)]
    for rollout in rollouts:
        rollout.failures = ["it broke"] * (1 + 2 * rank)
    trainer = make_trainer(precision="64-true", logger=logger, log_every_n_steps=1, **DDP)
    trainer.fit(model, FixedRollouts(rollouts, model))
    return [value for _, value in logger.rows("rollout/env_restarts")]


PHASES: dict[str, tuple[type[PPG], dict[str, Any]]] = {
    "dual": (PPG, {"optimizer": {"num_value_epochs": 2, "critic": {"learning_rate": 1e-3}}}),
    "shared": (PPG, {"architecture": "shared", "optimizer": {"num_value_epochs": 2}}),
    "detached": (PPG, {"architecture": "detached", "optimizer": {"num_value_epochs": 2}, "aux_sequences": True}),
    "memory": (PPG, {"policy": {"memory": {"kind": "gru", "hidden_size": 6, "sequence_length": 8, "burn_in": 3}}}),
    "transformer": (PPG, {"policy": {"memory": {"kind": "gtrxl", "hidden_size": 6, "context_length": 4}}}),
    "off_policy": (OffPolicyPPG, {"updates_per_rollout": 3, "batch_size": 16, "value_max_use": 2, "num_epochs": 2}),
}


def train_in_phases() -> dict[str, Any]:
    """Both PPGs, in every phase of which some parameters take no part; with several minibatches of each rank's own."""
    ends = {}
    for name, (algorithm, options) in PHASES.items():
        data = make_data(rollouts_per_epoch=4)
        torch.manual_seed(0)
        small = {
            "policy": {"hidden_sizes": (8,)},
            "num_policy_iterations": 2,
            "num_minibatches": 2,
            "num_aux_epochs": 2,
        }
        model = algorithm(data.observation_space, data.action_space, **merged(small, options))
        recorder = Recorder()
        make_trainer(precision="64-true", callbacks=[recorder], **DDP).fit(model, data)
        divergences = [row["aux_kl"] for row in recorder.rows if "aux_kl" in row]
        ends[name] = {"parameters": parameters_of(model), "divergences": divergences, "kept": len(model.kept)}
    return ends


def train_with_replay(num_actors: int) -> dict[str, Any]:
    """CLEAR, collected in step or by an actor of each rank: what each learned, saw and kept."""
    data = make_data(rollouts_per_epoch=5, actors={"count": num_actors, "start_method": "fork" if num_actors else None})
    torch.manual_seed(0)
    model = CLEAR(data.observation_space, data.action_space, policy={"hidden_sizes": (8,)}, learning_rate=0.01)
    firsts: list[torch.Tensor] = []

    class Spy(Recorder):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            firsts.append(batch.observations[0].clone())

    spy, logger = Spy("env_steps"), MemoryLogger()
    trainer = make_trainer(callbacks=[spy], logger=logger, log_every_n_steps=5, **DDP)
    trainer.fit(model, data)
    return {
        "parameters": parameters_of(model),
        "firsts": firsts,
        "env_steps": spy.column("env_steps"),
        "kept": [*model.kept.gather(torch.arange(len(model.kept)))[0].observations.unbind(1)],
        "drawn": model.generator.get_state(),
        "policy_lag": spy.column("policy_lag"),
        "logged": {name: float(value) for name, value in trainer.callback_metrics.items()},
    }


def learn_duals(rank: int, **trainer_options: Any) -> dict[str, torch.Tensor]:
    """V-MPO: parameters after three rollouts, of which the second rank has no step and no weights."""
    torch.manual_seed(0)
    model = VMPO(VECTOR, DISCRETE, policy={"hidden_sizes": (8,)}, num_epochs=3, learning_rate=1e-2).double()
    rollouts = [random_rollout(model.policy, seed=seed, off_policy=0.0, valid=True) for seed in range(3)]
    for rollout in rollouts if rank else ():
        rollout.valid[:] = False
        rollout.num_steps = 0
    rollouts[1].weights = None if rank else torch.ones(rollouts[1].shape)
    make_trainer(precision="64-true", **trainer_options).fit(model, FixedRollouts(rollouts, model))
    return parameters_of(model)


def overflow_float16(rank: int, folder: Path) -> dict[str, Any]:
    """16-mixed: scaled gradients overflow on the second rank alone; then its loss is not finite."""
    torch.manual_seed(0)
    model, recorder = PPO(VECTOR, DISCRETE, policy={"hidden_sizes": (8,)}), Recorder()
    rollouts = [random_rollout(model.policy, seed=10 * rank + index) for index in range(3)]
    if rank == 1:
        rollouts[0].rewards[0, 0] = 1e4
        rollouts[2].rewards[0, 0] = float("nan")
    options = precision_options("16-mixed", init_scale=2.0**12)
    trainer = make_trainer(callbacks=[recorder], default_root_dir=folder, **options, **DDP)
    error = None
    try:
        trainer.fit(model, FixedRollouts(rollouts, model))
    except FloatingPointError as raised:
        error = str(raised)
    scale = trainer.precision_plugin.scaler.get_scale()
    skipped = recorder.column("skipped_steps")
    return {"parameters": parameters_of(model), "scale": scale, "skipped": skipped, "error": error}


def gather(rank: int) -> dict[str, Any]:
    """What the first rank writes of both, told by the group of all ranks and, as beside NCCL, by another."""
    state = {"rank": rank}
    told = [gather_on_rank_zero(state)]
    is_copied = any(one is not state for one in told[0][:1])
    make = mock.Mock(wraps=torch.distributed.new_group)
    with mock.patch.multiple(torch.distributed, get_backend=lambda: "nccl", new_group=make):
        told += [gather_on_rank_zero({"rank": rank}) for _ in range(2)]
    return {"told": told, "groups": make.call_count, "is_copied": is_copied}


def main(folder: Path) -> None:
    ran = train_on_environments()
    rank = torch.distributed.get_rank()
    recorded = torch.load(folder / "recorded.pt", weights_only=False)
    learned = {case: learn_as_rank(*case, [pair[rank] for pair in pairs]) for case, pairs in recorded.items()}
    combinations = torch.load(folder / "combinations.pt", weights_only=False)
    combined = {name: combine_as_rank(name, rank, recorded) for name, recorded in combinations.items()}
    failed = fail_on_one_rank(rank, folder)
    left: dict[str, Any] = {"failed": failed, "restarts": count_restarts(rank), "phases": train_in_phases()}
    left["gathered"] = gather(rank)
    left["float16"] = overflow_float16(rank, folder)
    left["duals"] = learn_duals(rank, **DDP)
    left["replays"] = {str(num_actors): train_with_replay(num_actors) for num_actors in (0, 1)}
    left["computed"] = fixed_model().compute_loss([pair[rank] for pair in recorded["minibatch", "64-true"]])
    torch.save({"ran": ran, "learned": learned, "combined": combined, **left}, folder / f"rank_{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

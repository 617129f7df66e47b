"""Run by `test_ddp` on two processes: `python -m tests.ddp_script <folder>`; each rank leaves there what it saw."""

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_rl import PPO, Rollout
from tests.helpers import (
    DISCRETE,
    VECTOR,
    FixedRollouts,
    MemoryLogger,
    Recorder,
    make_data,
    make_model,
    make_trainer,
    parameters_of,
    random_rollout,
)

NORMALIZED = {"normalize_observations": True, "normalize_rewards": True}
DDP = {"devices": 2, "strategy": "ddp"}


def train_on_environments() -> dict[str, Any]:
    """An ordinary run: CartPole, validation of three episodes after each epoch, updates that stop early."""
    data = make_data(rollouts_per_epoch=3, eval_episodes=3)
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


def fixed_model(**options: Any) -> PPO:
    torch.manual_seed(0)
    model = PPO(VECTOR, DISCRETE, hidden_sizes=(8,), num_epochs=3, num_minibatches=1, **NORMALIZED | options)
    return model.double()


def fixed_rollouts(rank: int) -> list[Rollout]:
    """Two rollouts, with another number of real steps on each rank."""
    policy = fixed_model().policy
    return [random_rollout(policy, seed=10 * rank + i, num_envs=3 + rank, valid=rank == 1) for i in range(2)]


def side_by_side(one: Rollout, other: Rollout) -> Rollout:
    """The environments of two rollouts in one."""

    def together(name: str) -> Tensor:
        return torch.cat([getattr(one, name), getattr(other, name)], 1)

    names = ["observations", "actions", "rewards", "terminated", "truncated", "log_probs", "values", "next_values"]
    valid = [torch.ones(r.shape, dtype=torch.bool) if r.valid is None else r.valid for r in (one, other)]
    shift = torch.tensor([0, one.shape[1]])
    return Rollout(
        **{name: together(name) for name in names},
        valid=torch.cat(valid, 1),
        final_indices=torch.cat([one.final_indices, other.final_indices + shift]),
        final_observations=torch.cat([one.final_observations, other.final_observations]),
    )


OPTIONS: dict[str, dict[str, Any]] = {
    "minibatch": {},
    "rollout": {"normalize_advantages": "rollout", "entropy_coef": 0.01, "clip_range_value": 0.2},
    "none": {"normalize_advantages": "none", "max_grad_norm": None, "target_kl": 0.02},
}


def learn(options: dict[str, Any], rollouts: list[Rollout], **trainer_options: Any) -> dict[str, Any]:
    """Learn from fixed rollouts in float64."""
    model, recorder = fixed_model(**options), Recorder()
    trainer = make_trainer(precision="64-true", callbacks=[recorder], **trainer_options)
    trainer.fit(model, FixedRollouts(rollouts, model))
    return {
        "parameters": parameters_of(model),
        "updates": trainer.global_step,
        "env_steps": model.env_steps,
        "grad_norm": recorder.column("grad_norm"),
        "moments": dict(model.policy.observation_normalizer.moments.named_buffers()),
        "reward_moments": dict(model.reward_normalizer.moments.named_buffers()),
    }


def fail_on_one_rank(rank: int) -> str:
    """One rank's rollout is not finite: both must say so, and neither may wait for the other."""
    model = fixed_model()
    rollouts = fixed_rollouts(rank)
    if rank == 1:
        rollouts[0].rewards[0, 0] = float("nan")
    before = parameters_of(model)
    try:
        make_trainer(precision="64-true", **DDP).fit(model, FixedRollouts(rollouts, model))
    except FloatingPointError as error:
        same = all(torch.equal(p, before[name]) for name, p in model.named_parameters())
        return f"{'unchanged' if same else 'changed'}: {error}"
    return "nothing was raised"


def count_restarts(rank: int) -> list[float]:
    """Two rollouts in which environments were replaced, more of them on one rank than on the other."""
    model, logger = fixed_model(), MemoryLogger()
    rollouts = fixed_rollouts(rank)
    for rollout in rollouts:
        rollout.failures = ["it broke"] * (1 + 2 * rank)
    trainer = make_trainer(precision="64-true", logger=logger, log_every_n_steps=1, **DDP)
    trainer.fit(model, FixedRollouts(rollouts, model))
    return [value for _, value in logger.rows("rollout/env_restarts")]


def main(folder: Path) -> None:
    ran = train_on_environments()
    rank = torch.distributed.get_rank()
    learned = {name: learn(options, fixed_rollouts(rank), **DDP) for name, options in OPTIONS.items()}
    failed = fail_on_one_rank(rank)
    restarts = count_restarts(rank)
    torch.save({"ran": ran, "learned": learned, "failed": failed, "restarts": restarts}, folder / f"rank_{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

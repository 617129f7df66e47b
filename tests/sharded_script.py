"""Run by `test_sharding` on two processes: `python -m tests.sharded_script <folder>`; each rank saves what it saw."""

import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.strategies import ModelParallelStrategy

from lightning_rl import IMPALA, PPO, RND, VMPO, PolicyExport
from lightning_rl.algorithms.base import OnPolicyAlgorithm
from lightning_rl.policies.sharding import whole
from tests.helpers import (
    DISCRETE,
    VECTOR,
    FixedRollouts,
    Recorder,
    make_data,
    make_trainer,
    merged,
    precision_options,
    random_rollout,
)

CARTPOLE, NORMALIZED = "CartPole-v1", {"normalization": {"observations": True, "rewards": True}}
MEMORY = {"policy": {"memory": {"kind": "lstm", "sequence_length": 8}}}
TWO_OPTIMIZERS = {"optimizer": {"l2": {"policy": 0.01}, "critic": {"name": "torch.optim.SGD"}}}
ROLLBACK = {"target_kl": 1e-4, "clipping": {"rollback": True}, "learning_rate": 0.03}
CASES: dict[str, tuple[type[OnPolicyAlgorithm], str, str, dict[str, Any]]] = {
    "ppo": (PPO, CARTPOLE, "32-true", NORMALIZED),
    "impala": (IMPALA, CARTPOLE, "32-true", {}),
    "lstm": (PPO, CARTPOLE, "32-true", MEMORY),
    "continuous": (PPO, "Pendulum-v1", "32-true", TWO_OPTIMIZERS),
    "parts": (PPO, CARTPOLE, "16-mixed", {"optimizer": {"num_value_epochs": 1}}),
    "rollback": (PPO, CARTPOLE, "32-true", ROLLBACK),
    "duals": (VMPO, CARTPOLE, "32-true", {}),
    "intrinsic": (RND, CARTPOLE, "32-true", {"num_minibatches": 2}),
}
DDP = {"devices": 2, "strategy": "ddp"}


def sharded() -> dict[str, Any]:
    """Options of a Trainer that shards parameters over two ranks."""
    sizes = {"data_parallel_size": 2, "tensor_parallel_size": 1, "save_distributed_checkpoint": False}
    return {"devices": 2, "strategy": ModelParallelStrategy(**sizes)}


def make(case: str, **more: Any) -> tuple[OnPolicyAlgorithm, Any]:
    algorithm, env_id, _, options = CASES[case]
    data = make_data(env_id, rollouts_per_epoch=2)
    torch.manual_seed(0)
    small = {"policy": {"hidden_sizes": (16,)}} | ({"num_epochs": 2, "num_minibatches": 2} if algorithm is PPO else {})
    return algorithm(data.observation_space, data.action_space, **merged(small, options, more)), data


class SeesOptimizers(Callback):
    """Needs the optimizers when training starts, as `LearningRateMonitor` does."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        assert trainer.optimizers == [x.optimizer for x in pl_module.steps.all_optimizers] != []


def train(case: str, trainer_options: dict[str, Any], num_epochs: int = 1, ckpt_path: Path | None = None, **more: Any):
    """Return what a run ends with, and its model, data and Trainer."""
    model, data = make(case, **more)
    recorder = Recorder()
    precision = precision_options(CASES[case][2])
    trainer = make_trainer(
        callbacks=[SeesOptimizers(), recorder],
        max_epochs=num_epochs,
        limit_val_batches=1,
        **precision,
        **trainer_options,
    )
    trainer.fit(model, data, ckpt_path=ckpt_path)
    end = {
        "parameters": {name: whole(x).detach().clone() for name, x in model.named_parameters()},
        "rows": recorder.rows,
        "validated": float(trainer.callback_metrics["val/episode_return"]),
    }
    return end, model, data, trainer


def resume(folder: Path) -> dict[str, Any]:
    """Checkpoints of sharded runs: resumed, tested, and loaded with another learning rate."""
    found: dict[str, Any] = {"whole": train("ppo", sharded(), 2)[0]["parameters"]}
    _, _, _, trainer = train("ppo", sharded(), 1)
    path = folder / "half.ckpt"
    trainer.save_checkpoint(path)
    end, model, data, trainer = train("ppo", sharded(), 2, path)
    found["resumed"] = end["parameters"]
    trainer.save_checkpoint(folder / "end.ckpt")
    model, data = make("ppo")
    tester = make_trainer(limit_test_batches=1, **sharded())
    (found["tested"],) = tester.test(model, data, ckpt_path=folder / "end.ckpt", verbose=False)
    (found["tested_again"],) = trainer.test(trainer.lightning_module, data, verbose=False)
    _, model, _, _ = train("ppo", sharded(), 2, path, learning_rate=1e-5)
    found["by_ddp"] = train("ppo", DDP, 2, path)[0]["parameters"]
    train("ppo", DDP, 1)[3].save_checkpoint(path)
    found["from_ddp"] = train("ppo", sharded(), 2, path)[0]["parameters"]
    # Optimizers with parameters that have no state yet, or in another order than the parameters of the model.
    critic = {"critic": {"learning_rate": 1e-3}}
    for name, options, more in (("warming_up", sharded, {"critic_warmup_steps": 192}), ("two", lambda: DDP, critic)):
        train("ppo", options(), 1, optimizer=more)[3].save_checkpoint(path)
        parts = [train("ppo", sharded(), 2, ckpt_path, optimizer=more) for ckpt_path in (None, path)]
        found[name] = [part[0]["parameters"] for part in parts]
    found["rate"] = model.steps.optimizers[0].param_groups[0]["lr"]
    return found


def export(folder: Path) -> dict[str, torch.Tensor]:
    """Return the parameters at the end of a sharded run that exports its policy."""
    model, data = make("ppo")
    make_trainer(callbacks=[PolicyExport(10**6, folder, programs=["greedy"])], **sharded()).fit(model, data)
    return {name: whole(x).detach().clone() for name, x in model.named_parameters()}


def fail(folder: Path, rank: int) -> str:
    """A loss that is not finite on the second rank."""
    torch.manual_seed(0)
    model = PPO(VECTOR, DISCRETE, policy={"hidden_sizes": (8,)})
    rollout = random_rollout(model.policy, seed=rank)
    if rank == 1:
        rollout.rewards[0, 0] = float("nan")
    try:
        make_trainer(default_root_dir=folder, **sharded()).fit(model, FixedRollouts([rollout], model))
    except FloatingPointError as error:
        return str(error)
    return "nothing was raised"


def main(folder: Path) -> None:
    ends = {case: [train(case, options())[0] for options in (lambda: DDP, sharded)] for case in CASES}
    rank = torch.distributed.get_rank()
    found = {"ends": ends, "checkpoints": resume(folder), "exported": export(folder / "policies")}
    torch.save({**found, "failed": fail(folder, rank)}, folder / f"rank_{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

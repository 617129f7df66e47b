"""Train PPO on two nodes, started by `torchrun` or by SLURM (see `slurm.sbatch`), with the same script.

On the first node, whose address is 10.0.0.1 here, and on the second:

    torchrun --nnodes 2 --node_rank 0 --nproc_per_node 1 --master_addr 10.0.0.1 examples/multi_node/train.py
    torchrun --nnodes 2 --node_rank 1 --nproc_per_node 1 --master_addr 10.0.0.1 examples/multi_node/train.py

To try it on one machine, use the address 127.0.0.1. Each process has its own environments; together they take the same
gradient steps as one process with all environments.
"""

import torch
from lightning.pytorch import Trainer, seed_everything

from lightning_rl import PPO, EnvStepLimit, EnvStepProgressBar, LastCheckpoint, RolloutDataModule


def main(max_env_steps: int = 100_000, root: str = "runs/examples/multi_node") -> PPO:
    """Train for `max_env_steps` environment steps of both nodes together, and return the algorithm."""
    torch.set_num_threads(1)
    seed_everything(0)  # same seed on all nodes; environments also use the rank
    data = RolloutDataModule("CartPole-v1", num_envs=4, rollout_length=128, rollouts_per_epoch=4)
    model = PPO(data.observation_space, data.action_space, learning_rate=1e-3, num_epochs=10, num_minibatches=4)
    trainer = Trainer(
        num_nodes=2,
        devices=1,  # number of processes per node that torchrun or SLURM starts
        strategy="ddp",
        accelerator="cpu",
        max_epochs=-1,
        callbacks=[EnvStepLimit(max_env_steps), EnvStepProgressBar(), LastCheckpoint(root)],
        log_every_n_steps=10,
        num_sanity_val_steps=0,
        default_root_dir=root,
    )
    trainer.fit(model, data)
    return model


if __name__ == "__main__":
    main()
    torch.distributed.destroy_process_group()  # otherwise PyTorch may abort the process at exit

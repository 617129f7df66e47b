"""Train PPO on a Ray cluster, with Ray Train's strategy for Lightning.

    pip install "ray[train]"
    python examples/multi_node/ray_train.py

Without a cluster Ray starts one on this machine. On a cluster, submit the script as a job or set RAY_ADDRESS.
"""

import ray.train
import torch
from lightning.pytorch import Trainer, seed_everything
from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment, prepare_trainer
from ray.train.torch import TorchTrainer

from lightning_rl import PPO, EnvStepLimit, RolloutDataModule


def train_worker(config: dict[str, int]) -> None:
    """Run in each worker: like a script for one process, with another `strategy` and `plugins`."""
    torch.set_num_threads(1)
    seed_everything(0)  # same seed in all workers; environments also use the rank
    data = RolloutDataModule("CartPole-v1", num_envs=4, rollout_length=128, rollouts_per_epoch=4)
    model = PPO(data.observation_space, data.action_space, learning_rate=1e-3, num_epochs=10, num_minibatches=4)
    trainer = Trainer(
        strategy=RayDDPStrategy(),
        plugins=[RayLightningEnvironment()],
        accelerator="cpu",
        devices="auto",  # assigned by Ray
        max_epochs=-1,
        callbacks=[EnvStepLimit(config["max_env_steps"])],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        num_sanity_val_steps=0,
    )
    prepare_trainer(trainer).fit(model, data)
    norm = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).double().norm().item()
    score = trainer.callback_metrics["val/episode_return"].item()
    rank = ray.train.get_context().get_world_rank()
    print(f"rank {rank}: {model.env_steps} environment steps, validation return {score:g}, norm of weights {norm!r}")


def main(max_env_steps: int = 50_000, num_workers: int = 2) -> None:
    """Train for `max_env_steps` environment steps of all workers together."""
    scaling = ray.train.ScalingConfig(num_workers=num_workers, use_gpu=False)
    TorchTrainer(train_worker, train_loop_config={"max_env_steps": max_env_steps}, scaling_config=scaling).fit()


if __name__ == "__main__":
    main()

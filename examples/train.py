"""Train PPO on CartPole-v1 with the plain Trainer, then evaluate the best checkpoint.

    python examples/train.py

The Trainer takes `accelerator`, `devices`, `strategy`, `precision`, `logger` and callbacks as for any LightningModule.
"""

from dataclasses import replace

import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_rl import PPO, EnvStepLimit, EnvStepProgressBar, RolloutDataModule


def main(max_env_steps: int = 100_000, root: str = "runs/examples/train") -> float:
    """Train for `max_env_steps` environment steps and return the mean return of 100 episodes."""
    torch.set_num_threads(1)  # fastest for a small network
    seed_everything(0)
    data = RolloutDataModule("CartPole-v1", num_envs=8, rollout_length=32, rollouts_per_epoch=50)
    # The learning rate is annealed to 0 at the limit below.
    model = PPO(data.observation_space, data.action_space, learning_rate=1e-3, optimizer={"anneal": True})
    best = ModelCheckpoint(f"{root}/checkpoints", filename="best-{step}", monitor="val/episode_return", mode="max")
    trainer = Trainer(
        max_epochs=-1,  # EnvStepLimit ends the run
        callbacks=[EnvStepLimit(max_env_steps), EnvStepProgressBar(), best],
        accelerator="cpu",
        log_every_n_steps=10,
        num_sanity_val_steps=0,
        default_root_dir=root,
    )
    trainer.fit(model, data)  # validates and saves after each epoch of 50 rollouts

    data.evaluation = replace(data.evaluation, episodes=100)
    (metrics,) = trainer.test(model, data, ckpt_path=best.best_model_path)
    print(f"log: {trainer.log_dir}\ncheckpoint: {best.best_model_path}")
    return metrics["test/episode_return"]


if __name__ == "__main__":
    main()

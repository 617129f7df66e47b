"""Stop a run half way and resume it from its checkpoint, as after a crash.

    python examples/resume.py

On the command line this is `--ckpt_path last`.
"""

import torch
from lightning.pytorch import Trainer, seed_everything

from lightning_rl import PPO, EnvStepLimit, EnvStepProgressBar, LastCheckpoint, RolloutDataModule


def fit(max_env_steps: int, root: str, ckpt_path: str | None = None) -> PPO:
    """Train until the run has `max_env_steps` environment steps."""
    data = RolloutDataModule("CartPole-v1", num_envs=8, rollout_length=128, rollouts_per_epoch=5)
    model = PPO(data.observation_space, data.action_space, normalization={"observations": True})
    trainer = Trainer(
        max_epochs=-1,
        # LastCheckpoint saves the newest checkpoint; ModelCheckpoint would keep the best.
        callbacks=[EnvStepLimit(max_env_steps), LastCheckpoint(root), EnvStepProgressBar()],
        accelerator="cpu",
        logger=False,
        num_sanity_val_steps=0,
    )
    # Restores environment steps, optimizer, normalizers, schedules and random generators.
    trainer.fit(model, data, ckpt_path=ckpt_path)
    return model


def main(max_env_steps: int = 40_000, root: str = "runs/examples/resume") -> tuple[PPO, PPO]:
    """Train in two halves."""
    torch.set_num_threads(1)
    seed_everything(0)
    first = fit(max_env_steps // 2, root)
    print(f"Stopped after {first.env_steps} environment steps")
    second = fit(max_env_steps, root, ckpt_path=f"{root}/last.ckpt")
    print(f"Resumed to {second.env_steps} environment steps")
    return first, second


if __name__ == "__main__":
    main()

"""Stop a run half way and go on from its checkpoint, as after a crash or on a machine that may be taken away.

    python examples/resume.py

On the command line this is `--ckpt_path last`; here the file is named.
"""

import torch
from lightning.pytorch import Trainer, seed_everything

from lightning_rl import PPO, EnvStepLimit, EnvStepProgressBar, LastCheckpoint, RolloutDataModule


def fit(max_env_steps: int, root: str, ckpt_path: str | None = None) -> PPO:
    """Train until the clock of the run shows `max_env_steps`."""
    data = RolloutDataModule("CartPole-v1", num_envs=8, rollout_length=128, rollouts_per_epoch=5)
    model = PPO(data.observation_space, data.action_space, normalization={"observations": True})
    trainer = Trainer(
        max_epochs=-1,
        # The newest checkpoint of all, whereas ModelCheckpoint keeps the best.
        callbacks=[EnvStepLimit(max_env_steps), LastCheckpoint(root), EnvStepProgressBar()],
        accelerator="cpu",
        logger=False,
        num_sanity_val_steps=0,
    )
    # Clock, optimiser, normalisers, schedules and random generators go on from where they were.
    trainer.fit(model, data, ckpt_path=ckpt_path)
    return model


def main(max_env_steps: int = 40_000, root: str = "runs/examples/resume") -> tuple[PPO, PPO]:
    """Train in two halves."""
    torch.set_num_threads(1)
    seed_everything(0)
    first = fit(max_env_steps // 2, root)
    print(f"Stopped after {first.env_steps} environment steps")
    second = fit(max_env_steps, root, ckpt_path=f"{root}/last.ckpt")
    print(f"Went on to {second.env_steps} environment steps")
    return first, second


if __name__ == "__main__":
    main()

"""Stop a run half way and go on from its checkpoint, as after a crash or on a preemptible machine.

    python examples/resume.py
"""

from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_rl import PPO, EnvStepLimit, RolloutDataModule


def fit(max_env_steps: int, root: str, ckpt_path: str | None = None) -> PPO:
    """Train until the clock of the run shows `max_env_steps`."""
    data = RolloutDataModule("CartPole-v1", num_envs=8, rollout_length=128, rollouts_per_epoch=5)
    model = PPO(data.observation_space, data.action_space, normalize_observations=True)
    trainer = Trainer(
        max_epochs=-1,
        callbacks=[EnvStepLimit(max_env_steps), ModelCheckpoint(root, save_last=True)],
        accelerator="cpu",
        logger=False,
        log_every_n_steps=5,
        num_sanity_val_steps=0,
    )
    # Clock, optimiser, normalisers, schedules and random generators go on from where they were.
    trainer.fit(model, data, ckpt_path=ckpt_path)
    return model


def main(max_env_steps: int = 40_000, root: str = "runs/examples/resume") -> PPO:
    """Train in two halves."""
    seed_everything(0)
    first = fit(max_env_steps // 2, root)
    print(f"stopped after {first.env_steps} environment steps")
    second = fit(max_env_steps, root, ckpt_path=f"{root}/last.ckpt")
    print(f"went on to {second.env_steps} environment steps")
    return second


if __name__ == "__main__":
    main()

"""Train PPO's `loss` with Lightning Fabric, in a loop of your own.

    python examples/fabric.py

Fabric provides the device, the precision and the optimizer step. Everything else that the Trainer does is missing:
checkpoints, logging, evaluation, schedules, running statistics, and checks of the options.
"""

from typing import Literal

import torch
from lightning.fabric import Fabric

from lightning_rl import PPO, RolloutDataModule
from lightning_rl.data.collector import Sampler


def main(max_env_steps: int = 60_000, precision: Literal["32-true", "bf16-mixed"] = "32-true") -> list[float]:
    """Train on CartPole-v1 and return the mean episode return of each rollout in which episodes ended."""
    torch.set_num_threads(1)
    fabric = Fabric(accelerator="cpu", devices=1, precision=precision)
    fabric.seed_everything(0)
    data = RolloutDataModule("CartPole-v1", num_envs=8, rollout_length=128)
    model = PPO(data.observation_space, data.action_space)
    wrapped, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-5))
    wrapped.mark_forward_method("loss")
    sampler = Sampler(data.spec, data.num_envs, data.rollout_length, info_keys=())
    sampler.start(seed=0, rank=0, device=fabric.device, dtype=model.policy.dtype)
    returns = []
    while model.env_steps < max_env_steps:
        with fabric.autocast():
            rollout = sampler.collect(model.policy, model.policy_version)
        model.steps.reset()
        for minibatch in model.minibatches(model.batch(rollout), num_epochs=4, num_minibatches=4):
            optimizer.zero_grad()
            fabric.backward(wrapped.loss(minibatch).total)
            fabric.clip_gradients(wrapped, optimizer, max_norm=0.5)
            optimizer.step()
        model.env_steps += rollout.num_steps
        if finished := rollout.episodes.returns:
            returns.append(sum(finished) / len(finished))
            print(f"environment step {model.env_steps}: return {returns[-1]:.0f}")
    sampler.close()
    return returns


if __name__ == "__main__":
    main()

"""Two ways to use a custom network.

    python examples/custom_network.py

An *encoder* turns observations into features; the package adds the heads for actions and value. Checkpoints contain its
class path, which also works in YAML. Overriding `make_policy` changes the whole actor-critic.
"""

import functools

import torch
from gymnasium import spaces
from lightning.pytorch import Trainer, seed_everything
from torch import Tensor, nn

from lightning_rl import PPO, ActorCritic, EnvStepLimit, EnvStepProgressBar, PolicyConfig, RolloutDataModule


class FourierEncoder(nn.Module):
    """Random Fourier features of the observation, then one linear layer."""

    frequencies: Tensor

    def __init__(self, space: spaces.Box, num_frequencies: int = 32, out_features: int = 64) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.randn(space.shape[0], num_frequencies))
        self.linear = nn.Linear(2 * num_frequencies, out_features)
        self.out_features = out_features  # input size of the heads

    def forward(self, observations: Tensor) -> Tensor:
        """Map observations `[..., n]` to features `[..., out_features]`."""
        angles = observations.to(self.linear.weight.dtype) @ self.frequencies
        return torch.tanh(self.linear(torch.cat([angles.sin(), angles.cos()], dim=-1)))


class LinearCriticPPO(PPO):
    """PPO whose critic is linear in the observation."""

    def make_policy(self) -> ActorCritic:
        """Return the policy of PPO with another encoder and value head for the critic."""
        policy = super().make_policy()
        policy.critic_encoder = nn.Identity()
        policy.value_head = nn.Linear(spaces.flatdim(self.observation_space), 1)
        return policy


def main(max_env_steps: int = 20_000) -> list[PPO]:
    """Train one model with each network."""
    torch.set_num_threads(1)
    seed_everything(0)
    data = RolloutDataModule("CartPole-v1", num_envs=8, rollout_length=128)
    config = PolicyConfig(network=functools.partial(FourierEncoder, num_frequencies=16))
    models = [
        PPO(data.observation_space, data.action_space, policy=config),
        LinearCriticPPO(data.observation_space, data.action_space),
    ]
    for model in models:
        trainer = Trainer(
            max_epochs=-1,
            callbacks=[EnvStepLimit(max_env_steps), EnvStepProgressBar()],
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            num_sanity_val_steps=0,
        )
        trainer.fit(model, RolloutDataModule("CartPole-v1", num_envs=8, rollout_length=128))
        trainer.validate(model, data)
    return models


if __name__ == "__main__":
    main()

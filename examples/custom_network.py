"""Bring your own network, in the two ways there are.

    python examples/custom_network.py

An *encoder* turns observations into features; heads for actions and value are added to it. Named by its class path it also
works from YAML and survives `load_from_checkpoint`. Overriding `make_policy` replaces the whole actor-critic.
"""

import torch
from gymnasium import spaces
from lightning.pytorch import Trainer, seed_everything
from torch import Tensor, nn

from lightning_rl import PPO, ActorCritic, EnvStepLimit, RolloutDataModule


class FourierEncoder(nn.Module):
    """Random Fourier features of the observation, then one linear layer."""

    def __init__(self, space: spaces.Box, num_frequencies: int = 32, out_features: int = 64) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.randn(space.shape[0], num_frequencies))
        self.linear = nn.Linear(2 * num_frequencies, out_features)
        self.out_features = out_features  # the heads need to know it

    def forward(self, observations: Tensor) -> Tensor:
        """Map observations `[..., n]` to features `[..., out_features]`."""
        angles = observations.to(self.linear.weight.dtype) @ self.frequencies
        return torch.tanh(self.linear(torch.cat([angles.sin(), angles.cos()], dim=-1)))


class SmallCriticPPO(PPO):
    """PPO with a policy of its own making: a smaller network for the critic."""

    def make_policy(self) -> ActorCritic:
        """Return the policy."""
        policy = super().make_policy()
        policy.critic_encoder = nn.Sequential(nn.Linear(self.observation_space.shape[0], 64), nn.Tanh())
        return policy


def main(max_env_steps: int = 20_000) -> list[PPO]:
    """Train both for a while."""
    seed_everything(0)
    data = RolloutDataModule("CartPole-v1")
    spaces_ = data.observation_space, data.action_space
    encoder = {"class_path": f"{FourierEncoder.__module__}.FourierEncoder", "init_args": {"num_frequencies": 16}}
    models = [PPO(*spaces_, network=encoder), SmallCriticPPO(*spaces_)]
    for model in models:
        trainer = Trainer(
            max_epochs=-1,
            callbacks=[EnvStepLimit(max_env_steps)],
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            log_every_n_steps=10,
        )
        trainer.fit(model, RolloutDataModule("CartPole-v1"))
    return models


if __name__ == "__main__":
    main()

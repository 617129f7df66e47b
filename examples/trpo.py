"""TRPO (Schulman et al. 2015): natural gradient by conjugate gradients, then a line search.

    python examples/trpo.py

It needs separate encoders, the default without images, and for several ranks `ddp_find_unused_parameters_true`.
"""

from typing import Any

import torch
from lightning.pytorch import Trainer, seed_everything
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from lightning_rl import Batch, EnvStepLimit, OnPolicyAlgorithm, Rollout, RolloutDataModule
from lightning_rl.distributed import average
from lightning_rl.training.loss import Loss
from lightning_rl.training.parameter_groups import parameters_of_policy


class TRPO(OnPolicyAlgorithm):
    """Trust region policy optimization."""

    def __init__(self, *args: Any, max_kl: float = 0.01, **kwargs: Any) -> None:  # options of the base class
        super().__init__(*args, **kwargs)
        self.max_kl, self.actor = max_kl, parameters_of_policy(self.policy)

    def update(self, rollout: Rollout) -> None:
        self.improve(batch := self.batch(rollout))
        for minibatch in self.minibatches(batch, num_epochs=10, num_minibatches=4):
            self.descend(self.loss, minibatch)

    def loss(self, batch: Batch) -> Loss:
        loss = self.new_loss(batch)
        loss.add_value(self.actor_critic(batch)[1])
        return loss

    def improve(self, batch: Batch) -> None:
        with torch.no_grad():
            old, _ = self.actor_critic(batch)

        def surrogate_and_kl() -> tuple[torch.Tensor, torch.Tensor]:
            distribution, _ = self.actor_critic(batch)
            ratios = (distribution.log_prob(batch.actions) - batch.log_probs).exp()
            return batch.mean(-ratios * batch.advantages), batch.mean(old.kl(distribution))

        def gradient(of: torch.Tensor, **options: Any) -> torch.Tensor:
            return torch.cat([x.flatten() for x in torch.autograd.grad(of, self.actor, **options)])

        loss, kl = surrogate_and_kl()
        downhill, slope = -average(gradient(loss, retain_graph=True)), gradient(kl, create_graph=True)
        x, residual, direction = torch.zeros_like(downhill), downhill, downhill
        for _ in range(10):  # conjugate gradients: x becomes the inverse Fisher matrix times downhill
            product = average(gradient(slope @ direction, retain_graph=True)) + 0.1 * direction
            rate = residual @ residual / (direction @ product).clamp(min=1e-12)
            x, before, residual = x + rate * direction, residual, residual - rate * product
            direction = residual + residual @ residual / (before @ before).clamp(min=1e-12) * direction
        step = x * (2 * self.max_kl / (x @ downhill).clamp(min=1e-12)).sqrt()
        with torch.no_grad():
            start, old_loss = parameters_to_vector(self.actor), average(loss)
            for scale in [*(0.8**i for i in range(10)), 0.0]:  # 0 restores the parameters
                vector_to_parameters(start + scale * step, self.actor)
                new_loss, new_kl = average(torch.stack(surrogate_and_kl()))
                if new_loss < old_loss and new_kl <= self.max_kl:
                    break
        self.steps.observe(policy_loss=new_loss, kl=new_kl)


def main(max_env_steps: int = 40_000) -> float:
    """Train on CartPole-v1 and return the mean return of 20 evaluation episodes."""
    torch.set_num_threads(1)
    seed_everything(0)
    limit, data = EnvStepLimit(max_env_steps), RolloutDataModule("CartPole-v1", 8, 128, evaluation={"episodes": 20})
    model = TRPO(data.observation_space, data.action_space, gamma=0.98, learning_rate=1e-3)
    trainer = Trainer(max_epochs=-1, accelerator="cpu", callbacks=[limit], default_root_dir="runs/examples/trpo")
    trainer.fit(model, data)
    return trainer.test(model, data)[0]["test/episode_return"]


if __name__ == "__main__":
    main()

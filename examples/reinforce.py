"""REINFORCE with a learned baseline: a custom algorithm in `__init__`, `update` and `loss`.

    python examples/reinforce.py

docs/custom.md explains each call in its section Algorithm. The base class adds devices, ranks, masks, recurrent
policies, checkpoints, schedules and logging.
"""

from typing import Any

import torch
from lightning.pytorch import Trainer, seed_everything

from lightning_rl import Batch, EnvStepLimit, EnvStepProgressBar, OnPolicyAlgorithm, Rollout, RolloutDataModule
from lightning_rl import functional as rl
from lightning_rl.training.loss import Loss


class Reinforce(OnPolicyAlgorithm):
    """REINFORCE with a value baseline (Williams 1992): one gradient step per rollout."""

    def __init__(self, *args: Any, value_coef: float = 0.5, **kwargs: Any) -> None:  # options of the base class
        super().__init__(*args, **kwargs)
        self.value_coef = value_coef
        self.estimator.gae_lambda = 1.0  # advantage = return - value

    def update(self, rollout: Rollout) -> None:
        """Take one gradient step on all steps of a rollout."""
        for batch in self.minibatches(self.batch(rollout)):
            self.descend(self.loss, batch)

    def loss(self, batch: Batch) -> Loss:
        """Return the policy-gradient loss plus the loss of the baseline."""
        distribution, values = self.actor_critic(batch)
        loss = self.new_loss(batch)
        log_probs = distribution.log_prob(batch.actions)
        loss.add("policy_loss", rl.policy_gradient_loss(log_probs, batch.advantages))
        loss.add_value(values, self.value_coef)
        return loss


def main(max_env_steps: int = 100_000) -> float:
    """Train on CartPole-v1 and return the mean return of 20 evaluation episodes."""
    torch.set_num_threads(1)
    seed_everything(0)
    data = RolloutDataModule("CartPole-v1", num_envs=8, rollout_length=16, evaluation={"episodes": 20})
    options: dict[str, Any] = {"gamma": 0.98, "learning_rate": 5e-3, "optimizer": {"anneal": True}}
    model = Reinforce(data.observation_space, data.action_space, **options)
    trainer = Trainer(
        max_epochs=-1,  # EnvStepLimit ends the run
        limit_val_batches=0,
        accelerator="cpu",
        callbacks=[EnvStepLimit(max_env_steps), EnvStepProgressBar()],
        default_root_dir="runs/examples/reinforce",
    )
    trainer.fit(model, data)
    (metrics,) = trainer.test(model, data)
    return metrics["test/episode_return"]


if __name__ == "__main__":
    main()

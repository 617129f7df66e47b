"""PPO once more, to compare with: loops over rows, `torch.distributions`, and nothing of the package."""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Categorical, Distribution, Independent, Normal

from lightning_rl import Rollout
from tests.helpers import merged

DEFAULTS: dict[str, Any] = {
    "learning_rate": 1e-3,
    "num_epochs": 3,
    "num_minibatches": 4,
    "gamma": 0.97,
    "gae_lambda": 0.9,
    "clip_range": 0.2,
    "value_coef": 0.5,
    "entropy_coef": 0.0,
    "target_kl": None,
    "optimizer": {"max_grad_norm": 0.5},
    "advantages": {"normalize": "minibatch", "on_truncation": "bootstrap"},
    "normalization": {"observations": False, "rewards": False},
    "clipping": {"value": None},
}


class SlowPPO:
    """Learns from rollouts one row at a time.

    Args:
        parameters: Initial ones, by the names of `ActorCritic` with separate MLP encoders of tanh units.
        options: What differs from `DEFAULTS`.
        make_optimizer: Makes the optimizer of the parameters; Adam by default.
        learning_rates: Learning rate of each rollout; constant by default.
    """

    def __init__(
        self,
        parameters: dict[str, Tensor],
        options: dict[str, Any],
        make_optimizer: Callable[..., torch.optim.Optimizer] | None = None,
        learning_rates: list[float] | None = None,
    ) -> None:
        self.parameters = {name: p.detach().clone().requires_grad_() for name, p in parameters.items()}
        self.options = merged(DEFAULTS, options)
        self.learning_rates = learning_rates
        rate = self.options["learning_rate"]
        if make_optimizer is None:
            self.optimizer = torch.optim.Adam(self.parameters.values(), rate, eps=1e-5, foreach=False, fused=False)
        else:
            self.optimizer = make_optimizer(list(self.parameters.values()), lr=rate)
        self.num_updates = 0
        self.num_rollouts = 0
        self.seen_observations: list[Tensor] = []
        self.seen_returns: list[float] = []
        self.running_returns: dict[int, float] = {}

    def learn(self, rollout: Rollout, generator: torch.Generator) -> None:
        """Do all updates from one rollout."""
        if self.learning_rates is not None:
            self.optimizer.param_groups[0]["lr"] = self.learning_rates[self.num_rollouts]
        rows = self.rows(rollout)
        if self.options["advantages"]["normalize"] == "rollout":
            self.normalize(rows)
        self.update(rows, generator)
        self.take_into_statistics(rollout)
        self.num_rollouts += 1

    def update(self, rows: list[dict[str, Any]], generator: torch.Generator) -> None:
        for _ in range(self.options["num_epochs"]):
            order = torch.randperm(len(rows), generator=generator).tolist()
            for part in split([rows[i] for i in order], self.options["num_minibatches"]):
                loss, kl = self.loss([dict(row) for row in part])
                if self.options["target_kl"] is not None and kl > 1.5 * self.options["target_kl"]:
                    return
                self.step(loss)

    def rows(self, rollout: Rollout) -> list[dict[str, Any]]:
        """Every real step with its advantage and return."""
        length, num_envs = rollout.shape
        gamma, lambda_ = self.options["gamma"], self.options["gae_lambda"]
        advantages = torch.zeros(length, num_envs, dtype=torch.float64)
        for b in range(num_envs):
            advantage = 0.0
            for t in reversed(range(length)):
                terminated, truncated = bool(rollout.terminated[t, b]), bool(rollout.truncated[t, b])
                stop = terminated or (truncated and self.options["advantages"]["on_truncation"] == "terminal")
                next_value = 0.0 if stop else float(rollout.next_values[t, b])
                delta = self.reward(rollout.rewards[t, b]) + gamma * next_value - float(rollout.values[t, b])
                advantage = delta + (0.0 if terminated or truncated else gamma * lambda_ * advantage)
                advantages[t, b] = advantage
        rows = []
        for t in range(length):
            for b in range(num_envs):
                if rollout.valid is None or rollout.valid[t, b]:
                    row = {
                        "observation": self.observation(rollout.observations[t, b]),
                        "action": rollout.actions[t, b],
                        "log_prob": rollout.log_probs[t, b],
                        "value": rollout.values[t, b],
                        "advantage": advantages[t, b].to(rollout.values.dtype),
                    }
                    rows.append(row | {"return": row["advantage"] + row["value"]})
        return rows

    def reward(self, reward: Tensor) -> float:
        if not self.options["normalization"]["rewards"]:
            return float(reward)
        returns = self.seen_returns or [-1.0, 1.0]  # a variance of 1 before any data
        mean = sum(returns) / len(returns)
        variance = sum((x - mean) ** 2 for x in returns) / len(returns)
        return max(-10.0, min(10.0, float(reward) / (variance + 1e-8) ** 0.5))

    def observation(self, observation: Tensor) -> Tensor:
        if not self.options["normalization"]["observations"]:
            return observation
        seen = torch.stack(self.seen_observations or [-torch.ones(3), torch.ones(3)]).double()
        return (observation - seen.mean(0)).div((seen.var(0, correction=0) + 1e-8).sqrt()).to(observation.dtype)

    def take_into_statistics(self, rollout: Rollout) -> None:
        length, num_envs = rollout.shape
        for b in range(num_envs):
            running = self.running_returns.get(b, 0.0)
            for t in range(length):
                if rollout.valid is None or rollout.valid[t, b]:
                    running = float(rollout.rewards[t, b]) + self.options["gamma"] * running
                    self.seen_returns.append(running)
                    self.seen_observations.append(rollout.observations[t, b])
                if rollout.terminated[t, b] or rollout.truncated[t, b]:
                    running = 0.0
            self.running_returns[b] = running

    def normalize(self, rows: list[dict[str, Any]]) -> None:
        advantages = torch.stack([row["advantage"] for row in rows])
        mean = advantages.mean()
        deviation = (advantages - mean).square().sum().div(len(rows) - 1).sqrt()
        for row in rows:
            row["advantage"] = (row["advantage"] - mean) / (deviation + 1e-8)

    def loss(self, rows: list[dict[str, Any]]) -> tuple[Tensor, float]:
        """The loss of a minibatch, and the approximate divergence from the policy that collected it."""
        if self.options["advantages"]["normalize"] == "minibatch":
            self.normalize(rows)
        total, kl = torch.zeros(()), 0.0
        for row in rows:
            distribution, value = self.forward(row["observation"])
            log_ratio = distribution.log_prob(row["action"]) - row["log_prob"]
            ratio = log_ratio.exp()
            epsilon, advantage = self.options["clip_range"], row["advantage"]
            surrogate = torch.min(ratio * advantage, ratio.clip(1 - epsilon, 1 + epsilon) * advantage)
            error = (value - row["return"]) ** 2
            if (limit := self.options["clipping"]["value"]) is not None:
                clipped = row["value"] + (value - row["value"]).clip(-limit, limit)
                error = torch.max(error, (clipped - row["return"]) ** 2)
            entropy = distribution.entropy()
            total = total - surrogate + self.options["value_coef"] * error / 2 - self.options["entropy_coef"] * entropy
            kl += float((ratio - 1 - log_ratio).detach())
        return total / len(rows), kl / len(rows)

    def forward(self, observation: Tensor) -> tuple[Distribution, Tensor]:
        actor, critic = (self.encode(name, observation) for name in ("actor_encoder", "critic_encoder"))
        value = self.linear("value_head", critic).squeeze()
        if "action_head.log_std" in self.parameters:
            deviation = self.parameters["action_head.log_std"].exp()
            return Independent(Normal(self.linear("action_head.mean", actor), deviation), 1), value
        return Categorical(logits=self.linear("action_head.logits", actor)), value

    def encode(self, encoder: str, x: Tensor) -> Tensor:
        for layer in ("0", "2"):
            x = self.linear(f"{encoder}.layers.{layer}", x).tanh()
        return x

    def linear(self, name: str, x: Tensor) -> Tensor:
        return self.parameters[f"{name}.weight"] @ x + self.parameters[f"{name}.bias"]

    def step(self, loss: Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()
        if (limit := self.options["optimizer"]["max_grad_norm"]) is not None:
            gradients = [p.grad for p in self.parameters.values()]
            norm = torch.sqrt(sum(g.square().sum() for g in gradients))
            for gradient in gradients:
                gradient.mul_(min(1.0, limit / (float(norm) + 1e-6)))
        self.optimizer.step()
        self.num_updates += 1


def split(rows: list[Any], parts: int) -> list[list[Any]]:
    """In their order, the first parts one longer where they cannot be equal."""
    size, longer = divmod(len(rows), parts)
    bounds = [i * size + min(i, longer) for i in range(parts + 1)]
    return [rows[a:b] for a, b in itertools.pairwise(bounds)]

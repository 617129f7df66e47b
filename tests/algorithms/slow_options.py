"""The slow PPO with the options that other libraries have."""

import copy
from typing import Any

import torch
from torch import Tensor

from lightning_rl import Rollout
from tests.algorithms.slow_ppo import SlowPPO, split
from tests.helpers import merged

MORE: dict[str, Any] = {
    "optimizer": {"num_value_epochs": None},
    "advantages": {"recompute_advantages": False},
    "clipping": {"low": None, "high": None, "dual": None, "value_huber_delta": None, "rollback": False},
}


class SlowOptions(SlowPPO):
    """Learns as `SlowPPO` does, with the options of `MORE` besides."""

    def __init__(self, parameters: dict[str, Tensor], options: dict[str, Any]) -> None:
        super().__init__(parameters, merged(MORE, options))
        self.num_taken_back = 0

    def learn(self, rollout: Rollout, generator: torch.Generator) -> None:
        value_epochs = self.options["optimizer"]["num_value_epochs"] or self.options["num_epochs"]
        rows = self.rows(rollout)
        old_values = [row["value"] for row in rows]
        for epoch in range(max(self.options["num_epochs"], value_epochs)):
            if epoch > 0 and self.options["advantages"]["recompute_advantages"]:
                rows = self.rows(self.with_recomputed_values(rollout))
                assert any(abs(float(row["value"] - old)) > 1e-6 for row, old in zip(rows, old_values, strict=True))
            acts, values = epoch < self.options["num_epochs"], epoch < value_epochs
            order = torch.randperm(len(rows), generator=generator).tolist()
            for part in split([rows[i] for i in order], self.options["num_minibatches"]):
                if not self.update_from(part, acts, values):
                    return

    def update_from(self, part: list[dict[str, Any]], acts: bool, values: bool) -> bool:
        """Make one update; return whether to continue."""
        limit = 1.5 * (self.options["target_kl"] or float("inf"))
        if acts and self.divergence(part) > limit:
            return False
        before = copy.deepcopy((self.parameters, self.optimizer.state_dict()))
        self.step(self.terms(part, acts, values))
        if acts and self.options["clipping"]["rollback"] and self.divergence(part) > limit:
            with torch.no_grad():
                for name, parameter in self.parameters.items():
                    parameter.copy_(before[0][name])
            self.optimizer.load_state_dict(before[1])
            self.num_taken_back += 1
            return False
        return True

    def terms(self, rows: list[dict[str, Any]], acts: bool, values: bool) -> Tensor:
        rows = [dict(row) for row in rows]
        self.normalize(rows)
        total = torch.zeros(())
        for row in rows:
            distribution, value = self.forward(row["observation"])
            if acts:
                ratio = (distribution.log_prob(row["action"]) - row["log_prob"]).exp()
                total = total - self.objective(ratio, row["advantage"])
            if values:
                total = total + self.options["value_coef"] * self.error(value, row)
        return total / len(rows)

    def step(self, loss: Tensor) -> None:
        """Like the base class, but a half of the network without gradient does not change."""
        self.optimizer.zero_grad()
        loss.backward()
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        if (limit := self.options["optimizer"]["max_grad_norm"]) is not None:
            norm = torch.sqrt(sum(g.square().sum() for g in gradients))
            for gradient in gradients:
                gradient.mul_(min(1.0, limit / (float(norm) + 1e-6)))
        self.optimizer.step()
        self.num_updates += 1

    def objective(self, ratio: Tensor, advantage: Tensor) -> Tensor:
        low, high = (self.options["clipping"][side] or self.options["clip_range"] for side in ("low", "high"))
        objective = torch.min(ratio * advantage, ratio.clip(1 - low, 1 + high) * advantage)
        if self.options["clipping"]["dual"] is not None and advantage < 0:
            objective = torch.max(objective, self.options["clipping"]["dual"] * advantage)
        return objective

    def error(self, value: Tensor, row: dict[str, Any]) -> Tensor:
        candidates = [value]
        if (limit := self.options["clipping"]["value"]) is not None:
            candidates.append(row["value"] + (value - row["value"]).clip(-limit, limit))
        return torch.stack([self.one_error(candidate - row["return"]) for candidate in candidates]).max()

    def one_error(self, error: Tensor) -> Tensor:
        delta = self.options["clipping"]["value_huber_delta"]
        if delta is None or abs(float(error)) <= delta:
            return error**2 / 2
        return delta * (error.abs() - delta / 2)

    @torch.no_grad()
    def divergence(self, rows: list[dict[str, Any]]) -> float:
        kl = 0.0
        for row in rows:
            log_ratio = self.forward(row["observation"])[0].log_prob(row["action"]) - row["log_prob"]
            kl += float(log_ratio.exp() - 1 - log_ratio)
        return kl / len(rows)

    @torch.no_grad()
    def with_recomputed_values(self, rollout: Rollout) -> Rollout:
        """The rollout with values of the parameters of the moment."""
        result = copy.copy(rollout)
        result.values, result.next_values = rollout.values.clone(), rollout.next_values.clone()
        length, num_envs = rollout.shape
        finals = {tuple(place): k for k, place in enumerate(rollout.final_indices.tolist())}
        for t in range(length):
            for b in range(num_envs):
                reached = rollout.observations[t + 1, b]
                if (t, b) in finals:
                    reached = rollout.final_observations[finals[t, b]]
                result.values[t, b] = self.forward(rollout.observations[t, b])[1]
                result.next_values[t, b] = 0 if rollout.terminated[t, b] else self.forward(reached)[1]
        return result

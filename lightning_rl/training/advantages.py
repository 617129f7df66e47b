"""Advantages and returns of a rollout, and the normalization of advantages."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_rl import functional as rl
from lightning_rl.distributed import exact_dtype, moments, world_size
from lightning_rl.nested import Nested
from lightning_rl.policies.distributions import Distribution
from lightning_rl.policies.values import acting_distributions, with_recomputed_values
from lightning_rl.rollouts.batch import Batch
from lightning_rl.rollouts.rollout import OnTruncation, Rollout
from lightning_rl.training.config import NormalizeAdvantages
from lightning_rl.training.normalizers import Normalizers
from lightning_rl.validation import check


@dataclass(eq=False)
class AdvantageEstimator:
    """Computes advantages and returns by generalized advantage estimation (Schulman et al. 2016).

    `gae_lambda` is λ: 0 gives one-step, 1 Monte Carlo advantages. For the other options see `AdvantageConfig`.
    """

    policy: Any  # a `Policy`
    normalizers: Normalizers
    gamma: float = 0.99
    on_truncation: OnTruncation = "bootstrap"
    estimator: Literal["gae", "monte_carlo"] = "gae"
    value_target: Literal["td_lambda", "empirical"] = "td_lambda"
    recompute_values: bool = False
    recompute_advantages: bool = False
    normalize: NormalizeAdvantages = "none"
    gae_lambda: float = 0.95

    def batch(self, rollout: Rollout, weights: Tensor | None = None, **per_step: Nested) -> Batch:
        """Return the steps of a rollout as a batch with `advantages` and value targets `returns`.

        Weights and further tensors are `[T, B, ...]`; without weights all steps count equally.
        """
        if self.recompute_values:
            rollout = with_recomputed_values(self.policy, rollout)
        advantages, returns = self.advantages_and_returns(rollout)
        rows, weights = self.counted_steps(rollout, weights)
        batch = rollout.flatten(rows, advantages=advantages, returns=returns, weights=weights, **per_step)
        batch.source = rollout, rows
        return batch

    def renewed(self, batch: Batch) -> Batch:
        """Return a batch with values, advantages and returns of the current critic, if it has advantages."""
        if "advantages" not in batch.fields:
            return batch
        expected = "False, since the algorithm selects rows, or changes values, advantages or returns"
        source = batch.source
        check(source is not None, "advantages.recompute_advantages", True, expected)
        rollout, rows = source  # type: ignore[misc]
        rollout = with_recomputed_values(self.policy, rollout)
        advantages, returns = self.advantages_and_returns(rollout)
        new = rollout.flatten(rows, advantages=advantages, returns=returns)
        made = batch.replace(values=new.values, advantages=new.advantages, returns=new.returns)
        made.source = source
        return made

    def advantages_and_returns(self, rollout: Rollout) -> tuple[Tensor, Tensor]:
        """Return advantages and value targets, `[T, B]`. Override this method for another estimator."""
        lambda_ = 1.0 if self.estimator == "monte_carlo" else self.gae_lambda
        advantages = self.gae(rollout, lambda_)
        empirical = self.value_target == "empirical" and lambda_ != 1
        return advantages, (self.gae(rollout, 1.0) if empirical else advantages) + rollout.values

    def gae(self, rollout: Rollout, lambda_: float) -> Tensor:
        """Return generalized advantage estimates `[T, B]` of the normalized rewards."""
        rewards, discounts = self.normalizers.rewards(rollout), rollout.discounts(self.gamma, self.on_truncation)
        return rl.gae(rewards, rollout.values, rollout.next_values, discounts, rollout.traces(lambda_))

    def vtrace(self, rollout: Rollout, log_rhos: Tensor, lambda_: float, *limits: Any) -> rl.VTraceReturns:
        """Return V-trace targets and advantages `[T, B]` (Espeholt et al. 2018) for log importance ratios `[T, B]`.

        `limits` are the last arguments of `lightning_rl.functional.vtrace`; by default it clips the ratios at 1.
        """
        rewards, discounts = self.normalizers.rewards(rollout), rollout.discounts(self.gamma, self.on_truncation)
        traces = rollout.traces(lambda_)
        return rl.vtrace(log_rhos, rewards, rollout.values, rollout.next_values, discounts, traces, *limits)

    def counted_steps(self, rollout: Rollout, weights: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Return the mask of steps to learn from (None: all), and their weights (None: equal)."""
        if weights is None:
            return rollout.valid, None
        return (weights != 0) if rollout.valid is None else rollout.valid & (weights != 0), weights

    # ------------------------------------------------------------------ normalizing

    def normalized(self, batch: Batch) -> Tensor:
        """Return the advantages of a minibatch for the policy loss, `[N]`; for `rollout` these are normalized."""
        return self.standardized(batch) if self.normalize == "minibatch" else batch.advantages

    def standardized(self, batch: Batch) -> Tensor:
        """Return the standardized advantages `[N]`; 0 in rows of weight 0."""
        if batch.is_normalized:
            return batch.advantages
        if "weights" not in batch.fields:
            return self.standardize([batch.advantages])[0]
        counted = batch.weights != 0
        (standardized,) = self.standardize([batch.advantages[counted]])
        return torch.zeros_like(batch.advantages).masked_scatter(counted, standardized)

    def standardize(self, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return `(x - mean) / (std + 1e-8)` of each part over its entries on all ranks, with one collective call.

        Override this method for another normalization. Parts are the advantages `[N]` of minibatches; N may differ.
        """
        if world_size() == 1:
            if len(parts) == 1:
                return [rl.normalize_rows(parts[0].unsqueeze(0)).squeeze(0)]
            same = (list(some) for _, some in itertools.groupby(parts, key=len))
            return [part for some in same for part in rl.normalize_rows(torch.stack(some)).unbind()]
        # In float64 no digits of advantages in float32 are lost; equal entries become 0.
        exact = [part.to(exact_dtype(part.device)) for part in parts]
        counts, means, squares = moments(exact)
        scales = (squares / (counts - 1).clamp(min=1)).sqrt() + 1e-8
        each = zip(exact, parts, means, scales, strict=True)
        return [((x - mean) / scale).to(part.dtype) for x, part, mean, scale in each]

    def normalized_over_rollout(self, batch: Batch, kinds: Collection[str] = ("rollout",)) -> Batch:
        """Return the batch with advantages normalized over all its rows if `normalize` is one of `kinds`."""
        if self.normalize not in kinds or batch.is_normalized:
            return batch
        return self._with_normalized(batch.replace(), self.standardized(batch))

    def minibatches(
        self, batch: Batch, order: Tensor, num_minibatches: int, normalizes_in_loss: bool = False
    ) -> Iterator[Batch]:
        """Yield the minibatches of a pass, with normalized advantages if `normalize` is `minibatch`.

        All minibatches are normalized at once: this takes little longer than one, and a single collective call. A
        compiled loss of this package normalizes at almost no cost; another one may not call `normalized`.
        """
        cut = batch.minibatches(order, num_minibatches)
        in_loss = normalizes_in_loss and batch.is_plain and world_size() == 1
        if self.normalize != "minibatch" or batch.is_normalized or in_loss:
            yield from cut
            return
        if not batch.is_plain:
            yield from (self._with_normalized(part, self.standardized(part)) for part in cut)
            return
        advantages = batch.advantages.index_select(0, order.to(batch.advantages.device))
        each = self.standardize(advantages.tensor_split(num_minibatches))
        for part, normalized in zip(cut, each, strict=True):
            yield self._with_normalized(part, normalized)

    def _with_normalized(self, batch: Batch, advantages: Tensor) -> Batch:
        batch.fields["advantages"] = advantages
        batch.is_normalized = True
        return batch


def explained_variance(predictions: Tensor, targets: Tensor) -> Tensor:
    """Return 1 - Var[target - prediction] / Var[target] over the entries of all ranks."""
    if world_size() == 1:
        return rl.explained_variance(predictions, targets)
    dtype = exact_dtype(targets.device)
    _, _, (unexplained, total) = moments([(targets - predictions).to(dtype), targets.to(dtype)])
    return torch.where(total > 0, 1 - unexplained / total, torch.nan)


def with_acting_distributions(
    policy: nn.Module, rollout: Rollout, make: Callable[..., Batch], per_step: dict[str, Nested]
) -> Batch:
    """Return a batch with the parameters of the collecting distributions as `acting_distribution`.

    `make` makes the batch. It may update normalizers, so the distributions are computed first.
    """
    acting = acting_distributions(policy, rollout)
    if rollout.memory is None:
        return make(rollout, acting_distribution=acting, **per_step)
    return make(rollout, **per_step).replace(acting_distribution=acting)


def divergence(batch: Batch, distribution: Distribution) -> Tensor:
    """Return the exact KL(old ‖ new) of each row of a batch of `with_acting_distributions`, `[N]`, in nats."""
    return distribution.with_parameters(batch.acting_distribution).kl(distribution)

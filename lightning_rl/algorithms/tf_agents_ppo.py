"""PPO with the arithmetic of TF-Agents 0.19, errors included, to reproduce published results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from lightning_rl import functional as rl
from lightning_rl.algorithms.ppo_kl import PPOKLPenalty
from lightning_rl.distributed import exact_dtype, moments, world_size
from lightning_rl.nested import Nested, map_leaves
from lightning_rl.options import OrDict
from lightning_rl.policies.distributions import Distribution
from lightning_rl.policies.normalization import RunningMoments
from lightning_rl.rollouts.batch import Batch
from lightning_rl.rollouts.rollout import Rollout
from lightning_rl.spaces import SpaceOrDict
from lightning_rl.training.advantages import AdvantageEstimator
from lightning_rl.training.config import AdvantageConfig, NormalizationConfig, OptimizerConfig
from lightning_rl.training.loss import Loss
from lightning_rl.validation import NonNegativeFloat, PositiveInt, check


class TFAgentsEstimator(AdvantageEstimator):
    """Computes advantages and returns like TF-Agents; see `TFAgentsPPO`."""

    def batch(self, rollout: Rollout, weights: Tensor | None = None, **per_step: Nested) -> Batch:
        """Return all steps of a rollout; means divide by their number, including steps of weight 0."""
        batch = super().batch(rollout, weights, **per_step)
        learned = (batch.returns != 0) | (batch.advantages != 0)
        batch = batch.replace(weights=batch.weights * learned)
        batch.counts_all_rows = True
        return batch

    def advantages_and_returns(self, rollout: Rollout) -> tuple[Tensor, Tensor]:
        """Return advantages and value targets `[T, B]`; both are 0 at the last step."""
        values, last = rollout.values[:-1], rollout.values[-1]
        rewards = self.normalizers.rewards(rollout)[:-1]
        discounts = rollout.discounts(self.gamma, self.on_truncation)[:-1]
        returns = rl.discounted_returns(rewards, discounts, last)
        advantages = returns - values
        if self.estimator == "gae":
            own_last = torch.cat([values[1:], values[-1:]])  # not `last`: see `TFAgentsPPO`
            advantages = rl.gae(rewards, values, own_last, discounts, rollout.traces(self.gae_lambda)[:-1])
            if self.value_target == "td_lambda":
                returns = advantages + values
        padding = torch.zeros_like(rollout.values[:1])
        return torch.cat([advantages, padding]), torch.cat([returns, padding])

    def counted_steps(self, rollout: Rollout, weights: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return all steps, with weight 0 for steps that are not valid."""
        weights = torch.ones_like(rollout.values) if weights is None else weights
        counted = weights if rollout.valid is None else weights * rollout.valid
        return torch.ones_like(counted, dtype=torch.bool), counted

    def standardize(self, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return `(x - mean) / √(population variance + 1e-8)` of each part, over the entries of all ranks."""
        exact = [part.to(exact_dtype(part.device)) for part in parts]
        counts, means, squares = moments(exact)
        scales = (squares / counts + 1e-8).rsqrt()
        each = zip(exact, parts, means, scales, strict=True)
        return [((x - mean) * scale).to(part.dtype) for x, part, mean, scale in each]

    def standardized(self, batch: Batch) -> Tensor:
        """Return the standardized advantages; rows of weight 0 enter mean and variance too."""
        return batch.advantages if batch.is_normalized else self.standardize([batch.advantages])[0]


class TFAgentsPPO(PPOKLPenalty):
    """`PPOKLPenalty` with the defaults and arithmetic of TF-Agents' `PPOAgent`.

    Use `PPO` or `PPOKLPenalty` for new work. The differences (details: docs/coming_from_tf_agents.md):

    * The last step of a rollout only provides its value, and is not learned from. With GAE, the step before it
      bootstraps from its own value instead of the last one.
    * Time limits are terminal states.
    * Resets, last steps, and steps with return and advantage of exactly 0 have weight 0, but means divide by the number
      of all steps, and all steps enter standardization and normalizers. With `policy.memory`, resets enter the
      normalizers only.
    * Advantages are standardized with the population variance plus 1e-8.
    * The initial variances of the normalizers of observations (unless `initial_variance` is given) and rewards are 0,
      so that the first values are multiplied by 31.6 and clipped.
    * With several ranks the KL penalties and `clip_fraction` are summed over the ranks.

    Args:
        num_epochs: Passes over each rollout.
        num_minibatches: Minibatches of each pass: 1 like the agent, more like its `PPOLearner`.
        kl_cutoff_factor: As in `PPOKLPenalty`, but 0 disables the second penalty; with `initial_kl_coef` 0 too, it is
            `PPOClipAgent`, whose published results use `clip_range` 0.2.
        kl_cutoff_coef: As in `PPOKLPenalty`.
        value_coef: Twice the `value_pred_loss_coef` of TF-Agents, whose loss lacks the ½.
        optimizer: Optimizer; gradients are not clipped by default.
        advantages: How advantages and value targets are computed: `estimator` may be `gae`, then `value_target` may be
            `td_lambda`. `on_truncation` is always `terminal`.
        normalization: Running normalization of observations and rewards.
        sum_losses_over_ranks: Sum all losses over ranks instead of averaging them, like TF-Agents with
            `aggregate_losses_across_replicas` off.
        **kwargs: Options of `PPOKLPenalty`.
    """

    without_effect: ClassVar[Mapping[str, str]] = {
        "advantages.on_truncation": "TF-Agents takes time limits for terminal states"
    }

    def __init__(
        self,
        observation_space: SpaceOrDict,
        action_space: SpaceOrDict,
        *,
        num_epochs: PositiveInt = 25,
        num_minibatches: PositiveInt | None = 1,
        kl_cutoff_factor: NonNegativeFloat = 2.0,
        kl_cutoff_coef: NonNegativeFloat = 1000.0,
        value_coef: NonNegativeFloat = 1.0,
        optimizer: OrDict[OptimizerConfig] = OptimizerConfig(max_grad_norm=None),
        advantages: OrDict[AdvantageConfig] = AdvantageConfig(
            estimator="monte_carlo", value_target="empirical", on_truncation="terminal", normalize="minibatch"
        ),
        normalization: OrDict[NormalizationConfig] = NormalizationConfig(
            observations={"clip": 5.0, "epsilon": 1e-3}, rewards="reward_std"
        ),
        sum_losses_over_ranks: bool = False,
        **kwargs: Any,  # options of the base class
    ) -> None:
        super().__init__(
            observation_space,
            action_space,
            num_epochs=num_epochs,
            num_minibatches=num_minibatches,
            kl_cutoff_factor=kl_cutoff_factor,
            kl_cutoff_coef=kl_cutoff_coef if kl_cutoff_factor else 0.0,
            value_coef=value_coef,
            optimizer=optimizer,
            advantages=advantages,
            normalization=normalization,
            **kwargs,
        )
        self.sum_losses_over_ranks = sum_losses_over_ranks
        self.normalizers.counts_resets = True
        normalizers = [self.normalizers.of_rewards]
        observations = self.options["normalization.observations"]
        if not (isinstance(observations, dict) and "initial_variance" in observations):
            normalizers.append(self.normalizers.of_observations)
        for module in (x for normalizer in normalizers if normalizer is not None for x in normalizer.modules()):
            if isinstance(module, RunningMoments):
                module.variance.zero_()

    def check_run(self, trainer: Trainer, rollout_shape: tuple[int, int] | None) -> None:
        super().check_run(trainer, rollout_shape)
        if rollout_shape is not None:
            expected = "at least 2, since the last step only gives its value"
            check(rollout_shape[0] > 1, "rollout_length", rollout_shape[0], expected)

    def make_estimator(self, **options: Any) -> TFAgentsEstimator:  # options of the estimator
        return TFAgentsEstimator(self.policy, self.normalizers, **options)

    def loss(self, batch: Batch) -> Loss:
        """Return the loss over a minibatch; non-finite values in rows of weight 0 have no effect."""
        uncounted = batch.weights == 0

        def harmless(x: Tensor) -> Tensor:
            if not x.is_floating_point():
                return x
            return x.masked_fill(uncounted.view(-1, *[1] * (x.dim() - 1)) & ~x.isfinite(), 0)

        is_normalized = batch.is_normalized
        batch = batch.replace(**{name: map_leaves(harmless, x) for name, x in batch.fields.items()})
        batch.is_normalized = is_normalized
        if self.sum_losses_over_ranks:
            batch.weight *= world_size()
        return super().loss(batch)

    def clip_fraction(self, batch: Batch, is_clipped: Tensor) -> Tensor:
        """Return the share of all rows, weight 0 included, whose ratio is clipped, summed over ranks."""
        return world_size() * is_clipped.mean()

    @property
    def penalty_weight(self) -> float:
        """Number of ranks, since the penalties are summed over ranks."""
        return float(world_size())

    def penalized_kl(self, batch: Batch, distribution: Distribution) -> Tensor:
        """Return the mean KL(old ‖ new) on all ranks, also with `sum_losses_over_ranks`."""
        mean = batch.replace()
        if self.sum_losses_over_ranks:
            mean.weight = batch.weight / world_size()
        return super().penalized_kl(mean, distribution)

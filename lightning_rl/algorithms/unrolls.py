"""Learners from whole unrolls: what becomes of their rewards, and what their losses are divided by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from gymnasium import spaces
from torch import Tensor

from lightning_rl.algorithms.base import OnPolicyAlgorithm
from lightning_rl.distributed import exact_dtype
from lightning_rl.environments.wrappers.rewards import RewardClip, check_reward_options, make_reward_transform
from lightning_rl.nested import Nested
from lightning_rl.rollouts.batch import Batch
from lightning_rl.rollouts.rollout import Rollout
from lightning_rl.spaces import SpaceDict
from lightning_rl.training.unroll import Unroll
from lightning_rl.validation import check, is_one_of

Reduction = Literal["mean", "sum"]


class UnrollLearner(OnPolicyAlgorithm):
    """Learns from whole unrolls, with rewards that it bounds itself, by a sum or a mean over steps.

    Args:
        observation_space: Of one environment: a Gymnasium space, or its description by `space_to_dict`.
        action_space: Of one environment, likewise.
        reduction: Losses are the `mean` over steps, or their `sum`.
        reward_scale: Factor of rewards.
        reward_clip: Bounds of rewards after that: `abs_one`, `soft_asymmetric` or a number.
        **kwargs: Those of `OnPolicyAlgorithm`.

    Raises:
        ConfigurationError: A value is out of range; names field, value and what was expected.
    """

    def __init__(
        self,
        observation_space: spaces.Space[Any] | SpaceDict,
        action_space: spaces.Space[Any] | SpaceDict,
        *,
        reduction: Reduction = "mean",
        reward_scale: float = 1.0,
        reward_clip: RewardClip | None = None,
        **kwargs: Any,  # noqa: ANN401 - those of the base class
    ) -> None:
        super().__init__(observation_space, action_space, **kwargs)
        check(is_one_of(reduction, ("mean", "sum")), "reduction", reduction, "mean or sum")
        check_reward_options(reward_scale, reward_clip)
        self.reduction = reduction
        self._reward_transform = make_reward_transform(reward_scale, reward_clip)
        both = self._reward_transform is not None and self.reward_normalizer is not None
        expected = "false beside reward_scale or reward_clip"
        check(not both, "normalize_rewards", self.hparams["normalize_rewards"], expected)

    def normalized_rewards(self, rollout: Rollout) -> Tensor:
        """Return a rollout's rewards `[T, B]`, scaled and bounded, or as `normalize_rewards` says."""
        if self._reward_transform is None:
            return super().normalized_rewards(rollout)
        transformed: Tensor = self._reward_transform(rollout.rewards)
        return transformed

    def unroll(self, rollout: Rollout, **per_step: Nested) -> Unroll:
        """Return a rollout with its real steps as rows; those that do not count are among them, for traces go on there.

        Args:
            rollout: Any.
            **per_step: More tensors `[T, B, ...]` that the rows are to have.
        """
        places = torch.arange(rollout.rewards.numel(), device=rollout.rewards.device).view(rollout.shape)
        if (weights := self.given_weights(rollout)) is not None:
            per_step["weights"] = weights
        return Unroll(rollout, rollout.flatten(places=places, **per_step))

    def set_global_weights_together(self, batches: Sequence[Batch]) -> None:
        """Set what each row of some batches counts for, so that their `mean`s add up to one over all of them.

        That is 0 where no rank has a row that counts.
        """
        own = sum(float(batch.total_weight) for batch in batches)
        total = float(self.all_reduce(torch.tensor(own, dtype=exact_dtype(self.device), device=self.device)))
        for batch in batches:
            batch.weight = self.world_size / total if total else 0.0

    def scale(self, batch: Batch) -> float:
        """Return what makes of a mean what `reduction` asks for: 1, or how many rows of all ranks it is over."""
        return 1.0 if self.reduction == "mean" or not batch.weight else self.world_size / batch.weight

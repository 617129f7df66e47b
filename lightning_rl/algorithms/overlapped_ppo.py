"""Rollouts of an earlier policy, seen from the current one, so that PPO can learn from them as from its own.

The clipped surrogate objective goes out from the policy at the beginning of the updates. Where another one has acted,
that is made up for by importance weights between those two, which V-trace (Espeholt et al. 2018) bounds: in the targets
of the values, along the trajectory, and as a factor of the advantages. The ratio that is clipped then still says how
far the updates themselves have gone, as in the decoupled objective of Hilton et al. 2021.
"""

from __future__ import annotations

import copy
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from lightning_rl import functional as rl
from lightning_rl.nested import map_leaves
from lightning_rl.policies.values import in_chunks, values_reached, with_recomputed_values
from lightning_rl.rollouts.rollout import Rollout
from lightning_rl.training.unroll import Unroll

# Bounds of the importance weights of temporal differences, traces and advantages.
_CLIP = 1.0


@torch.no_grad()
def reevaluate(module: Any, rollout: Rollout) -> Rollout:  # noqa: ANN401 - an algorithm; they import this module
    """Return a rollout of the same steps with the log-probabilities and values of the current policy.

    Its `log_rhos` say how much likelier the actions are now than when they were taken.

    Args:
        module: The algorithm.
        rollout: Of this policy or an earlier one; stays as it is.
    """
    if rollout.memory is None:
        acted = map_leaves(itemgetter(slice(rollout.shape[0])), rollout.observations)
        now = in_chunks(lambda pair: module.policy.log_prob(*pair), (acted, rollout.actions), lead=2)
        result = with_recomputed_values(module.policy, rollout)
    else:
        places = torch.arange(rollout.rewards.numel(), device=rollout.rewards.device).view(rollout.shape)
        unroll = Unroll(rollout, rollout.flatten(places=places))
        distribution, values = module.evaluate(unroll.batch)
        now = unroll.grid(distribution.log_prob(unroll.batch.actions), rollout.log_probs)
        result = copy.copy(rollout)
        result.values = unroll.grid(values, rollout.values)
        result.next_values = values_reached(module.policy, rollout, result.values)
    result.log_probs = now.to(rollout.log_probs.dtype)
    log_rhos = result.log_probs - rollout.log_probs
    result.log_rhos = log_rhos if rollout.valid is None else log_rhos.where(rollout.valid, 0)
    return result


def vtrace(module: Any, rollout: Rollout, log_rhos: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ANN401
    """Return advantages and value targets, `[T, B]`; with weights of 1 they are those of generalised advantages.

    Args:
        module: The algorithm.
        rollout: With the values of the current critic.
        log_rhos: Logarithms of the importance weights, `[T, B]`.
    """
    targets, advantages = rl.vtrace(
        log_rhos,
        module.normalized_rewards(rollout),
        rollout.values,
        rollout.next_values,
        rollout.discounts(module.gamma, module.on_truncation),
        rollout.traces(module.gae_lambda),
        *(_CLIP, _CLIP, _CLIP),
    )
    return advantages, targets


def mean_weight(module: Any, rollout: Rollout, log_rhos: Tensor) -> Tensor:  # noqa: ANN401
    """Return the mean importance weight over the real steps of all ranks, before it is bounded."""
    weights = log_rhos.exp() if rollout.valid is None else log_rhos.exp()[rollout.valid]
    count, total = module.all_reduce(torch.stack([weights.new_tensor(weights.numel()), weights.sum()]))
    mean: Tensor = total / count.clamp(min=1)
    return mean

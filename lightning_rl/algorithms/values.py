"""Values of a rollout by a critic that has learned since."""

from __future__ import annotations

import copy
from operator import itemgetter

import torch

from lightning_rl.nested import map_leaves
from lightning_rl.policy import Policy
from lightning_rl.rollout import Rollout


@torch.no_grad()
def revalued(policy: Policy, rollout: Rollout, parts: int = 1) -> Rollout:
    """Return a rollout of the same steps with the values of `policy` as it is now.

    Args:
        policy: Estimates them.
        rollout: Stays as it is.
        parts: Into how many parts, over time, to cut what is given to the critic at once.
    """
    result = copy.copy(rollout)
    length, dtype = rollout.shape[0], rollout.values.dtype
    slices = [
        slice(int(part[0]), int(part[-1]) + 1) for part in torch.arange(length + 1).tensor_split(parts) if len(part)
    ]
    values = torch.cat([policy.value(map_leaves(itemgetter(part), rollout.observations)) for part in slices]).to(dtype)
    result.values, result.next_values = values[:-1], values[1:].clone()
    if len(rollout.final_indices):
        steps, environments = rollout.final_indices.unbind(1)
        result.next_values[steps, environments] = policy.value(rollout.final_observations).to(dtype)
    result.next_values[rollout.terminated] = 0
    return result

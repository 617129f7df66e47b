"""The recurrences as plain Python loops over time, one trajectory after another."""

import torch
from torch import Tensor


def loop_scan(x: Tensor, decay: Tensor, initial: Tensor | None = None) -> Tensor:
    """y[t] = x[t] + decay[t] * y[t + 1]."""
    following = torch.zeros_like(x[0]) if initial is None else initial
    rows = []
    for t in reversed(range(len(x))):
        following = x[t] + decay[t] * following
        rows.insert(0, following)
    return torch.stack(rows)


def loop_gae(rewards: Tensor, values: Tensor, next_values: Tensor, discounts: Tensor, traces: Tensor) -> Tensor:
    """The sum over k of (product of decays) * delta[t + k], each advantage from scratch."""
    advantages = torch.zeros_like(rewards)
    for t in range(len(rewards)):
        weight = torch.ones_like(rewards[0])
        for k in range(t, len(rewards)):
            advantages[t] += weight * (rewards[k] + discounts[k] * next_values[k] - values[k])
            weight = weight * discounts[k] * traces[k]
    return advantages


def loop_td_lambda(rewards: Tensor, next_values: Tensor, discounts: Tensor, traces: Tensor) -> Tensor:
    """Each row from the next row."""
    following = next_values[-1]
    rows = []
    for t in reversed(range(len(rewards))):
        mixed = (1 - traces[t]) * next_values[t] + traces[t] * following
        following = rewards[t] + discounts[t] * mixed
        rows.insert(0, following)
    return torch.stack(rows)


def loop_vtrace(
    log_rhos: Tensor,
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    discounts: Tensor,
    traces: Tensor,
    clip_rho: float | None = 1.0,
    clip_c: float | None = 1.0,
    clip_pg_rho: float | None = 1.0,
) -> tuple[Tensor, Tensor]:
    """The sum of equation 1 of the paper, each target from scratch."""

    def clipped(t: int, bound: float | None) -> Tensor:
        rho = log_rhos[t].exp()
        return rho if bound is None else torch.minimum(rho, torch.full_like(rho, bound))

    steps = len(rewards)
    targets = values.clone()
    for t in range(steps):
        weight = torch.ones_like(rewards[0])
        for k in range(t, steps):
            delta = clipped(k, clip_rho) * (rewards[k] + discounts[k] * next_values[k] - values[k])
            targets[t] += weight * delta
            weight = weight * discounts[k] * traces[k] * clipped(k, clip_c)
    advantages = torch.zeros_like(values)
    for t in range(steps):
        following = targets[t + 1] if t + 1 < steps else next_values[-1]
        q = rewards[t] + discounts[t] * (traces[t] * following + (1 - traces[t]) * next_values[t])
        advantages[t] = clipped(t, clip_pg_rho) * (q - values[t])
    return targets, advantages

"""What PPO computes for each row of a minibatch: pure functions of tensors, which can be compiled."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_rl import functional as rl

Range = Tensor | float
"""What a schedule may change: compiled functions are given tensors, since numbers would be compiled in."""


class PolicyRows(NamedTuple):
    """What came of the policy's part, `[N]` each; only the losses have a gradient.

    Attributes:
        losses: Surrogate loss.
        log_ratios: Logarithm of the importance ratio, of log-probabilities that are not clipped.
        approx_kl: Estimate k3 of the divergence, likewise.
        is_clipped: 1 where the importance ratio is outside of its range, else 0.
    """

    losses: Tensor
    log_ratios: Tensor
    approx_kl: Tensor
    is_clipped: Tensor


def policy_rows(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    low: Range,
    high: Range,
    log_prob_clip: float | None,
    dual_clip: float | None,
) -> PolicyRows:
    """Return the surrogate loss of each row, and how far the policy has moved there.

    Args:
        log_probs: Of the current policy, `[N]`.
        old_log_probs: Of the one that acted.
        advantages: Likewise.
        low: How far below 1 the importance ratio may be.
        high: How far above.
        log_prob_clip: Bound on the absolute value of `log_probs`.
        dual_clip: See `PPO`.
    """
    log_ratios = in_loss = log_probs - old_log_probs
    if log_prob_clip is not None:
        in_loss = log_probs.clamp(-log_prob_clip, log_prob_clip) - old_log_probs
    losses = rl.dual_clipped_surrogate_loss(in_loss, advantages, low, high, dual_clip)
    changes, log_ratios = in_loss.detach().expm1(), log_ratios.detach()
    is_clipped = ((changes < -low) | (changes > high)).to(log_ratios.dtype)
    return PolicyRows(losses, log_ratios, rl.approx_kl_k3(log_ratios), is_clipped)


def value_rows(
    values: Tensor, returns: Tensor, old_values: Tensor, limit: Range | None, huber_delta: float | None
) -> Tensor:
    """Return the value loss of each row.

    Args:
        values: By the current critic, `[N]`.
        returns: To be predicted.
        old_values: By the critic at the time of the rollout.
        limit: Bound on the change since then; None: none.
        huber_delta: See `PPO`.
    """
    error: Callable[[Tensor, Tensor], Tensor] = rl.value_loss
    if huber_delta is not None:
        error = partial(rl.huber_value_loss, delta=huber_delta)
    losses = error(values, returns)
    if limit is None:
        return losses
    change = (values - old_values).clamp(-limit, limit)  # type: ignore[arg-type]
    return torch.maximum(losses, error(old_values + change, returns))


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function compiled by `torch.compile`: once in a process, for all models."""
    return torch.compile(function, fullgraph=True)

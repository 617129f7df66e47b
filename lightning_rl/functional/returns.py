"""Returns and advantages: one reverse scan, four recurrences.

Every return is ``y[t] = x[t] + decay[t] * y[t + 1]``. The functions below differ only in what they put for
``x`` and ``decay``:

========================  =========================================================  =====================
function                  x                                                          decay
========================  =========================================================  =====================
`discounted_returns`      ``r``                                                      ``discount``
`td_lambda_returns`       ``r + discount * (1 - trace) * next_value``                ``discount * trace``
`gae`                     ``r + discount * next_value - value``                      ``discount * trace``
`vtrace`                  ``min(clip_rho, rho) * (the same)``                        ``discount * trace * c``
========================  =========================================================  =====================

How an episode ends is said by three tensors, so that no function takes ``done``:

* ``discounts[t] = gamma * (1 - terminated[t])``: after a terminal state there is nothing to come.
* ``traces[t] = lambda_ * (1 - (terminated | truncated)[t])``: no return reaches over the end of an episode.
* ``next_values[t]`` is the value of the observation that action ``t`` really led to. Where an episode ends,
  that is its final observation, not the one that the environment was reset to. A truncated episode therefore
  bootstraps from the state in which it was cut, and needs no special case.

Rows are time-major, ``[T, B, ...]``, row ``t`` being what action ``t`` brought; the last row bootstraps from
``next_values[-1]`` as any other would. Results are constants (targets): they are **computed without
gradient**, in float32 or wider also when the inputs are bfloat16 or float16. The inputs are not modified.

A value that the recurrence ignores must still be finite: ``0 * nan`` is ``nan`` here as everywhere in torch.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_rl.functional import _checks as check
from lightning_rl.functional._checks import computation_dtype


class VTraceReturns(NamedTuple):
    """What `vtrace` returns.

    Attributes:
        targets: The value targets ``vs``, ``[T, B, ...]``, in units of return.
        advantages: The policy-gradient advantages, clipped importance weight included, ``[T, B, ...]``.
    """

    targets: Tensor
    advantages: Tensor


@torch.no_grad()
def reverse_scan(x: Tensor, decay: Tensor | float, initial: Tensor | None = None) -> Tensor:
    """Solve ``y[t] = x[t] + decay[t] * y[t + 1]`` with ``y[T] = initial``; computed without gradient.

    By doubling (Kogge and Stone, 1973, IEEE Trans. Comput. C-22): after ``k`` steps ``y[t]`` holds the terms
    of ``[t, t + 2**k)``, so ``ceil(log2(T))`` vectorised steps do the work of ``T``. The order of additions
    depends on the distance from ``t`` alone: an episode gives the same bits wherever in a rollout it lies.

    Args:
        x: The terms, ``[T, ...]``, of any real dtype.
        decay: The weight of what follows, a scalar or broadcastable to `x` with as many dimensions. Products
            of consecutive decays are formed, so they should not overflow (decays in ``[0, 1]`` cannot).
        initial: What follows the last row, ``[...]``; zeros if None.

    Returns:
        ``y``, in the shape of `x`, in the promoted dtype and at least float32. Empty if `x` is.

    Raises:
        ValueError: If `x` has no time dimension, or `decay` or `initial` does not fit it.

    Example:
        >>> reverse_scan(torch.tensor([1.0, 2.0, 3.0]), 0.5, torch.tensor(8.0))
        tensor([3.7500, 5.5000, 7.0000])
    """
    if x.ndim == 0:
        raise ValueError("x has shape [], expected [T, ...]")
    check.broadcasts(x, decay=decay)
    if initial is not None and initial.shape != x.shape[1:]:
        raise ValueError(f"initial has shape {list(initial.shape)}, expected {list(x.shape[1:])}, a row of x")
    dtype = computation_dtype(x, decay, initial)
    y = x.to(dtype, copy=True, memory_format=torch.contiguous_format)
    d = decay * torch.ones_like(y)
    steps, span = x.shape[0], 1
    if initial is not None and steps > 0:
        y[-1] += d[-1] * initial
    d = d[:-1]
    while span < steps:
        # d[t] = decay[t] * … * decay[t + span - 1] has steps - span rows. The product is made before it is
        # added, so that y may be updated in place although the two sides overlap.
        y[:-span].add_(d * y[span:])
        d = d[:-span] * d[span:]
        span *= 2
    return y


@torch.no_grad()
def discounted_returns(rewards: Tensor, discounts: Tensor | float, bootstrap: Tensor) -> Tensor:
    """Sum discounted rewards to the end of the rollout.

    ``R[t] = rewards[t] + discounts[t] * R[t + 1]``, ``R[T] = bootstrap``.

    There is no trace here, so only a terminal state (``discounts == 0``) keeps the next episode out. Where
    episodes can be truncated, use `td_lambda_returns` with traces 1 inside the episodes and 0 at their ends.

    Args:
        rewards: ``[T, B, ...]``.
        discounts: ``gamma * (1 - terminated)``, a scalar or broadcastable to `rewards`.
        bootstrap: The value of what follows the last row, ``[B, ...]``.

    Returns:
        The returns, ``[T, B, ...]``, in units of reward.

    Raises:
        ValueError: If the shapes do not fit.
    """
    check.broadcasts(rewards, discounts=discounts)
    if bootstrap.shape != rewards.shape[1:]:
        expected = f"expected {list(rewards.shape[1:])}, a row of rewards"
        raise ValueError(f"bootstrap has shape {list(bootstrap.shape)}, {expected}")
    return reverse_scan(rewards, discounts, bootstrap)


@torch.no_grad()
def td_lambda_returns(
    rewards: Tensor, next_values: Tensor, discounts: Tensor | float, traces: Tensor | float
) -> Tensor:
    """Compute TD(lambda) returns (Sutton and Barto, 2018, "Reinforcement Learning", eq. 12.18).

    ``G[t] = rewards[t] + discounts[t] * ((1 - traces[t]) * next_values[t] + traces[t] * G[t + 1])`` with
    ``G[T] = next_values[-1]``. Equal to ``gae(…) + values`` if ``next_values[t] == values[t + 1]`` wherever
    ``traces[t] > 0``.

    Args:
        rewards: ``[T, B, ...]``.
        next_values: The value of the observation that each action led to, ``[T, B, ...]``.
        discounts: ``gamma * (1 - terminated)``, a scalar or broadcastable to `rewards`.
        traces: ``lambda_ * (1 - (terminated | truncated))``, a scalar or broadcastable to `rewards`.

    Returns:
        The returns, ``[T, B, ...]``, in units of reward.

    Raises:
        ValueError: If the shapes do not fit.
    """
    check.same_shape(rewards=rewards, next_values=next_values)
    check.broadcasts(rewards, discounts=discounts, traces=traces)
    rewards, next_values, discounts, traces = _as_floats(rewards, next_values, discounts, traces)
    x = rewards + discounts * (1 - traces) * next_values
    # A rollout of no steps has no last row.
    return reverse_scan(x, discounts * traces, next_values[-1] if len(next_values) else None)


@torch.no_grad()
def gae(
    rewards: Tensor, values: Tensor, next_values: Tensor, discounts: Tensor | float, traces: Tensor | float
) -> Tensor:
    """Estimate advantages by GAE (Schulman et al., 2016, arXiv 1506.02438, eq. 16).

    ``A[t] = delta[t] + discounts[t] * traces[t] * A[t + 1]``, ``A[T] = 0``, with the temporal differences
    ``delta = rewards + discounts * next_values - values``.

    Args:
        rewards: ``[T, B, ...]``.
        values: The value of the observation that each action was taken in, ``[T, B, ...]``.
        next_values: The value of the observation that each action led to, ``[T, B, ...]``.
        discounts: ``gamma * (1 - terminated)``, a scalar or broadcastable to `rewards`.
        traces: ``lambda_ * (1 - (terminated | truncated))``, a scalar or broadcastable to `rewards`.

    Returns:
        The advantages, ``[T, B, ...]``, in units of reward; add `values` for the value targets.

    Raises:
        ValueError: If the shapes do not fit.

    Example:
        The first row ends an episode by a time limit, the second goes on to the end of the rollout.

        >>> ones, traces = torch.ones(2, 1), torch.tensor([[0.0], [0.95]])
        >>> gae(ones, 0 * ones, 10 * ones, 0.9, traces).squeeze(1)
        tensor([10., 10.])
    """
    check.same_shape(rewards=rewards, values=values, next_values=next_values)
    check.broadcasts(rewards, discounts=discounts, traces=traces)
    rewards, values, next_values, discounts, traces = _as_floats(rewards, values, next_values, discounts, traces)
    return reverse_scan(rewards + discounts * next_values - values, discounts * traces)


@torch.no_grad()
def vtrace(
    log_rhos: Tensor,
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    discounts: Tensor | float,
    traces: Tensor | float,
    clip_rho: float | None = 1.0,
    clip_c: float | None = 1.0,
    clip_pg_rho: float | None = 1.0,
    leak: float = 0.0,
) -> VTraceReturns:
    """Correct for off-policy data by V-trace (Espeholt et al., 2018, arXiv 1802.01561, eq. 1 and sec. 4.2).

    With ``rho = exp(log_rhos)``, ``c = traces * min(clip_c, rho)`` and ``vs[T] = next_values[-1]``::

        delta[t] = min(clip_rho, rho[t]) * (rewards[t] + discounts[t] * next_values[t] - values[t])
        vs[t] = values[t] + e[t],  e[t] = delta[t] + discounts[t] * c[t] * e[t + 1],  e[T] = 0
        q[t] = rewards[t] + discounts[t] * (traces[t] * vs[t + 1] + (1 - traces[t]) * next_values[t])
        advantages[t] = min(clip_pg_rho, rho[t]) * (q[t] - values[t])

    On-policy and with all bounds >= 1, ``vs`` is `gae` + `values`. With a `leak`, what a bound cuts off a weight counts
    by that share: ``(1 - leak) * min(bound, rho) + leak * rho`` (leaky V-trace, Zahavy et al., 2020, arXiv 2002.12928).

    Args:
        log_rhos: ``log pi(a) - log mu(a)``, learner over actor, of the whole action, ``[T, B, ...]``.
        rewards: ``[T, B, ...]``.
        values: The learner's value of the observation that each action was taken in, ``[T, B, ...]``.
        next_values: The learner's value of the observation that each action led to, ``[T, B, ...]``.
        discounts: ``gamma * (1 - terminated)``, a scalar or broadcastable to `rewards`.
        traces: ``lambda_ * (1 - (terminated | truncated))``, a scalar or broadcastable to `rewards`.
        clip_rho: Upper bound of the weight of a temporal difference, None for none; decides the fixed point.
        clip_c: Upper bound of the weight in the trace, None for none; decides the speed of convergence.
        clip_pg_rho: Upper bound of the weight of an advantage, None for none.
        leak: How much of the importance sampling that the bounds take away is left: 0 is V-trace, 1 has no bounds.

    Returns:
        Value targets and advantages, both ``[T, B, ...]``.

    Raises:
        ValueError: If the shapes do not fit or a bound is negative.
    """
    check.same_shape(rewards=rewards, log_rhos=log_rhos, values=values, next_values=next_values)
    check.broadcasts(rewards, discounts=discounts, traces=traces)
    check.not_negative(clip_rho=clip_rho, clip_c=clip_c, clip_pg_rho=clip_pg_rho, leak=leak)
    log_rhos, rewards, values, next_values, discounts, traces = _as_floats(
        log_rhos, rewards, values, next_values, discounts, traces
    )
    rhos = log_rhos.exp()
    deltas = _bounded(rhos, clip_rho, leak) * (rewards + discounts * next_values - values)
    targets = values + reverse_scan(deltas, discounts * traces * _bounded(rhos, clip_c, leak))
    next_targets = torch.cat([targets[1:], next_values[-1:]])
    q = rewards + discounts * (traces * next_targets + (1 - traces) * next_values)
    return VTraceReturns(targets, _bounded(rhos, clip_pg_rho, leak) * (q - values))


def _bounded(rhos: Tensor, bound: float | None, leak: float) -> Tensor:
    """Bound weights from above, but for a share of what lies beyond."""
    if bound is None:
        return rhos
    bounded = rhos.clamp(max=bound)
    return bounded if leak == 0 else (1 - leak) * bounded + leak * rhos


def _as_floats(*arguments: Tensor | float) -> tuple[Tensor, ...]:
    """Bring all arguments to the dtype to compute in, numbers included."""
    dtype = computation_dtype(*arguments)
    return tuple(torch.as_tensor(a, dtype=dtype) for a in arguments)

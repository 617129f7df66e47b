"""Returns and advantages: one reverse scan, four recurrences.

Every return is `y[t] = x[t] + decay[t] * y[t + 1]`. The functions differ only in `x` and `decay`:

| function             | x                                           | decay                                  |
|----------------------|---------------------------------------------|----------------------------------------|
| `discounted_returns` | `r`                                         | `discount`                             |
| `td_lambda_returns`  | `r + discount * (1 - trace) * next_value`   | `discount * trace`                     |
| `gae`                | `delta = r + discount * next_value - value` | `discount * trace`                     |
| `vtrace`             | `min(clip_rho, rho) * delta`                | `discount * trace * min(clip_c, rho)`  |

Three tensors say how episodes end, so that no function takes `done`:

* `discounts[t] = gamma * (1 - terminated[t])`: a terminal state has no value.
* `traces[t] = lambda_ * (1 - (terminated | truncated)[t])`: rewards of the next episode do not count.
* `next_values[t]` is the value of the observation that action `t` led to. At the end of an episode this is its final
  observation, not the first one of the next episode: a truncated episode bootstraps where it was cut.

Tensors are time-major, `[T, B, ...]`; discounts and traces may also be scalars. Results have the units of rewards, and
are computed **without gradient** and in at least float32; the inputs are not modified. All inputs must be finite, even
where a discount or trace is 0, since `0 * nan` is `nan`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_rl.functional import _checks as check
from lightning_rl.functional._checks import computation_dtype


class VTraceReturns(NamedTuple):
    """Value targets `vs`, and advantages multiplied by the clipped importance ratio; both `[T, B, ...]`."""

    targets: Tensor
    advantages: Tensor


@torch.no_grad()
def reverse_scan(x: Tensor, decay: Tensor | float, initial: Tensor | None = None) -> Tensor:
    """Compute `y[t] = x[t] + decay[t] * y[t + 1]` with `y[T] = initial`, without gradient.

    Recursive doubling (Kogge and Stone, 1973, IEEE Trans. Comput. C-22) takes `ceil(log2(T))` vectorized steps: after
    step `k`, `y[t]` is the sum over `[t, t + 2**k)`. The order of additions depends only on the distance from `t`, so
    an episode gives bit-identical results at any position in a rollout.

    Args:
        x: `[T, ...]`, of any real dtype. The result has its shape and the promoted dtype, at least float32.
        decay: A scalar, or broadcastable to `x` with as many dimensions. Products over time must not overflow.
        initial: `y[T]`, `[...]`. None is 0.

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
        # d[t] = decay[t] * … * decay[t + span - 1] has steps - span rows. y may be updated in place although the two
        # sides overlap, because the product is computed before the addition.
        y[:-span].add_(d * y[span:])
        d = d[:-span] * d[span:]
        span *= 2
    return y


@torch.no_grad()
def discounted_returns(rewards: Tensor, discounts: Tensor | float, bootstrap: Tensor) -> Tensor:
    """Compute `R[t] = rewards[t] + discounts[t] * R[t + 1]` with `R[T] = bootstrap`, `[T, B, ...]`.

    `bootstrap` `[B, ...]` is the value of the observation after the last step. Only terminal states end a return: after
    a truncation it would include rewards of the next episode. If episodes can be truncated, use `td_lambda_returns`
    with `lambda_ = 1`.
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

    `G[t] = rewards[t] + discounts[t] * ((1 - traces[t]) * next_values[t] + traces[t] * G[t + 1])`,
    `G[T] = next_values[-1]`; all `[T, B, ...]`.

    This equals `gae(…) + values` if `next_values[t] == values[t + 1]` wherever `traces[t] > 0`.
    """
    check.same_shape(rewards=rewards, next_values=next_values)
    check.broadcasts(rewards, discounts=discounts, traces=traces)
    rewards, next_values, discounts, traces = _as_floats(rewards, next_values, discounts, traces)
    x = rewards + discounts * (1 - traces) * next_values
    # A rollout without steps has no last row.
    return reverse_scan(x, discounts * traces, next_values[-1] if len(next_values) else None)


@torch.no_grad()
def gae(
    rewards: Tensor, values: Tensor, next_values: Tensor, discounts: Tensor | float, traces: Tensor | float
) -> Tensor:
    """Estimate advantages by GAE (Schulman et al., 2016, arXiv 1506.02438, eq. 16).

    `A[t] = delta[t] + discounts[t] * traces[t] * A[t + 1]`, `A[T] = 0`, with the temporal differences
    `delta = rewards + discounts * next_values - values`. Value targets are advantages plus `values`.

    Args:
        rewards: `[T, B, ...]`, as all tensors here.
        values: Value of the observation that each action was taken in.
        next_values: Value of the observation that each action led to.
        discounts: `gamma * (1 - terminated)`, or a scalar.
        traces: `lambda_ * (1 - (terminated | truncated))`, or a scalar.

    Example:
        A time limit ends an episode at step 0; step 1 begins the next episode, which the rollout does not end.

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
    """Compute V-trace targets and advantages (Espeholt et al., 2018, arXiv 1802.01561, eq. 1 and sec. 4.2).

    With `rho = exp(log_rhos)`, `c = traces * min(clip_c, rho)` and `vs[T] = next_values[-1]`:

    ```
    delta[t] = min(clip_rho, rho[t]) * (rewards[t] + discounts[t] * next_values[t] - values[t])
    vs[t] = values[t] + e[t],  e[t] = delta[t] + discounts[t] * c[t] * e[t + 1],  e[T] = 0
    q[t] = rewards[t] + discounts[t] * (traces[t] * vs[t + 1] + (1 - traces[t]) * next_values[t])
    advantages[t] = min(clip_pg_rho, rho[t]) * (q[t] - values[t])
    ```

    On-policy and with all clips >= 1, `vs` is `gae` + `values`. With a `leak`, each `min(clip, rho)` becomes `(1 -
    leak) * min(clip, rho) + leak * rho` (leaky V-trace, Zahavy et al., 2020, arXiv 2002.12928).

    Args:
        log_rhos: Log importance ratios `log pi(a) - log mu(a)`, learner `pi`, actor `mu`, `[T, B, ...]`, summed over
            the components of an action.
        rewards: As in `gae`.
        values: As in `gae`, by the learner's critic.
        next_values: As in `gae`, by the learner's critic.
        discounts: As in `gae`.
        traces: As in `gae`.
        clip_rho: Maximum importance ratio in temporal differences; it determines the policy whose values are the fixed
            point. None sets no maximum, as in the next two arguments.
        clip_c: Maximum importance ratio in traces; it affects the speed of convergence, not the fixed point.
        clip_pg_rho: Maximum importance ratio in advantages.
        leak: Weight of the unclipped importance ratio: 0 is V-trace, 1 disables all clipping.
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
    """Clip importance ratios from above, and mix in the unclipped ratios with weight `leak`."""
    if bound is None:
        return rhos
    bounded = rhos.clamp(max=bound)
    return bounded if leak == 0 else (1 - leak) * bounded + leak * rhos


def _as_floats(*arguments: Tensor | float) -> tuple[Tensor, ...]:
    dtype = computation_dtype(*arguments)
    return tuple(torch.as_tensor(a, dtype=dtype) for a in arguments)

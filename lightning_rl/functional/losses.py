"""Losses and their diagnostics, one number per step.

Every loss has the shape of its inputs; average it over the valid steps. Arguments that are targets (advantages,
returns, old values) count as constants: no gradient flows into them. ``log_ratios`` are
``log pi_new(a) - log pi_old(a)`` of the actions that were taken.
"""

import torch
from torch import Tensor, nn

from lightning_rl.functional import _checks as check
from lightning_rl.functional._checks import computation_dtype


def policy_gradient_loss(log_probs: Tensor, advantages: Tensor) -> Tensor:
    """Compute the policy-gradient loss ``-log_prob * advantage`` (Sutton et al., 2000, theorem 1).

    Args:
        log_probs: Log-probability of each action, joint over its components, any shape.
        advantages: Of the same shape; constants.

    Returns:
        The loss of each step, in the shape of `log_probs`.

    Raises:
        ValueError: If the shapes differ.
    """
    check.same_shape(log_probs=log_probs, advantages=advantages)
    return -log_probs * advantages.detach()


def clipped_surrogate_loss(log_ratios: Tensor, advantages: Tensor, clip_range: Tensor | float) -> Tensor:
    """Compute PPO's clipped surrogate loss (Schulman et al., 2017, arXiv 1707.06347, eq. 7, negated).

    ``-min(ratio * A, clip(ratio, 1 - clip_range, 1 + clip_range) * A)``: no gradient once the ratio has moved
    beyond the range in the direction that the advantage asks for.

    Args:
        log_ratios: Any shape.
        advantages: Of the same shape; constants.
        clip_range: The paper's epsilon, a scalar or broadcastable to `log_ratios`. ``inf`` switches clipping
            off (0 does not: it clips to a ratio of 1).

    Returns:
        The loss of each step, in the shape of `log_ratios`.

    Raises:
        ValueError: If the shapes do not fit or `clip_range` is negative.

    Example:
        >>> clipped_surrogate_loss(torch.tensor([1.5, 0.5]).log(), torch.tensor([2.0, 2.0]), 0.2)
        tensor([-2.4000, -1.0000])
    """
    check.same_shape(log_ratios=log_ratios, advantages=advantages)
    check.clip_range(log_ratios, clip_range)
    return _clipped_surrogate_loss(log_ratios, advantages, clip_range, clip_range)


def value_loss(values: Tensor, targets: Tensor) -> Tensor:
    """Compute half the squared error, ``0.5 * (value - target)**2``.

    Args:
        values: Predictions, any shape.
        targets: Of the same shape; constants.

    Returns:
        The loss of each step, in the shape of `values`.

    Raises:
        ValueError: If the shapes differ.
    """
    check.same_shape(values=values, targets=targets)
    return 0.5 * nn.functional.mse_loss(values, targets.detach(), reduction="none")


def clipped_value_loss(values: Tensor, targets: Tensor, old_values: Tensor, clip_range: Tensor | float) -> Tensor:
    """Compute PPO's clipped value loss (Engstrom et al., 2020, arXiv 2005.12729, section 3).

    ``0.5 * max((v - target)**2, (v_clipped - target)**2)``, ``v_clipped = v_old + clip(v - v_old, ±range)``.

    Args:
        values: Predictions, any shape.
        targets: Of the same shape; constants.
        old_values: The predictions when the rollout was collected, of the same shape; constants.
        clip_range: In units of return, a scalar or broadcastable to `values`. ``inf`` switches clipping off.

    Returns:
        The loss of each step, in the shape of `values`.

    Raises:
        ValueError: If the shapes do not fit or `clip_range` is negative.
    """
    check.same_shape(values=values, targets=targets, old_values=old_values)
    check.clip_range(values, clip_range)
    targets, old_values = targets.detach(), old_values.detach()
    clipped = old_values + _clip(values - old_values, 0.0, clip_range)
    return 0.5 * torch.maximum((values - targets).square(), (clipped - targets).square())


def value_cloning_loss(values: Tensor, old_values: Tensor) -> Tensor:
    """Compute ``(value - old_value)**2`` (Rolnick et al., 2019, arXiv 1811.11682, section 3), without a ½.

    Args:
        values: Predictions, any shape.
        old_values: Those of an earlier critic, of the same shape; constants.

    Returns:
        The loss of each step, in the shape of `values`.

    Raises:
        ValueError: If the shapes differ.
    """
    check.same_shape(values=values, old_values=old_values)
    return (values - old_values.detach()).square()


def approx_kl_k1(log_ratios: Tensor) -> Tensor:
    """Estimate ``KL(old || new)`` by ``-log ratio``: unbiased, can be negative.

    Schulman, 2020, "Approximating KL divergence", joschu.net/blog/kl-approx.html: k1, old actions.

    Args:
        log_ratios: Any shape.

    Returns:
        The estimate of each step in nats, in the shape of `log_ratios`.
    """
    return -log_ratios


def approx_kl_k2(log_ratios: Tensor) -> Tensor:
    """Estimate ``KL(old || new)`` by ``log_ratio**2 / 2``: biased but for small steps, never negative.

    Schulman, 2020, "Approximating KL divergence", joschu.net/blog/kl-approx.html: k2, old actions. Its gradient is
    that of a penalty on the divergence (Cobbe et al., 2021, arXiv 2009.04416, section 3.6).

    Args:
        log_ratios: Any shape.

    Returns:
        The estimate of each step in nats, in the shape of `log_ratios`.
    """
    return 0.5 * log_ratios.square()


def approx_kl_k3(log_ratios: Tensor) -> Tensor:
    """Estimate ``KL(old || new)`` by ``(ratio - 1) - log ratio``: unbiased, never negative, less noisy.

    Schulman, 2020, "Approximating KL divergence", joschu.net/blog/kl-approx.html: k3, old actions.

    Args:
        log_ratios: Any shape.

    Returns:
        The estimate of each step in nats, in the shape of `log_ratios`.
    """
    # Near the old policy this is about log_ratio**2 / 2, whose digits exp(x) - 1 would cancel away.
    return log_ratios.expm1() - log_ratios


@torch.no_grad()
def clip_indicator(
    log_ratios: Tensor, clip_range: Tensor | float, clip_range_high: Tensor | float | None = None
) -> Tensor:
    """Tell which ratios lie outside the clip range: 1 where ``|ratio - 1| > clip_range``, else 0.

    Its weighted mean is the usual ``clip_fraction``. Computed without gradient.

    Args:
        log_ratios: Any shape.
        clip_range: A scalar or broadcastable to `log_ratios`.
        clip_range_high: Likewise, for ratios above 1; None: the same.

    Returns:
        Zeros and ones in the shape and dtype of `log_ratios`.

    Raises:
        ValueError: If the shapes do not fit or `clip_range` is negative.
    """
    high = clip_range if clip_range_high is None else clip_range_high
    check.clip_range(log_ratios, clip_range)
    check.clip_range(log_ratios, high)
    changes = log_ratios.expm1()
    return ((changes < -clip_range) | (changes > high)).to(log_ratios.dtype)


@torch.no_grad()
def explained_variance(predictions: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
    """Compute ``1 - Var[target - prediction] / Var[target]``; without gradient.

    1 for a perfect prediction (up to a constant), 0 for a constant one, negative for a harmful one.

    Args:
        predictions: Any shape.
        targets: Of the same shape.
        weights: Of the same shape, not negative; all 1 if None.

    Returns:
        A scalar; NaN if the targets do not vary.

    Raises:
        ValueError: If the shapes differ.
    """
    dtype = computation_dtype(predictions, targets)
    check.same_shape(targets=targets, predictions=predictions)
    targets = targets.to(dtype)
    if weights is None:
        both = torch.stack([targets - predictions, targets]).view(2, -1)
        # As in `normalize_rows`.
        unexplained, total = (both - both[:, :1]).var(1, correction=0).unbind()
    else:
        weights = weights.to(dtype)
        check.same_shape(targets=targets, weights=weights)
        unexplained = (weights * _centered(targets - predictions, weights).square()).sum()
        total = (weights * _centered(targets, weights).square()).sum()
    return torch.where(total > 0, 1 - unexplained / total, torch.nan)


@torch.no_grad()
def normalize_rows(x: Tensor, eps: float = 1e-8) -> Tensor:
    """Shift and scale each row to mean 0 and standard deviation 1: ``(x - mean) / (std + eps)``; without gradient.

    The standard deviation is the unbiased one, as CleanRL, Stable-Baselines3 and DI-engine normalize advantages.

    Args:
        x: `[..., N]`; half precision is computed in float32.
        eps: Added to the standard deviations.

    Returns:
        In the shape of `x`; 0 in rows of one entry, or of equal ones.

    Raises:
        ValueError: If `eps` is negative.
    """
    check.not_negative(eps=eps)
    x = x.to(computation_dtype(x))
    if x.shape[-1] < 2:
        return torch.zeros_like(x)
    # Subtracting an entry first leaves exact zeros where all are equal; the mean of equal numbers is rounded.
    shifted = x - x[..., :1]
    std, mean = torch.std_mean(shifted, -1, keepdim=True)
    return _over(shifted - mean, std + eps) if eps == 0 else (shifted - mean) / (std + eps)


def _over(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Divide, where 0 / 0 is 0."""
    return torch.where(numerator == 0, 0.0, numerator / denominator)


def _clip(x: Tensor, center: float, radius: Tensor | float) -> Tensor:
    """Clip to ``center ± radius``."""
    # torch has one overload for numbers and one for tensors, none for their union.
    if isinstance(radius, Tensor):
        return x.clamp(center - radius, center + radius)
    return x.clamp(center - radius, center + radius)


def _centered(x: Tensor, weights: Tensor) -> Tensor:
    """Subtract the weighted mean; entries of weight 0 become 0."""
    if x.numel() == 0:
        return x
    valid = weights != 0
    # First a member of the set is taken off, so that equal entries leave exact zeros: the mean of equal
    # numbers is rounded, and dividing its last bit by a tiny deviation would make noise of order 1.
    shifted = torch.where(valid, x - torch.where(valid, x, -torch.inf).amax(), 0.0)
    return torch.where(valid, shifted - (weights * shifted).sum() / weights.sum(), 0.0)


def dual_clipped_surrogate_loss(
    log_ratios: Tensor,
    advantages: Tensor,
    clip_range_low: Tensor | float,
    clip_range_high: Tensor | float,
    dual_clip: float | None = None,
) -> Tensor:
    """Compute PPO's clipped surrogate loss with a range for each side, and a bound for bad actions.

    The ratio is clipped to ``[1 - clip_range_low, 1 + clip_range_high]``. Where the advantage is negative, nothing
    bounds what is gained by the clipped objective from above; with dual clip (Ye et al., 2020, arXiv 1912.09729,
    eq. 5) it is at least ``dual_clip * A``, so that a ratio beyond `dual_clip` has no gradient.

    Args:
        log_ratios: Any shape.
        advantages: Of the same shape; constants.
        clip_range_low: A scalar or broadcastable to `log_ratios`; from 1 on there is no clipping on that side.
        clip_range_high: Likewise; ``inf`` does not clip on that side.
        dual_clip: The paper's c, above 1; None has no such bound.

    Returns:
        The loss of each step, in the shape of `log_ratios`.

    Raises:
        ValueError: If the shapes do not fit, a range is negative, or `dual_clip` is not above 1.

    Example:
        >>> log_ratios, advantages = torch.tensor([1.5, 0.5, 5.0]).log(), torch.tensor([2.0, -2.0, -2.0])
        >>> dual_clipped_surrogate_loss(log_ratios, advantages, 0.2, 0.3, dual_clip=3)
        tensor([-2.6000,  1.6000,  6.0000])
    """
    check.same_shape(log_ratios=log_ratios, advantages=advantages)
    check.clip_range(log_ratios, clip_range_low)
    check.clip_range(log_ratios, clip_range_high)
    check.above_one(dual_clip=dual_clip)
    losses = _clipped_surrogate_loss(log_ratios, advantages, clip_range_low, clip_range_high)
    if dual_clip is None:
        return losses
    advantages = advantages.detach()
    return torch.where(advantages < 0, torch.minimum(losses, -dual_clip * advantages), losses)


def _clipped_surrogate_loss(
    log_ratios: Tensor, advantages: Tensor, clip_range_low: Tensor | float, clip_range_high: Tensor | float
) -> Tensor:
    """Return ``max(-ratio * A, bound)``: the loss at the end of the range that the advantage asks for bounds it.

    That is ``-min(ratio * A, clip(ratio) * A)`` with one bound, which is a constant, in place of a clipped ratio.
    """
    weights = -advantages.detach()
    bound = torch.minimum(weights * (1.0 - clip_range_low), weights * (1.0 + clip_range_high))
    if not _is_finite(clip_range_low) or not _is_finite(clip_range_high):
        # 0 · inf, where nothing is clipped and the advantage is 0: so is the loss then.
        bound = bound.nan_to_num(0.0, torch.inf, -torch.inf)
    return (log_ratios.exp() * weights).clamp(min=bound)


def _is_finite(clip_range: Tensor | float) -> bool:
    """Whether a range is known to be finite without looking into a tensor."""
    return not isinstance(clip_range, Tensor) and abs(clip_range) < torch.inf


def huber_value_loss(values: Tensor, targets: Tensor, delta: float) -> Tensor:
    """Compute the Huber loss of values (Huber, 1964): half the squared error up to `delta`, on a line from there.

    ``0.5 * e**2`` where ``|e| <= delta``, else ``delta * (|e| - 0.5 * delta)``.

    Args:
        values: Predictions, any shape.
        targets: Of the same shape; constants.
        delta: In units of the values.

    Returns:
        The loss of each step, in the shape of `values`.

    Raises:
        ValueError: If the shapes differ or `delta` is negative.
    """
    check.same_shape(values=values, targets=targets)
    check.not_negative(delta=delta)
    errors = (values - targets.detach()).abs()
    # Of the two parts one is constant on either side, so that no gradient is doubled.
    quadratic = errors.clamp(max=delta)
    return 0.5 * quadratic.square() + delta * (errors - quadratic)


# Between these the adaptive coefficient stays, so that it can always come back.
_SMALLEST, _LARGEST = 1e-15, 1e17
_STEP = 1.5


def kl_cutoff_penalty(kl: Tensor, cutoff: float, coef: float) -> Tensor:
    """Compute ``coef * max(kl - cutoff, 0)**2``: nothing up to the cutoff, steep beyond it.

    Args:
        kl: Mean divergence from the policy that acted, a scalar in nats.
        cutoff: From where on it is penalised, in nats.
        coef: Factor on the square.

    Returns:
        The penalty, a scalar.

    Raises:
        ValueError: If `cutoff` or `coef` is negative.

    Example:
        >>> kl_cutoff_penalty(torch.tensor(0.5), 0.25, 1000.0)
        tensor(62.5000)
    """
    check.not_negative(cutoff=cutoff, coef=coef)
    return coef * (kl - cutoff).clamp(min=0).square()


@torch.no_grad()
def adapted_kl_coef(coef: Tensor, kl: Tensor, target: float, tolerance: float) -> Tensor:
    """Adapt the coefficient of a KL penalty (Schulman et al., 2017, arXiv 1707.06347, section 4).

    1.5 times as much after a divergence above ``target * (1 + tolerance)``, a 1.5th after one below
    ``target * (1 - tolerance)``, both strictly, and the same otherwise; never below 1e-15 nor above 1e17. (The
    paper has the factors 2 for the coefficient and 1.5 for the bounds.)

    Args:
        coef: The coefficient so far, a scalar.
        kl: Mean divergence that the updates with it have led to, a scalar in nats; NaN leaves it as it is.
        target: The divergence that is wanted, in nats.
        tolerance: How far from it, as a share, is near enough.

    Returns:
        The coefficient for the next updates, a scalar in the dtype of `coef`.

    Raises:
        ValueError: If `target` or `tolerance` is negative.
    """
    check.not_negative(target=target, tolerance=tolerance)
    high, low = (torch.as_tensor(target * (1 + sign * tolerance), dtype=kl.dtype, device=kl.device) for sign in (1, -1))
    adapted = torch.where(kl > high, coef * _STEP, torch.where(kl < low, coef / _STEP, coef))
    return adapted.clamp(_SMALLEST, _LARGEST)


def squared_norm(weights: list[Tensor]) -> Tensor:
    """Sum the squares of all entries of some weights; there is no ½.

    Args:
        weights: At least one tensor, of any shape.

    Returns:
        The sum, a scalar.
    """
    return torch.stack([x.square().sum() for x in weights]).sum()

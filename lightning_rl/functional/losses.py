"""Losses and diagnostics of each step, and penalties.

A loss of each step has the shape of its inputs; average it over the valid steps. Targets (advantages, returns, old
values) are constants: they get no gradient. `log_ratios` are `log pi_new(a) - log pi_old(a)` of the actions taken.
"""

import torch
from torch import Tensor, nn

from lightning_rl.functional import _checks as check
from lightning_rl.functional._checks import computation_dtype


def policy_gradient_loss(log_probs: Tensor, advantages: Tensor) -> Tensor:
    """Return the loss `-log_prob * advantage` of each step (Sutton et al., 2000, theorem 1); any equal shapes."""
    check.same_shape(log_probs=log_probs, advantages=advantages)
    return -log_probs * advantages.detach()


def clipped_surrogate_loss(log_ratios: Tensor, advantages: Tensor, clip_range: Tensor | float) -> Tensor:
    """Return PPO's clipped surrogate loss of each step (Schulman et al., 2017, arXiv 1707.06347, eq. 7, negated).

    `-min(ratio * A, clip(ratio, 1 - clip_range, 1 + clip_range) * A)`: there is no gradient once the ratio has left the
    range in the direction that the advantage favors, or NaN if it overflows (float32: a log-ratio above 88.7).

    Args:
        log_ratios: Any shape.
        advantages: The same shape; constants.
        clip_range: The paper's epsilon, a scalar or broadcastable. `inf` disables clipping; 0 clips to a ratio of 1.

    Example:
        >>> clipped_surrogate_loss(torch.tensor([1.5, 0.5]).log(), torch.tensor([2.0, 2.0]), 0.2)
        tensor([-2.4000, -1.0000])
    """
    check.clip_ranges(log_ratios, clip_range=clip_range)
    return dual_clipped_surrogate_loss(log_ratios, advantages, clip_range, clip_range)


def dual_clipped_surrogate_loss(
    log_ratios: Tensor,
    advantages: Tensor,
    clip_range_low: Tensor | float,
    clip_range_high: Tensor | float,
    dual_clip: float | None = None,
) -> Tensor:
    """Return PPO's clipped surrogate loss with a clip range for each side and an optional dual clip.

    The ratio is clipped to `[1 - clip_range_low, 1 + clip_range_high]`. If the advantage is negative, this loss still
    grows without bound as the ratio grows. The dual clip (Ye et al., 2020, arXiv 1912.09729, eq. 5) limits the loss to
    `-dual_clip * A` in this case, with no gradient for ratios above `dual_clip`, or NaN where they overflow.

    Args:
        log_ratios: Any shape.
        advantages: The same shape; constants.
        clip_range_low: A scalar or broadcastable; 1 or more disables clipping on this side.
        clip_range_high: A scalar or broadcastable; `inf` disables clipping on this side.
        dual_clip: The paper's c, above 1. None disables the dual clip.

    Example:
        >>> log_ratios, advantages = torch.tensor([1.5, 0.5, 5.0]).log(), torch.tensor([2.0, -2.0, -2.0])
        >>> dual_clipped_surrogate_loss(log_ratios, advantages, 0.2, 0.3, dual_clip=3)
        tensor([-2.6000,  1.6000,  6.0000])
    """
    check.same_shape(log_ratios=log_ratios, advantages=advantages)
    check.clip_ranges(log_ratios, clip_range_low=clip_range_low, clip_range_high=clip_range_high)
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip is {dual_clip}, expected a number > 1")
    weights = -advantages.detach()
    # -min(ratio * A, clip(ratio) * A) is -ratio * A, bounded from below by its value at one end of the range.
    bound = torch.minimum(weights * (1.0 - clip_range_low), weights * (1.0 + clip_range_high))
    losses = log_ratios.exp() * weights
    # Not `clamp`: PyTorch 2.14 changed its gradient at the bound, where it is 1 here. With an infinite range, the bound
    # of an advantage of 0 is NaN, and its loss stays 0.
    losses = torch.where(losses < bound, bound, losses)
    if dual_clip is None:
        return losses
    return torch.where(weights > 0, torch.minimum(losses, dual_clip * weights), losses)


@torch.no_grad()
def clip_indicator(
    log_ratios: Tensor, clip_range: Tensor | float, clip_range_high: Tensor | float | None = None
) -> Tensor:
    """Return 1 where `|ratio - 1| > clip_range`, else 0, without gradient; its mean is the usual `clip_fraction`.

    Clip ranges are scalars or broadcastable to `log_ratios`. `clip_range_high` is a separate one for ratios above 1.
    """
    high = clip_range if clip_range_high is None else clip_range_high
    check.clip_ranges(log_ratios, clip_range=clip_range, clip_range_high=high)
    changes = log_ratios.expm1()
    return ((changes < -clip_range) | (changes > high)).to(log_ratios.dtype)


def approx_kl_k1(log_ratios: Tensor) -> Tensor:
    """Estimate `KL(old || new)` of each step in nats by `-log ratio`: unbiased, can be negative.

    k1 of Schulman, 2020, "Approximating KL divergence", joschu.net/blog/kl-approx.html.
    """
    return -log_ratios


def approx_kl_k2(log_ratios: Tensor) -> Tensor:
    """Estimate `KL(old || new)` of each step in nats by `(log ratio)**2 / 2`: biased, never negative.

    k2 of Schulman, 2020 (see `approx_kl_k1`). Bias and error of the expected gradient are of higher order in the policy
    change, so that its mean can serve as a KL penalty (Cobbe et al., 2021, arXiv 2009.04416, section 3.5).
    """
    return 0.5 * log_ratios.square()


def approx_kl_k3(log_ratios: Tensor) -> Tensor:
    """Estimate `KL(old || new)` of each step in nats by `(ratio - 1) - log ratio`: unbiased, never negative.

    k3 of Schulman, 2020 (see `approx_kl_k1`); less noisy than k1.
    """
    # Near the old policy this is about log_ratio**2 / 2, whose digits exp(x) - 1 would cancel.
    return log_ratios.expm1() - log_ratios


def value_loss(values: Tensor, targets: Tensor, huber_delta: float | None = None) -> Tensor:
    """Return half the squared error of each step, `0.5 * (value - target)**2`, or `huber_value_loss`; equal shapes."""
    if huber_delta is not None:
        return huber_value_loss(values, targets, huber_delta)
    check.same_shape(values=values, targets=targets)
    return 0.5 * nn.functional.mse_loss(values, targets.detach(), reduction="none")


def clipped_value_loss(
    values: Tensor, targets: Tensor, old_values: Tensor, clip_range: Tensor | float, huber_delta: float | None = None
) -> Tensor:
    """Return PPO's clipped value loss of each step (Engstrom et al., 2020, arXiv 2005.12729, section 3).

    `max(value_loss(v), value_loss(w))` with the clipped values `w = v_old + clip(v - v_old, -clip_range, clip_range)`.

    Args:
        values: Predictions, any shape.
        targets: Returns of the same shape; constants.
        old_values: Predictions of the same shape when the rollout was collected; constants.
        clip_range: Maximum change of a value, in units of return, a scalar or broadcastable. `inf` disables clipping.
        huber_delta: Delta of the Huber loss. None: squared errors.
    """
    check.same_shape(values=values, targets=targets, old_values=old_values)
    check.clip_ranges(values, clip_range=clip_range)
    old_values = old_values.detach()
    change = values - old_values
    # Not `clamp`, as in the surrogate loss.
    change = torch.where(change > clip_range, clip_range, torch.where(change < -clip_range, -clip_range, change))
    clipped = value_loss(old_values + change, targets, huber_delta)
    return torch.maximum(value_loss(values, targets, huber_delta), clipped)


def huber_value_loss(values: Tensor, targets: Tensor, delta: float) -> Tensor:
    """Return the Huber loss of each step (Huber, 1964), with `e = value - target` of any shape.

    `0.5 * e**2` where `|e| <= delta`, else `delta * (|e| - 0.5 * delta)`.
    """
    check.same_shape(values=values, targets=targets)
    check.not_negative(delta=delta)
    errors = values - targets.detach()  # in the promoted dtype
    return nn.functional.huber_loss(errors, torch.zeros_like(errors), reduction="none", delta=delta)


def value_cloning_loss(values: Tensor, old_values: Tensor) -> Tensor:
    """Return `(value - old_value)**2` of each step, without ½ (Rolnick et al., 2019, arXiv 1811.11682, section 3)."""
    check.same_shape(values=values, old_values=old_values)
    return (values - old_values.detach()).square()


@torch.no_grad()
def explained_variance(predictions: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return `1 - Var[target - prediction] / Var[target]`, a scalar without gradient; NaN if the targets do not vary.

    1 if predictions equal the targets up to a constant, 0 for a constant prediction, negative if worse than that. The
    arguments have equal shapes; `weights` are at least 0, None for equal weights.
    """
    dtype = computation_dtype(predictions, targets)
    check.same_shape(targets=targets, predictions=predictions)
    targets = targets.to(dtype)
    if not targets.numel():  # a rollout that only resets; PyTorch would warn about the variance
        return targets.new_tensor(torch.nan)
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


def _centered(x: Tensor, weights: Tensor) -> Tensor:
    """Subtract the weighted mean; entries of weight 0 become 0."""
    valid = weights != 0
    # An entry is subtracted first, so that equal entries give exact zeros: their mean is rounded, and dividing the
    # error of the last bit by a tiny deviation would give noise of order 1.
    shifted = torch.where(valid, x - torch.where(valid, x, -torch.inf).amax(), 0.0)
    return torch.where(valid, shifted - (weights * shifted).sum() / weights.sum(), 0.0)


@torch.no_grad()
def normalize_rows(x: Tensor, eps: float = 1e-8) -> Tensor:
    """Return `(x - mean) / (std + eps)` of each row of `[..., N]`, without gradient; rows of equal entries become 0.

    The standard deviation is the unbiased one, as in CleanRL, Stable-Baselines3 and DI-engine. Half precision is
    computed in float32.
    """
    check.not_negative(eps=eps)
    x = x.to(computation_dtype(x))
    if x.shape[-1] < 2:
        return torch.zeros_like(x)
    # An entry is subtracted first, so that equal entries give exact zeros although their mean is rounded.
    shifted = x - x[..., :1]
    std, mean = torch.std_mean(shifted, -1, keepdim=True)
    centered = shifted - mean
    normalized = centered / (std + eps)
    return normalized if eps > 0 else torch.where(centered == 0, 0.0, normalized)


def kl_cutoff_penalty(kl: Tensor, cutoff: float, coef: float) -> Tensor:
    """Return the KL cutoff penalty of TF-Agents' `PPOAgent`, `coef * max(kl - cutoff, 0)**2`, a scalar.

    Args:
        kl: Mean KL divergence from the policy that acted, a scalar in nats.
        cutoff: Largest divergence without a penalty, in nats.
        coef: Coefficient of the squared excess.

    Example:
        >>> kl_cutoff_penalty(torch.tensor(0.5), 0.25, 1000.0)
        tensor(62.5000)
    """
    check.not_negative(cutoff=cutoff, coef=coef)
    return coef * (kl - cutoff).clamp(min=0).square()


@torch.no_grad()
def adapted_kl_coef(coef: Tensor, kl: Tensor, target: float, tolerance: float) -> Tensor:
    """Return the coefficient of a KL penalty for the next updates (Schulman et al., 2017, arXiv 1707.06347, section 4).

    The coefficient is multiplied by 1.5 if `kl > target * (1 + tolerance)`, and divided by 1.5 if `kl < target * (1 -
    tolerance)`, as in TF-Agents, and clamped to [1e-15, 1e17], so that it never becomes 0 or infinite. (The paper
    multiplies or divides by 2 outside of `[target / 1.5, target * 1.5]`.)

    Args:
        coef: Current coefficient, a scalar.
        kl: Mean KL divergence after the updates with `coef`, a scalar in nats; NaN does not change the coefficient.
        target: Desired divergence, in nats.
        tolerance: Largest relative deviation from the target that does not change the coefficient.
    """
    check.not_negative(target=target, tolerance=tolerance)
    high, low = target * (1 + tolerance), target * (1 - tolerance)
    return torch.where(kl > high, coef * 1.5, torch.where(kl < low, coef / 1.5, coef)).clamp(1e-15, 1e17)


def squared_norm(weights: list[Tensor] | list[nn.Parameter]) -> Tensor:
    """Return `Σ w**2` over all entries of one or more tensors, a scalar: the L2 penalty without ½."""
    return torch.stack([x.square().sum() for x in weights]).sum()


def better_half(advantages: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the indices of the half of the rows, rounded up, with the largest advantages, in decreasing order.

    Both are `[N]`. Rows of weight 0 are excluded first, which waits for the device; other weights have no effect.
    """
    check.one_dimension(advantages=advantages)
    if weights is None:
        return advantages.topk((len(advantages) + 1) // 2).indices
    check.same_shape(advantages=advantages, weights=weights)
    counted = weights.nonzero().squeeze(1)
    return counted[better_half(advantages[counted])]


def vmpo_policy_loss(
    log_probs: Tensor, advantages: Tensor, temperature: Tensor, weights: Tensor | None = None
) -> Tensor:
    """Return -Σ ψ log π, ψ = softmax(A / η), a scalar; 0 for no rows (Song et al., 2020, arXiv 1909.12238, eq. 3).

    Args:
        log_probs: Log-probabilities of the actions of the better half, `[N]`; the only argument with a gradient.
        advantages: Advantages of these actions, `[N]`.
        temperature: Temperature η > 0, a scalar.
        weights: Weights > 0 of the rows, `[N]`; ψ is proportional to weight · exp(A / η). None for equal weights.
    """
    check.same_shape(log_probs=log_probs, advantages=advantages)
    check.one_dimension(advantages=advantages)
    psi = torch.softmax(_logits(advantages, temperature, weights), dim=0).detach()
    return -(psi * log_probs).sum()


def vmpo_temperature_loss(
    advantages: Tensor, temperature: Tensor, epsilon: float, weights: Tensor | None = None
) -> Tensor:
    """Return η ε + η log mean exp(A / η), minimal at KL(ψ || uniform) = ε, a scalar; 0 for no rows (V-MPO, eq. 4).

    Args:
        advantages: Advantages of the better half, `[N]`; constants.
        temperature: Temperature η > 0, a scalar.
        epsilon: Bound ε_η of KL(ψ || uniform), in nats.
        weights: Weights > 0 of the rows in the mean, `[N]`. None for equal weights.
    """
    check.one_dimension(advantages=advantages)
    check.not_negative(epsilon=epsilon)
    if len(advantages) == 0:  # a rank may have no row of a minibatch
        return 0 * temperature
    advantages = advantages.detach()
    return temperature * (epsilon + torch.logsumexp(_logits(advantages, temperature, weights), dim=0)) + advantages[0]


def lagrangian(divergence: Tensor, coefficient: Tensor, epsilon: float) -> Tensor:
    """Return α (ε - sg[KL]) + sg[α] KL, a scalar: α > 0 grows while KL > ε, and penalizes KL (V-MPO, eq. 5).

    `divergence` is the mean KL divergence, and `epsilon` its bound ε_α, in nats.
    """
    check.not_negative(epsilon=epsilon)
    return coefficient * (epsilon - divergence.detach()) + coefficient.detach() * divergence


def _logits(advantages: Tensor, temperature: Tensor, weights: Tensor | None) -> Tensor:
    """Return (A - A[0]) / η plus the log-share of each row: the sum of their exponentials is a weighted mean."""
    # Without the difference, the gradient of η would cancel where the mean advantage is much larger than η.
    weights = torch.ones_like(advantages) if weights is None else weights.to(advantages.dtype)
    check.same_shape(advantages=advantages, weights=weights)
    return (advantages - advantages[:1]) / temperature + (weights / weights.sum()).log()

"""Losses by hand-worked numbers and gradients. The golden vectors are in test_golden.py."""

import math

import pytest
import torch

from lightning_rl.functional import (
    approx_kl_k1,
    approx_kl_k2,
    approx_kl_k3,
    clip_indicator,
    clipped_surrogate_loss,
    clipped_value_loss,
    dual_clipped_surrogate_loss,
    huber_value_loss,
    policy_gradient_loss,
    value_cloning_loss,
    value_loss,
)

from .helpers import close, gradient, randn

NAN, INF = math.nan, math.inf


# -- policy losses


def test_policy_gradient_loss_is_minus_log_prob_times_advantage() -> None:
    log_probs, advantages = torch.tensor([-1.0, -2.0]), torch.tensor([3.0, -4.0])
    assert policy_gradient_loss(log_probs, advantages).tolist() == [3.0, -8.0]
    assert gradient(lambda x: policy_gradient_loss(x, advantages), log_probs).tolist() == [-3.0, 4.0]


def test_clipped_surrogate_loss_by_hand() -> None:
    ratios = torch.tensor([0.5, 1.0, 1.5, 0.5, 1.0, 1.5], dtype=torch.float64)
    advantages = torch.tensor([2.0, 2.0, 2.0, -2.0, -2.0, -2.0], dtype=torch.float64)
    # There is no clipping where the policy has moved against the advantage.
    close(clipped_surrogate_loss(ratios.log(), advantages, 0.2), [-1.0, -2.0, -2.4, 1.6, 2.0, 3.0])


def test_clipped_surrogate_loss_stops_the_gradient_of_favored_ratios_outside_the_range() -> None:
    ratios = torch.tensor([0.5, 1.0, 1.5, 0.5, 1.0, 1.5], dtype=torch.float64)
    advantages = torch.tensor([2.0, 2.0, 2.0, -2.0, -2.0, -2.0], dtype=torch.float64)
    # d(-ratio * A) / d log_ratio = -ratio * A where not clipped
    actual = gradient(lambda x: clipped_surrogate_loss(x, advantages, 0.2), ratios.log())
    close(actual, [-1.0, -2.0, 0.0, 0.0, 2.0, 3.0])


def test_clipped_surrogate_loss_has_the_policy_gradient_at_ratio_one() -> None:
    log_probs, advantages = randn(4, 3), randn(4, 3, seed=1)
    first = gradient(lambda x: clipped_surrogate_loss(x - log_probs, advantages, 0.2), log_probs)
    close(first, gradient(lambda x: policy_gradient_loss(x, advantages), log_probs))


def test_infinite_clip_range_disables_clipping() -> None:
    log_ratios, advantages, values = randn(9), randn(9, seed=1), randn(9, seed=2)
    advantages[0] = 0
    close(clipped_surrogate_loss(log_ratios, advantages, INF), -log_ratios.exp() * advantages)
    close(clipped_value_loss(values, advantages, log_ratios, INF), value_loss(values, advantages))
    assert clip_indicator(log_ratios, INF).sum() == 0


def test_clip_ranges_may_be_tensors() -> None:
    log_ratios, advantages, values = randn(4, 3), randn(4, 3, seed=1), randn(4, 3, seed=2)
    for clip_range in [torch.tensor(0.2), torch.full((4, 1), 0.2).double(), torch.full((4, 3), 0.2).double()]:
        for function, inputs in [
            (clipped_surrogate_loss, (log_ratios, advantages)),
            (clipped_value_loss, (values, advantages, log_ratios)),
            (clip_indicator, (log_ratios,)),
        ]:
            close(function(*inputs, clip_range), function(*inputs, 0.2))


def test_clip_indicator_counts_ratios_outside_the_range() -> None:
    log_ratios = torch.tensor([0.5, 0.79, 0.81, 1.0, 1.19, 1.21, 9.0]).log()
    indicator = clip_indicator(log_ratios, 0.2)
    assert indicator.tolist() == [1, 1, 0, 0, 0, 1, 1]
    assert indicator.dtype == log_ratios.dtype
    assert clip_indicator(torch.zeros(1), 0.0) == 0  # the bound itself is inside
    assert not clip_indicator(log_ratios.requires_grad_(), 0.2).requires_grad


# -- divergence


def test_approx_kl_by_hand() -> None:
    log_ratios = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64).log()
    close(approx_kl_k1(log_ratios), [math.log(2), 0.0, -math.log(2)])
    close(approx_kl_k2(log_ratios), log_ratios**2 / 2)
    close(approx_kl_k3(log_ratios), [-0.5 + math.log(2), 0.0, 1 - math.log(2)])


def test_k1_and_k3_are_unbiased_under_the_old_policy() -> None:
    old, new = randn(50, 6).log_softmax(-1), randn(50, 6, seed=1).log_softmax(-1)
    exact = (old.exp() * (old - new)).sum(-1)
    close((old.exp() * approx_kl_k1(new - old)).sum(-1), exact)
    close((old.exp() * approx_kl_k3(new - old)).sum(-1), exact)


def test_k3_is_never_negative_and_accurate_near_zero() -> None:
    # Near 0 the estimate is x**2 / 2 + x**3 / 6; in float32, exp(x) - 1 - x would be noise.
    x = torch.tensor([-1e-3, 1e-3, 1e-2])
    torch.testing.assert_close(approx_kl_k3(x), x**2 / 2 + x**3 / 6, rtol=1e-3, atol=0)
    assert (approx_kl_k3(3 * torch.randn(1000)) >= 0).all()


def test_gradient_of_k3_is_ratio_minus_one() -> None:
    x = randn(20)
    close(gradient(approx_kl_k3, x), x.exp() - 1)
    close(gradient(approx_kl_k1, x), -torch.ones(20))


# -- value losses


def test_value_loss_is_half_the_squared_error() -> None:
    values, targets = torch.tensor([1.0, 5.0]), torch.tensor([3.0, 4.0])
    assert value_loss(values, targets).tolist() == [2.0, 0.5]
    assert gradient(lambda x: value_loss(x, targets), values).tolist() == [-2.0, 1.0]


def test_clipped_value_loss_by_hand() -> None:
    # Old value 0, range 1. Within the range; beyond it toward the target (the clipped error is the larger
    # one, no gradient); beyond it and away from the target (the plain error is).
    values, targets = torch.tensor([0.5, 2.0, 2.0]), torch.tensor([2.0, 3.0, -1.0])
    old_values = torch.zeros(3)
    close(clipped_value_loss(values, targets, old_values, 1.0), [1.125, 2.0, 4.5])
    close(gradient(lambda x: clipped_value_loss(x, targets, old_values, 1.0), values), [-1.5, 0.0, 3.0])


def test_losses_have_the_gradients_of_finite_differences() -> None:
    x, a, b = randn(4, 3), randn(4, 3, seed=1), randn(4, 3, seed=2)
    for function in [
        lambda x: policy_gradient_loss(x, a),
        lambda x: clipped_surrogate_loss(x, a, 0.2),
        lambda x: value_loss(x, a),
        lambda x: clipped_value_loss(x, a, b, 0.3),
        approx_kl_k1,
        approx_kl_k2,
        approx_kl_k3,
    ]:
        assert torch.autograd.gradcheck(function, x.requires_grad_())


def test_targets_are_constants() -> None:
    x, target, old = randn(3), randn(3, seed=1).requires_grad_(), randn(3, seed=2).requires_grad_()
    losses = [
        policy_gradient_loss(x, target),
        clipped_surrogate_loss(x, target, 0.2),
        value_loss(x, target),
        clipped_value_loss(x, target, old, 0.2),
        huber_value_loss(x, target, 0.5),
        value_cloning_loss(x, old),
    ]
    assert not any(loss.requires_grad for loss in losses)


# -- errors


def test_wrong_shapes_raise_with_the_argument_name() -> None:
    x, column = torch.zeros(4), torch.zeros(4, 1)
    for name, call in [
        ("advantages", lambda: policy_gradient_loss(x, column)),
        ("advantages", lambda: clipped_surrogate_loss(x, column, 0.2)),
        ("clip_range", lambda: clipped_surrogate_loss(x, x, column)),
        ("targets", lambda: value_loss(x, column)),
        ("targets", lambda: clipped_value_loss(x, column, x, 0.2)),
        ("targets", lambda: huber_value_loss(x, column, 0.2)),
        ("old_values", lambda: clipped_value_loss(x, x, column, 0.2)),
        ("old_values", lambda: value_cloning_loss(x, column)),
        ("clip_range", lambda: clip_indicator(x, column)),
        ("clip_range_high", lambda: clip_indicator(x, 0.2, column)),
        ("clip_range_low", lambda: dual_clipped_surrogate_loss(x, x, column, 0.2)),
    ]:
        with pytest.raises(ValueError, match=rf"{name} has shape \[4, 1\], expected \[4\]"):
            call()


@pytest.mark.parametrize("clip_range", [-0.1, NAN])
def test_negative_clip_range_raises(clip_range: float) -> None:
    x = torch.zeros(4)
    for function, inputs in [(clipped_surrogate_loss, (x, x)), (clipped_value_loss, (x, x, x)), (clip_indicator, (x,))]:
        with pytest.raises(ValueError, match=f"clip_range is {clip_range}, expected a number >= 0"):
            function(*inputs, clip_range)


# -- other losses of PPO


def test_each_side_is_clipped_by_its_own_range() -> None:
    ratios = torch.tensor([0.5, 1.5, 0.5, 1.5], dtype=torch.float64)
    advantages = torch.tensor([2.0, 2.0, -2.0, -2.0], dtype=torch.float64)
    close(dual_clipped_surrogate_loss(ratios.log(), advantages, 0.1, 0.4), [-1.0, -2.8, 1.8, 3.0])
    for both in (0.1, 0.4):
        same = dual_clipped_surrogate_loss(ratios.log(), advantages, both, both)
        close(same, clipped_surrogate_loss(ratios.log(), advantages, both).tolist())


def test_dual_clip_bounds_the_loss_of_negative_advantages() -> None:
    ratios = torch.tensor([2.0, 2.9, 4.0, 4.0], dtype=torch.float64)
    advantages = torch.tensor([-2.0, -2.0, -2.0, 2.0], dtype=torch.float64)

    def loss(log_ratios: torch.Tensor) -> torch.Tensor:
        return dual_clipped_surrogate_loss(log_ratios, advantages, 0.2, 0.2, 3.0)

    close(loss(ratios.log()), [4.0, 5.8, 6.0, -2.4])
    close(gradient(loss, ratios.log()), [4.0, 5.8, 0.0, 0.0])
    advantages = advantages / 20
    close(loss(ratios.log()), [0.2, 0.29, 0.3, -0.12])


def test_huber_loss_is_quadratic_up_to_delta_and_linear_beyond() -> None:
    values, targets = torch.tensor([0.5, 1.0, 3.0, -3.0], dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    close(huber_value_loss(values, targets, 1.0), [0.125, 0.5, 2.5, 2.5])
    close(gradient(lambda x: huber_value_loss(x, targets, 1.0), values), [0.5, 1.0, 1.0, -1.0])
    for delta in (3.0, math.inf):
        close(huber_value_loss(values, targets, delta), value_loss(values, targets).tolist())


def test_gradient_at_the_end_of_a_clip_range_is_that_inside() -> None:
    """PyTorch 2.14 changed the gradient of `clamp` there."""
    same = torch.zeros(3, dtype=torch.float64)
    advantages = torch.tensor([2.0, -2.0, 0.0], dtype=torch.float64)
    close(gradient(lambda x: clipped_surrogate_loss(x, advantages, 0.0), same), [-2.0, 2.0, 0.0])
    values = torch.tensor([0.5, -0.5, 0.25], dtype=torch.float64)
    targets = torch.ones(3, dtype=torch.float64)
    close(gradient(lambda x: clipped_value_loss(x, targets, same, 0.5), values), [-0.5, -1.5, -0.75])


def test_clipped_value_loss_has_the_larger_of_two_huber_losses() -> None:
    values, targets = torch.tensor([3.0, 3.0, 0.1], dtype=torch.float64), torch.tensor([0.0, 2.0, 0.0])
    old_values, targets = torch.zeros(3, dtype=torch.float64), targets.double()
    close(clipped_value_loss(values, targets, old_values, 0.5, huber_delta=1.0), [2.5, 1.0, 0.005])


@pytest.mark.parametrize("dual_clip", [-1.0, 0.5, 1.0, float("nan")])
def test_dual_clip_of_at_most_1_raises(dual_clip: float) -> None:
    with pytest.raises(ValueError, match=r"dual_clip is .*, expected a number > 1"):
        dual_clipped_surrogate_loss(torch.zeros(2), torch.ones(2), 0.2, 0.2, dual_clip)


@pytest.mark.parametrize("options", [(-0.1, 0.2), (0.2, -0.1)])
def test_negative_ranges_and_delta_raise(options: tuple[float, ...]) -> None:
    name = "clip_range_low" if options[0] < 0 else "clip_range_high"
    with pytest.raises(ValueError, match=f"{name} is -0.1, expected a number >= 0"):
        dual_clipped_surrogate_loss(torch.zeros(2), torch.zeros(2), *options)
    with pytest.raises(ValueError, match="delta is -1"):
        huber_value_loss(torch.zeros(2), torch.zeros(2), -1)

"""V-MPO's losses: by hand, by a loop, and their minima."""

import math

import pytest
import torch

from lightning_rl.functional import better_half, lagrangian, vmpo_policy_loss, vmpo_temperature_loss

from .helpers import gradient

ADVANTAGES = torch.tensor([0.3, -0.1, 2.0, 0.9, 0.4], dtype=torch.float64)
LOG_PROBS = torch.tensor([-1.0, -2.0, -0.5, -3.0, -0.1], dtype=torch.float64)
WEIGHTS = torch.tensor([1.0, 3.0, 2.0, 1.0, 2.0], dtype=torch.float64)


def scalar(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64, requires_grad=True)


def test_better_half_is_rounded_up_and_ignores_rows_of_weight_zero():
    assert better_half(ADVANTAGES).tolist() == [2, 3, 4]
    assert better_half(ADVANTAGES[:4]).tolist() == [2, 3]
    assert len(better_half(torch.zeros(6))) == 3  # also for equal advantages
    assert better_half(ADVANTAGES, torch.tensor([1.0, 1.0, 0.0, 0.0, 0.5])).tolist() == [4, 0]
    nothing = torch.tensor([math.nan, 1.0]), torch.zeros(2)
    assert better_half(*nothing).tolist() == better_half(torch.zeros(0)).tolist() == []


def test_policy_loss_equals_a_loop():
    eta = scalar(0.7)
    exponentials = [math.exp(a / 0.7) for a in ADVANTAGES.tolist()]
    pairs = zip(exponentials, LOG_PROBS.tolist(), strict=True)
    expected = -sum(e / sum(exponentials) * log_prob for e, log_prob in pairs)
    log_probs = LOG_PROBS.clone().requires_grad_()
    loss = vmpo_policy_loss(log_probs, ADVANTAGES, eta)
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    loss.backward()
    assert eta.grad is None
    assert log_probs.grad.tolist() == pytest.approx([-e / sum(exponentials) for e in exponentials], rel=1e-12)
    # Two rows with the advantages 0 and η log 3 have the weights 1/4 and 3/4.
    two = vmpo_policy_loss(torch.tensor([-1.0, -2.0]), torch.tensor([0.0, 2 * math.log(3)]), torch.tensor(2.0))
    assert two.item() == pytest.approx(0.25 + 1.5)


def test_advantages_are_constants():
    values, eta = torch.zeros(5, dtype=torch.float64, requires_grad=True), scalar(0.7)
    log_probs, advantages = LOG_PROBS.clone().requires_grad_(), ADVANTAGES - values
    (vmpo_policy_loss(log_probs, advantages, eta) + vmpo_temperature_loss(advantages, eta, 0.1)).backward()
    assert values.grad is None
    assert log_probs.grad is not None and eta.grad is not None


def test_weights_equal_repeated_rows():
    again = [0, 1, 1, 1, 2, 2, 3, 4, 4]
    eta = torch.tensor(0.7, dtype=torch.float64)
    weighted = vmpo_policy_loss(LOG_PROBS, ADVANTAGES, eta, 0.1 * WEIGHTS)
    torch.testing.assert_close(weighted, vmpo_policy_loss(LOG_PROBS[again], ADVANTAGES[again], eta))
    weighted = vmpo_temperature_loss(ADVANTAGES, eta, 0.2, 0.1 * WEIGHTS)
    torch.testing.assert_close(weighted, vmpo_temperature_loss(ADVANTAGES[again], eta, 0.2))


@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_temperature_loss_is_minimal_where_kl_to_uniform_is_epsilon(weights):
    """Its derivative is ε - KL(ψ ‖ uniform)."""
    uniform = torch.full((5,), 0.2, dtype=torch.float64) if weights is None else weights / weights.sum()
    for value in (0.2, 1.0, 5.0):
        eta = scalar(value)
        loss = vmpo_temperature_loss(ADVANTAGES, eta, 0.1, weights)
        mean = (uniform * (ADVANTAGES / value).exp()).sum().item()
        assert loss.item() == pytest.approx(value * 0.1 + value * math.log(mean), rel=1e-12)
        loss.backward()
        psi = uniform * (ADVANTAGES / value).exp() / mean
        divergence = (psi * (psi / uniform).log()).sum().item()
        assert eta.grad.item() == pytest.approx(0.1 - divergence, rel=1e-9)


@pytest.mark.parametrize("temperature", [0.1, 1.0, 10.0])
@pytest.mark.parametrize("offset", [1e3, 1e6, -1e6])
def test_a_large_mean_advantage_does_not_change_the_gradients(offset, temperature):
    """In float32; η then is much smaller than the advantages, as before the critic has learned the returns."""
    advantages = torch.arange(64) / 16 + offset  # exact

    def gradients(dtype: torch.dtype) -> list[torch.Tensor]:
        a, eta = advantages.to(dtype), torch.tensor(temperature, dtype=dtype)
        of_eta = gradient(lambda x: vmpo_temperature_loss(a, x, 0.1), eta)
        return [of_eta.double(), gradient(lambda x: vmpo_policy_loss(x, a, eta), torch.zeros_like(a)).double()]

    torch.testing.assert_close(gradients(torch.float32), gradients(torch.float64), rtol=1e-4, atol=1e-5)


def test_temperature_loss_of_equal_advantages_and_of_no_rows():
    assert vmpo_temperature_loss(torch.full((4,), 3.0), torch.tensor(2.0), 0.1).item() == pytest.approx(3.2)
    eta = scalar(2.0)
    empty = ADVANTAGES[:0]
    loss = vmpo_temperature_loss(empty, eta, 0.1) + vmpo_policy_loss(empty, empty, eta)
    loss.backward()
    assert loss.item() == eta.grad.item() == 0


def test_gradients_of_the_lagrangian():
    kl, alpha = scalar(0.03), scalar(5.0)
    loss = lagrangian(kl, alpha, 0.01)
    assert loss.item() == pytest.approx(5 * 0.01)  # α ε: the divergence cancels
    loss.backward()
    assert kl.grad.item() == 5
    assert alpha.grad.item() == pytest.approx(0.01 - 0.03)  # descent increases α


def test_shapes_that_differ_and_negative_bounds_are_errors():
    column, eta = LOG_PROBS.unsqueeze(1), scalar(0.7)
    with pytest.raises(ValueError, match=r"advantages has shape \[5\], expected \[5, 1\] like log_probs"):
        vmpo_policy_loss(column, ADVANTAGES, eta)
    for function in (
        lambda weights: better_half(ADVANTAGES, weights),
        lambda weights: vmpo_policy_loss(LOG_PROBS, ADVANTAGES, eta, weights),
        lambda weights: vmpo_temperature_loss(ADVANTAGES, eta, 0.1, weights),
    ):
        with pytest.raises(ValueError, match=r"weights has shape \[4\], expected \[5\] like advantages"):
            function(WEIGHTS[:4])
    unflattened = torch.zeros(4, 2)  # a softmax over time only would give each environment weights that add up to 1
    for function in (
        better_half,
        lambda advantages: vmpo_policy_loss(advantages, advantages, eta),
        lambda advantages: vmpo_temperature_loss(advantages, eta, 0.1),
    ):
        with pytest.raises(ValueError, match=r"advantages has shape \[4, 2\], expected \[N\]: flatten"):
            function(unflattened)
    with pytest.raises(ValueError, match="epsilon is -1, expected a number >= 0"):
        vmpo_temperature_loss(ADVANTAGES, eta, -1)
    with pytest.raises(ValueError, match="epsilon is -1, expected a number >= 0"):
        lagrangian(scalar(0.1), scalar(1.0), -1)

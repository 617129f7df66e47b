"""Squashed Gaussian and beta distributions, against `torch.distributions` and numerical integration."""

import math

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor
from torch.distributions import (
    AffineTransform,
    Independent,
    Normal,
    TanhTransform,
    TransformedDistribution,
    kl_divergence,
)
from torch.distributions import Beta as TorchBeta

from lightning_rl.policies.distributions import Beta, Bounds, DiagonalGaussian, Distribution, SquashedGaussian
from tests.policies.distributions.checks import EXACT, assert_samples_repeat, generator, randn

LOW, HIGH = torch.tensor([-2.0, 0.0, 1.0]).double(), torch.tensor([2.0, 0.5, 4.0]).double()
BOUNDS = Bounds(spaces.Box(LOW.numpy(), HIGH.numpy(), dtype=np.float64))
ONE = Bounds(spaces.Box(-2, 2, (1,), np.float64))


def squashed_pair(seed: int = 0) -> tuple[SquashedGaussian, TransformedDistribution]:
    mean, log_std = randn(4, 2, 3, seed=seed), 0.5 * randn(3, seed=seed + 1)
    transforms = [TanhTransform(), AffineTransform((LOW + HIGH) / 2, (HIGH - LOW) / 2)]
    theirs = TransformedDistribution(Normal(mean, log_std.exp()), transforms)
    return SquashedGaussian(mean, log_std, BOUNDS), Independent(theirs, 1)


def beta_pair(seed: int = 0) -> tuple[Beta, Independent]:
    alpha, beta = 1 + 4 * randn(2, 4, 2, 3, seed=seed).abs()
    theirs = TransformedDistribution(TorchBeta(alpha, beta), [AffineTransform(LOW, HIGH - LOW)])
    return Beta(alpha, beta, BOUNDS), Independent(theirs, 1)


PAIRS = pytest.mark.parametrize("pair", [squashed_pair, beta_pair], ids=["squashed_gaussian", "beta"])


@PAIRS
def test_density_is_in_units_of_the_bounded_action(pair):
    ours, theirs = pair()
    own = ours.sample(generator())
    action = ours.to_space(own)
    assert ((action > LOW) & (action < HIGH)).all()
    torch.testing.assert_close(ours.log_prob(own), theirs.log_prob(action), rtol=1e-6, atol=1e-6)
    assert ours.log_prob(own).shape == ours.entropy().shape == (4, 2)


@pytest.mark.parametrize("distribution", [SquashedGaussian, Beta])
def test_densities_of_mirrored_actions_are_equal_to_the_last_digit_near_the_bounds(distribution):
    first = torch.zeros(1) if distribution is SquashedGaussian else 2 * torch.ones(1)
    mirrored = distribution(first.double(), first.double(), ONE)
    actions = torch.tensor([[10.5], [12.0], [22.0]]).double()
    torch.testing.assert_close(mirrored.log_prob(actions), mirrored.log_prob(-actions), rtol=0, atol=1e-13)


def one_dimensional(kind: str, first: float, second: float) -> Distribution:
    x, y = torch.tensor([first]).double(), torch.tensor([second]).double()
    return SquashedGaussian(x, y.log(), ONE) if kind == "squashed" else Beta(x, y, ONE)


def integration_grid(distribution: Distribution) -> tuple[Tensor, Tensor, Tensor]:
    """Return actions in the policy's form, and log-densities and widths of the bounded actions."""
    own = torch.linspace(-60, 60, 600_001, dtype=torch.float64).unsqueeze(-1)
    # d action / d own: width · 1/2 · (1 - tanh²) for the squashed, of which the logit is half.
    half = own if isinstance(distribution, SquashedGaussian) else own / 2
    log_slope = math.log(2 if isinstance(distribution, SquashedGaussian) else 1) - 2 * half.cosh().log().squeeze(-1)
    return own, distribution.log_prob(own), log_slope.exp() * 120 / 600_000


CASES = pytest.mark.parametrize(
    ("kind", "parameters", "others"),
    [
        ("squashed", (0.0, 1.0), (0.5, 0.7)),
        ("squashed", (1.5, 0.3), (-0.5, 1.0)),
        ("squashed", (-3.0, 0.8), (-2.0, 1.5)),
        ("beta", (1.0, 1.0), (2.0, 3.0)),
        ("beta", (1.7, 5.0), (4.0, 1.2)),
        ("beta", (30.0, 80.0), (20.0, 90.0)),
    ],
)


@CASES
def test_density_entropy_and_kl_equal_numerical_integrals(kind, parameters, others):
    p, q = one_dimensional(kind, *parameters), one_dimensional(kind, *others)
    own, log_density, width = integration_grid(p)
    mass = log_density.exp() * width
    assert mass.sum().item() == pytest.approx(1, abs=1e-6)
    assert p.entropy().item() == pytest.approx(-(mass * log_density).sum().item(), abs=1e-5)
    assert p.kl(q).item() == pytest.approx((mass * (log_density - q.log_prob(own))).sum().item(), rel=1e-5, abs=1e-5)


@PAIRS
def test_kl_to_itself_is_zero(pair):
    torch.testing.assert_close(pair()[0].kl(pair()[0]), torch.zeros(4, 2).double(), **EXACT)


def test_beta_equals_torch_in_closed_form():
    (ours, _), (others, _) = beta_pair(0), beta_pair(3)
    theirs, theirs2 = (TorchBeta(d.alpha, d.beta) for d in (ours, others))
    torch.testing.assert_close(ours.kl(others), kl_divergence(theirs, theirs2).sum(-1), **EXACT)
    entropy = theirs.entropy().sum(-1) + (HIGH - LOW).log().sum()
    torch.testing.assert_close(ours.entropy(), entropy, rtol=1e-10, atol=1e-10)
    mode = LOW + (HIGH - LOW) * theirs.mode
    torch.testing.assert_close(ours.to_space(ours.mode()), mode, rtol=1e-10, atol=1e-10)


def test_mode_of_a_squashed_gaussian_is_its_median():
    ours = squashed_pair()[0]
    center, half_width = (LOW + HIGH) / 2, (HIGH - LOW) / 2
    torch.testing.assert_close(ours.to_space(ours.mode()), center + half_width * ours.mean.tanh(), **EXACT)
    samples = SquashedGaussian(torch.full((20_000, 1), 0.7), torch.zeros(1), ONE)
    below = samples.to_space(samples.sample(generator())) < samples.to_space(samples.mode())
    assert abs(below.double().mean().item() - 0.5) < 4 * 0.5 / math.sqrt(20_000)


@pytest.mark.parametrize("kind", ["squashed", "beta"])
def test_samples_are_uniform_over_deciles(kind):
    count = 20_000
    parameters = (0.3, 0.8) if kind == "squashed" else (2.0, 3.5)
    distribution = one_dimensional(kind, *parameters)
    own, log_density, width = integration_grid(distribution)
    cumulative = (log_density.exp() * width).cumsum(0)
    rows = [torch.tensor([x]).double().expand(count, 1) for x in parameters]
    wide = SquashedGaussian(rows[0], rows[1].log(), ONE) if kind == "squashed" else Beta(*rows, ONE)
    places = torch.searchsorted(own.squeeze(-1), wide.sample(generator()).squeeze(-1)).clamp(max=len(own) - 1)
    observed = (cumulative[places] * 10).long().clamp(0, 9).bincount(minlength=10)
    chi_square = ((observed - count / 10).square() / (count / 10)).sum().item()
    assert 1.15 < chi_square < 27.88  # 1 in 1000 on either side, 9 degrees of freedom


@PAIRS
def test_samples_depend_on_the_given_generator_only(pair):
    assert_samples_repeat(pair()[0])


@pytest.mark.parametrize("kind", ["squashed", "beta"])
@pytest.mark.parametrize("own", [-40.0, -15.0, 15.0, 40.0])
def test_log_prob_in_float32_is_exact_where_the_action_rounds_to_its_bound(kind, own):
    exact = one_dimensional(kind, 2.0, 3.0)
    first, second = torch.tensor([2.0]), torch.tensor([3.0])
    single = SquashedGaussian(first, second.log(), ONE) if kind == "squashed" else Beta(first, second, ONE)
    z = torch.tensor([own], requires_grad=True)
    log_prob = single.log_prob(z)
    assert abs(single.to_space(z).item()) == pytest.approx(2, abs=2e-6)
    assert log_prob.item() == pytest.approx(exact.log_prob(z.detach().double()).item(), rel=1e-6, abs=3e-5)
    (gradient,) = torch.autograd.grad(log_prob, z)
    assert gradient.isfinite()


@PAIRS
def test_gradients_stay_finite_for_extreme_parameters(pair):
    sizes = torch.tensor([[-30.0, 30.0, 0.0], [1e-3, 0.0, 1e3]])
    raw = sizes.clone().requires_grad_()
    if pair is squashed_pair:
        distribution: Distribution = SquashedGaussian(raw, torch.tensor([-5.0, 0.0, 3.0]), BOUNDS)
    else:
        alpha, beta = 1 + torch.nn.functional.softplus(raw), 1 + torch.nn.functional.softplus(-raw)
        distribution = Beta(alpha, beta, BOUNDS)
    for action in (distribution.sample(generator()), distribution.mode()):
        assert action.isfinite().all()
        terms = distribution.log_prob(action.detach()) + distribution.entropy() + distribution.kl(distribution)
        (gradient,) = torch.autograd.grad(terms.sum(), raw, retain_graph=True)
        assert gradient.isfinite().all()


def test_entropy_of_a_squashed_gaussian_has_the_documented_error():
    for std, error in ((1.0, 1e-6), (2.0, 1e-3), (5.0, 0.03)):
        distribution = one_dimensional("squashed", 0.3, std)
        z = torch.linspace(-10, 10, 100_001, dtype=torch.float64)
        log_slope = math.log(2) - 2 * (0.3 + std * z).cosh().log()
        expected = Normal(0.3, std).entropy() + (log_slope * Normal(0.0, 1.0).log_prob(z).exp()).sum() * 20 / 100_000
        assert distribution.entropy().item() == pytest.approx(expected.item(), abs=error)


def test_bounds_cached_in_inference_mode_support_gradients():
    bounds = Bounds(spaces.Box(-1, 1, (2,)))
    x = torch.zeros(2, requires_grad=True)
    with torch.inference_mode():
        bounds.from_unit(x)
    bounds.from_unit(x.tanh()).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [1, 1]


def test_small_kl_between_gaussians_in_float32_has_all_digits():
    mean, log_std, change = torch.zeros(17), torch.full((17,), -0.7), torch.linspace(-1e-4, 1e-4, 17)
    old, new = DiagonalGaussian(mean, log_std), DiagonalGaussian(mean + change, log_std + change)
    exact = DiagonalGaussian(*map(Tensor.double, (old.mean, old.log_std)))
    exact = exact.kl(DiagonalGaussian(*map(Tensor.double, (new.mean, new.log_std))))
    assert old.kl(new).item() == pytest.approx(exact.item(), rel=1e-4)


def test_densities_of_concentrated_beta_distributions_in_float32_have_all_digits():
    """The terms of the log-density are about 2,000, and a policy changes by 1e-4 nats in an update."""
    alpha, beta, z = (torch.tensor([x]) for x in (1000.0, 900.0, 0.1))
    old, new = Beta(alpha, beta, ONE), Beta(alpha + 0.5, beta + 0.2, ONE)
    theirs = [TorchBeta(x.alpha.double(), x.beta.double()) for x in (old, new)]
    jacobian = math.log(4)  # of the width of ONE
    found = old.log_prob(z), old.entropy(), old.kl(new)
    expected = theirs[0].log_prob(z.double().sigmoid()) - jacobian, theirs[0].entropy() + jacobian
    assert {x.dtype for x in found} == {torch.float32}
    torch.testing.assert_close(found[0].double(), expected[0].squeeze(), rtol=1e-6, atol=0)
    torch.testing.assert_close(found[1].double(), expected[1].squeeze(), rtol=1e-6, atol=0)
    assert found[2].item() == pytest.approx(kl_divergence(*theirs).item(), rel=1e-5)

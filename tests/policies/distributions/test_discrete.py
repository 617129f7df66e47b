"""Action distributions against `torch.distributions`, and their heads."""

import math

import pytest
import torch
from gymnasium import spaces
from torch import Tensor
from torch.distributions import Categorical as TorchCategorical
from torch.distributions import Independent, Normal

from lightning_rl import ActorCritic
from lightning_rl.policies.distributions import (
    Bernoulli,
    Categorical,
    DiagonalGaussian,
    Distribution,
    make_action_head,
)
from lightning_rl.validation import ConfigurationError
from tests.policies.distributions.checks import EXACT, assert_equal_to_torch, assert_samples_repeat, generator, randn


def categorical_pair(seed: int = 0) -> tuple[Categorical, TorchCategorical]:
    logits = 3 * randn(4, 2, 6, seed=seed)
    return Categorical(logits), TorchCategorical(logits=logits)


def gaussian_pair(seed: int = 0) -> tuple[DiagonalGaussian, Independent]:
    mean, log_std = randn(4, 2, 3, seed=seed), 0.5 * randn(3, seed=seed + 1)
    return DiagonalGaussian(mean, log_std), Independent(Normal(mean, log_std.exp()), 1)


PAIRS = pytest.mark.parametrize("pair", [categorical_pair, gaussian_pair], ids=["categorical", "gaussian"])


@PAIRS
def test_log_prob_entropy_and_kl_equal_torch(pair):
    assert_equal_to_torch(pair, (4, 2))


@PAIRS
def test_mode_is_the_most_likely_action(pair):
    ours, theirs = pair()
    assert torch.equal(ours.mode(), theirs.mode)
    assert (ours.log_prob(ours.mode()) >= ours.log_prob(ours.sample(generator()))).all()


@PAIRS
def test_kl_to_itself_is_zero(pair):
    torch.testing.assert_close(pair()[0].kl(pair()[0]), torch.zeros(4, 2, dtype=torch.float64), **EXACT)


def test_hand_worked_categorical():
    distribution = Categorical(torch.tensor([1.0, 2.0, 1.0], dtype=torch.float64).log())
    assert distribution.log_prob(torch.tensor(1)).item() == pytest.approx(math.log(0.5), rel=1e-15)
    assert distribution.entropy().item() == pytest.approx(1.5 * math.log(2), rel=1e-15)


def test_hand_worked_gaussian():
    double = {"dtype": torch.float64}
    distribution = DiagonalGaussian(torch.tensor([1.0, 0.0], **double), torch.tensor([2.0, 1.0], **double).log())
    # One deviation off in the first dimension, none in the second.
    expected = -0.5 - math.log(2) - math.log(2 * math.pi)
    assert distribution.log_prob(torch.tensor([3.0, 0.0], **double)).item() == pytest.approx(expected, rel=1e-15)
    assert distribution.entropy().item() == pytest.approx(math.log(2) + math.log(2 * math.pi * math.e), rel=1e-15)


def test_categorical_samples_are_as_frequent_as_their_probabilities():
    probabilities = torch.tensor([0.05, 0.1, 0.15, 0.3, 0.4])
    count = 20_000
    samples = Categorical(probabilities.log().expand(count, 5)).sample(generator())
    observed, expected = samples.bincount(minlength=5), probabilities * count
    chi_square = ((observed - expected).square() / expected).sum().item()
    assert chi_square < 18.47  # exceeded by 1 in 1000 samples of 4 degrees of freedom
    assert chi_square > 0.09  # and below this by as few


def test_gaussian_samples_are_uniform_over_deciles():
    mean, log_std, count = torch.tensor([3.0, -1.0]), torch.tensor([-1.0, 0.7]), 20_000
    samples = DiagonalGaussian(mean.expand(count, 2), log_std).sample(generator())
    tenths = (Normal(mean, log_std.exp()).cdf(samples) * 10).long()
    for dimension in range(2):
        observed = tenths[:, dimension].bincount(minlength=10)
        chi_square = ((observed - count / 10).square() / (count / 10)).sum().item()
        assert 1.15 < chi_square < 27.88  # 1 in 1000 on either side, 9 degrees of freedom


def test_gaussian_samples_are_uncorrelated():
    samples = DiagonalGaussian(torch.zeros(10_000, 2), torch.zeros(2)).sample(generator())
    correlation = torch.corrcoef(torch.stack([samples[:, 0], samples[:, 1], samples[:, 0].roll(1)]))
    assert (correlation - torch.eye(3)).abs().max() < 0.03


@PAIRS
def test_samples_depend_on_the_given_generator_only(pair):
    assert_samples_repeat(pair()[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(8, 2), (3, 4, 5), (300, 4)])
def test_samples_are_equal_in_inference_mode_and_outside(shape, dtype):
    logits = randn(*shape, seed=1).to(dtype)
    logits[..., 0] = -torch.inf

    def draw() -> Tensor:
        return Categorical(logits).sample(generator(0))

    with torch.inference_mode():
        acting = draw()
    assert acting.dtype == torch.int64 and not (acting == 0).any()
    assert torch.equal(acting, draw())


@pytest.mark.parametrize("kind", ["categorical", "gaussian"])
def test_bfloat16_parameters_are_computed_in_float32(kind):
    x, scale = randn(64, 5).bfloat16(), randn(5, seed=1).bfloat16()

    def build(x: Tensor, scale: Tensor) -> Distribution:
        return Categorical(x) if kind == "categorical" else DiagonalGaussian(x, scale)

    half, full = build(x, scale), build(x.float(), scale.float())
    action = full.sample(generator())
    assert torch.equal(half.sample(generator()), action)
    for one, other in (
        (half.log_prob(action), full.log_prob(action)),
        (half.entropy(), full.entropy()),
        (half.kl(build(2 * x, scale)), full.kl(build(2 * x.float(), scale.float()))),
    ):
        assert one.dtype == torch.float32
        assert torch.equal(one, other)


@pytest.mark.parametrize("size", [1.0, 100.0, 1e4])
def test_gradients_of_categorical_stay_finite_for_extreme_logits(size):
    logits = (size * randn(16, 6)).float().requires_grad_()
    distribution = Categorical(logits)
    terms = distribution.log_prob(distribution.mode()) + distribution.entropy()
    (gradient,) = torch.autograd.grad((terms + distribution.kl(Categorical(logits.detach() + 1))).sum(), logits)
    assert gradient.isfinite().all()


@PAIRS
def test_gradients_equal_torch(pair):
    def gradients(which: int) -> list[Tensor]:
        torch.manual_seed(0)
        leaves = [
            t.requires_grad_() for t in ([3 * randn(7, 4)] if pair is categorical_pair else [randn(7, 4), randn(4)])
        ]
        if pair is categorical_pair:
            distribution = (Categorical(*leaves), TorchCategorical(logits=leaves[0]))[which]
            action = torch.arange(7) % 4
        else:
            distribution = (DiagonalGaussian(*leaves), Independent(Normal(leaves[0], leaves[1].exp()), 1))[which]
            action = randn(7, 4, seed=3)
        (distribution.log_prob(action) + 0.3 * distribution.entropy()).sum().backward()
        return [leaf.grad for leaf in leaves]

    for ours, theirs in zip(gradients(0), gradients(1), strict=True):
        torch.testing.assert_close(ours, theirs, **EXACT)


@pytest.mark.parametrize(
    ("space", "width"), [(spaces.Discrete(5), 5), (spaces.Box(-1, 1, (2, 3)), 6), (spaces.Box(-1, 1, ()), 1)]
)
def test_head_has_one_output_for_each_action_or_dimension(space, width):
    head = make_action_head(space, 8)
    sample = head(torch.randn(7, 8)).sample(generator())
    linear = head.logits if isinstance(space, spaces.Discrete) else head.mean
    assert linear.out_features == width
    assert sample.shape == ((7,) if isinstance(space, spaces.Discrete) else (7, width))


def test_initial_policies_are_nearly_uniform_with_the_initial_std():
    torch.manual_seed(0)
    features = torch.randn(100, 64)
    entropy = make_action_head(spaces.Discrete(4), 64)(features).entropy()
    assert (math.log(4) - entropy).max() < 1e-3
    gaussian = make_action_head(spaces.Box(-1, 1, (3,)), 64, initial_log_std=-1)(features)
    assert gaussian.mean.abs().max() < 0.1
    torch.testing.assert_close(gaussian.log_std, torch.full((3,), -1.0))


def test_initial_log_std_out_of_range_raises():
    with pytest.raises(ConfigurationError, match=r"initial_log_std=nan .* expected a number at least -20"):
        ActorCritic(spaces.Discrete(2), spaces.Box(-1, 1, (1,)), initial_log_std=math.nan)


@pytest.mark.parametrize("logit", [5.0, 21.0, 30.0, -25.0])
def test_switches_that_are_almost_certain_are_exact_to_the_last_digit(logit):
    certain, even = Bernoulli(torch.tensor([logit]).double()), Bernoulli(torch.zeros(1).double())
    rest = math.exp(-abs(logit))  # odds of the other choice
    likely = torch.tensor([logit > 0])
    assert float(certain.log_prob(likely)) == pytest.approx(-math.log1p(rest), rel=1e-15)
    assert float(certain.log_prob(~likely)) == pytest.approx(-abs(logit) - math.log1p(rest), rel=1e-15)
    entropy = math.log1p(rest) + abs(logit) * rest / (1 + rest)
    assert float(certain.entropy()) == pytest.approx(entropy, abs=1e-14)
    assert float(certain.kl(even)) == pytest.approx(math.log(2) - entropy, abs=1e-14)

"""Distributions of several components or parts, against `torch.distributions`."""

import itertools

import pytest
import torch
from gymnasium import spaces
from torch import Tensor
from torch.distributions import Bernoulli as TorchBernoulli
from torch.distributions import Categorical as TorchCategorical
from torch.distributions import Independent, kl_divergence

from lightning_rl.policies.distributions import (
    Bernoulli,
    Categorical,
    DiagonalGaussian,
    Joint,
    MultiCategorical,
    make_action_head,
)
from tests.policies.distributions.checks import EXACT, assert_equal_to_torch, generator, randn


def multi_pair(seed: int = 0) -> tuple[MultiCategorical, Independent]:
    logits = 3 * randn(5, 2, 3, 4, seed=seed)
    return MultiCategorical(logits), Independent(TorchCategorical(logits=logits), 1)


def bernoulli_pair(seed: int = 0) -> tuple[Bernoulli, Independent]:
    logits = 3 * randn(5, 2, 4, seed=seed)
    return Bernoulli(logits), Independent(TorchBernoulli(logits=logits), 1)


PAIRS = pytest.mark.parametrize("pair", [multi_pair, bernoulli_pair], ids=["multi_categorical", "bernoulli"])


@PAIRS
def test_log_prob_entropy_and_kl_equal_torch(pair):
    assert_equal_to_torch(pair, (5, 2))
    ours, _ = pair(0)
    assert ours.log_prob(ours.sample(generator())).shape == (5, 2)


@PAIRS
def test_mode_is_the_most_likely_action(pair):
    ours = pair()[0]
    assert torch.equal(ours.mode(), pair()[1].mode.to(ours.mode().dtype))
    assert (ours.log_prob(ours.mode()) >= ours.log_prob(ours.sample(generator()))).all()


@PAIRS
def test_samples_are_as_frequent_as_their_probabilities(pair):
    logits = 1.5 * randn(2, 3) if pair is multi_pair else randn(3)
    count = 20_000
    rows = logits.expand(count, *logits.shape)
    samples = (MultiCategorical(rows) if pair is multi_pair else Bernoulli(rows)).sample(generator())
    if pair is multi_pair:
        expected = logits.softmax(-1)
        observed = torch.stack([(samples == choice).double().mean(0) for choice in range(3)], -1)
    else:
        expected, observed = logits.sigmoid(), samples.double().mean(0)
    # Four deviations of a mean.
    assert ((observed - expected).abs() < 4 * (expected * (1 - expected) / count).sqrt()).all()


@pytest.mark.parametrize("size", [1.0, 50.0, 1e4])
def test_bernoulli_stays_finite_for_extreme_logits(size):
    logits = torch.tensor([-size, size, 0.0], requires_grad=True)
    distribution = Bernoulli(logits)
    terms = distribution.log_prob(1 - distribution.mode()) + distribution.entropy()
    (terms + distribution.kl(Bernoulli(-logits.detach()))).sum().backward()
    assert terms.isfinite().all()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    assert distribution.entropy() >= 0.69


def test_entropy_of_an_almost_certain_switch_keeps_its_digits():
    logits = torch.tensor([[-30.0], [-12.0], [12.0], [30.0]])
    expected = Bernoulli(logits.double()[[0, 1, 1, 0]]).entropy().float()
    torch.testing.assert_close(Bernoulli(logits).entropy(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("sign", [-1, 1])
def test_kl_between_almost_certain_switches_keeps_its_digits(sign):
    p = sign * torch.tensor([[0.0], [8.0], [12.0], [20.0]], dtype=torch.float64, requires_grad=True)
    q = p.detach() + sign * 0.125
    parts = kl_divergence(TorchBernoulli(logits=-p.abs()), TorchBernoulli(logits=-q.abs()))
    torch.testing.assert_close(Bernoulli(p.float()).kl(Bernoulli(q.float())), parts.sum(-1).float(), rtol=1e-4, atol=0)
    (gradient,) = torch.autograd.grad(Bernoulli(p).kl(Bernoulli(q)).sum(), p)
    torch.testing.assert_close(gradient, (p - q) * p.sigmoid() * (-p).sigmoid())


def test_components_with_different_numbers_of_choices_are_separate_categoricals():
    space = spaces.MultiDiscrete([2, 5, 3])
    torch.manual_seed(0)
    head = make_action_head(space, 6).double()
    torch.nn.init.normal_(head.logits.weight)
    features = randn(400, 6).requires_grad_()
    distribution = head(features)
    pieces = [Categorical(x) for x in head.logits(features).split([2, 5, 3], -1)]
    action = distribution.sample(generator())
    assert action.shape == (400, 3)
    assert action.amax(0).tolist() == [1, 4, 2]
    expected = sum(piece.log_prob(x) for piece, x in zip(pieces, action.unbind(-1), strict=True))
    torch.testing.assert_close(distribution.log_prob(action), expected, **EXACT)
    for place, piece in enumerate(pieces):
        torch.testing.assert_close(distribution.entropies()[str(place)], piece.entropy(), **EXACT)
    torch.testing.assert_close(distribution.entropy(), sum(piece.entropy() for piece in pieces), **EXACT)
    (gradient,) = torch.autograd.grad(distribution.entropy().sum(), features, retain_graph=True)
    (wanted,) = torch.autograd.grad(sum(piece.entropy() for piece in pieces).sum(), features)
    torch.testing.assert_close(gradient, wanted, **EXACT)


def test_probabilities_of_all_actions_add_up_to_one():
    head = make_action_head(spaces.MultiDiscrete([2, 3]), 4)
    distribution = head(torch.randn(1, 4).expand(6, 4))
    actions = torch.tensor(list(itertools.product(range(2), range(3))))
    assert distribution.log_prob(actions).exp().sum().item() == pytest.approx(1, abs=1e-6)


def test_joint_sums_its_parts_and_names_their_entropies():
    def parts(seed: int) -> tuple[Joint, dict[str, Tensor]]:
        p = {
            "logits": 2 * randn(7, 3, seed=seed),
            "mean": randn(7, 2, seed=seed + 1),
            "many": randn(7, 2, 4, seed=seed),
        }
        nested = {
            "move": Categorical(p["logits"]),
            "arm": (DiagonalGaussian(p["mean"], torch.zeros(2)), MultiCategorical(p["many"])),
        }
        return Joint(nested, ["move", "arm.0", "arm.1"]), nested

    (joint, p), (other, q) = parts(0), parts(9)
    action = joint.sample(generator())
    assert set(action) == {"move", "arm"}
    assert isinstance(action["arm"], tuple)
    log_probs = p["move"].log_prob(action["move"]) + p["arm"][0].log_prob(action["arm"][0])
    torch.testing.assert_close(joint.log_prob(action), log_probs + p["arm"][1].log_prob(action["arm"][1]), **EXACT)
    kl = p["move"].kl(q["move"]) + p["arm"][0].kl(q["arm"][0]) + p["arm"][1].kl(q["arm"][1])
    torch.testing.assert_close(joint.kl(other), kl, **EXACT)
    assert list(joint.entropies()) == ["move", "arm.0", "arm.1.0", "arm.1.1"]
    torch.testing.assert_close(sum(joint.entropies().values()), joint.entropy(), **EXACT)
    torch.testing.assert_close(joint.entropies()["arm.0"], p["arm"][0].entropy(), **EXACT)
    assert torch.equal(joint.mode()["arm"][1], p["arm"][1].mode())
    assert joint.log_prob(joint.mode()).shape == (7,)


def test_many_components_are_reported_as_one():
    distribution = MultiCategorical(randn(3, 17, 2))
    assert list(distribution.entropies()) == [""]
    torch.testing.assert_close(distribution.entropies()[""], distribution.entropy(), **EXACT)

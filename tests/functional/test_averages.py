"""Averages over weighted entries: the mean, explained variance, normalisation."""

import math

import pytest
import torch

from lightning_rl.functional import explained_variance, normalize, normalize_rows, weighted_mean

from .helpers import close, gradient, randn

NAN, INF = math.nan, math.inf


def test_weighted_mean_by_hand() -> None:
    x, weights = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1.0, 0.0], [0.5, 0.5]])
    assert weighted_mean(x).item() == 2.5
    assert weighted_mean(x, weights).item() == (1 + 1.5 + 2) / 2
    assert weighted_mean(x, weights > 0).item() == pytest.approx(8 / 3)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_masked_entries_reach_neither_the_mean_nor_its_gradient(bad: float) -> None:
    x, weights = torch.tensor([1.0, bad, 3.0]), torch.tensor([1.0, 0.0, 3.0])
    assert weighted_mean(x, weights).item() == 2.5
    assert gradient(lambda x: weighted_mean(x, weights), x).tolist() == [0.25, 0.0, 0.75]


def test_the_mean_of_nothing_is_nan() -> None:
    assert weighted_mean(torch.ones(3), torch.zeros(3)).isnan()
    assert weighted_mean(torch.ones(0)).isnan()


def test_half_precision_is_averaged_in_float32() -> None:
    x = torch.arange(1001, dtype=torch.bfloat16)
    assert weighted_mean(x, torch.ones_like(x)).dtype == torch.float32
    assert weighted_mean(x, torch.ones_like(x)).item() == pytest.approx(x.double().mean().item())
    assert normalize(x).dtype == explained_variance(x, x).dtype == torch.float32
    assert weighted_mean(torch.tensor(1.5, dtype=torch.float64)).dtype == torch.float64


def test_explained_variance_by_hand() -> None:
    targets = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert explained_variance(targets + 7, targets).item() == 1
    assert explained_variance(torch.zeros(4), targets).item() == 0
    assert explained_variance(-targets, targets).item() == -3
    # The errors -1, 1, -1, 1 have variance 1, the targets 1.25.
    assert explained_variance(torch.tensor([2.0, 1.0, 4.0, 3.0]), targets).item() == pytest.approx(1 - 1 / 1.25)


@pytest.mark.parametrize("constant", [0.0, 0.1, 1e6 + 0.3])
def test_explained_variance_of_constant_targets_is_nan(constant: float) -> None:
    assert explained_variance(torch.randn(97), torch.full((97,), constant)).isnan()
    assert explained_variance(torch.zeros(1), torch.ones(1)).isnan()
    assert explained_variance(torch.zeros(0), torch.zeros(0)).isnan()


def test_explained_variance_ignores_masked_entries() -> None:
    predictions, targets, weights = randn(20), randn(20, seed=1), (torch.arange(20) % 3 > 0).double()
    expected = explained_variance(predictions[weights > 0], targets[weights > 0])
    predictions[0], targets[3] = NAN, INF
    close(explained_variance(predictions, targets, weights), expected)
    close(explained_variance(predictions, targets, 7 * weights), expected)


def test_normalize_uses_the_unbiased_deviation() -> None:
    close(normalize(torch.tensor([1.0, 2.0, 3.0])), [-1.0, 0.0, 1.0])
    x = randn(6, 5)
    close(normalize(x), (x - x.mean()) / (x.std() + 1e-8))
    close(normalize(x, eps=0.5), (x - x.mean()) / (x.std() + 0.5))


def test_normalize_ignores_masked_entries_and_returns_zeros_for_them() -> None:
    x, mask = randn(6, 5), torch.arange(30).reshape(6, 5) % 3 > 0
    expected = normalize(x[mask])
    x[~mask] = NAN
    for weights in (mask, 0.3 * mask):  # the scale of the weights does not matter
        close(normalize(x, weights)[mask], expected)
        assert (normalize(x, weights)[~mask] == 0).all()


@pytest.mark.parametrize("eps", [1e-8, 0.0])
@pytest.mark.parametrize("constant", [0.0, 0.1, -1e6 - 0.3])
def test_normalize_gives_zeros_for_one_entry_and_for_equal_entries(constant: float, eps: float) -> None:
    x = torch.full((97,), constant)
    assert (normalize(x, eps=eps) == 0).all()
    assert (normalize(x[:1], eps=eps) == 0).all()
    x[1:] = NAN
    assert (normalize(x, torch.arange(97) < 1, eps) == 0).all()
    assert (normalize(x, 0.1 * (torch.arange(97) < 1), eps) == 0).all()
    assert (normalize(x, torch.zeros(97), eps) == 0).all()
    assert normalize(x[:0], eps=eps).shape == (0,)


def test_normalize_of_advantages_far_from_zero_keeps_its_digits() -> None:
    x = 1e4 + torch.arange(64) / 512  # exact in float32
    torch.testing.assert_close(normalize(x), normalize(x.double()).float(), rtol=1e-5, atol=1e-5)


def test_rows_are_normalized_each_for_itself() -> None:
    x = 3 * randn(2, 3, 7) + 5
    x[1, 2] = 0.1
    for eps in (1e-8, 0.0, 0.5):
        expected = torch.stack([normalize(row, eps=eps) for row in x.flatten(0, 1)]).view(x.shape)
        close(normalize_rows(x, eps), expected)
    assert (normalize_rows(x[..., :1]) == 0).all()
    with pytest.raises(ValueError, match="eps"):
        normalize_rows(x, -1.0)


def test_wrong_shapes_are_named() -> None:
    x, column = torch.zeros(4), torch.zeros(4, 1)
    for name, call in [
        ("weights", lambda: weighted_mean(x, column)),
        ("weights", lambda: normalize(x, column)),
        ("predictions", lambda: explained_variance(column, x)),
        ("weights", lambda: explained_variance(x, x, column)),
    ]:
        with pytest.raises(ValueError, match=rf"{name} has shape \[4, 1\], expected \[4\]"):
            call()
    with pytest.raises(ValueError, match="eps is -1"):
        normalize(x, eps=-1)

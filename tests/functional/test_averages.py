"""Explained variance and normalization."""

import math

import pytest
import torch

from lightning_rl.functional import explained_variance, normalize_rows

from .helpers import close, randn

NAN, INF = math.nan, math.inf


def test_half_precision_is_reduced_in_float32() -> None:
    x = torch.arange(1001, dtype=torch.bfloat16)
    assert normalize_rows(x).dtype == explained_variance(x, x).dtype == torch.float32
    assert explained_variance(x.float(), x.double()).dtype == torch.float64


def test_explained_variance_by_hand() -> None:
    targets = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert explained_variance(targets + 7, targets).item() == 1
    assert explained_variance(torch.zeros(4), targets).item() == 0
    assert explained_variance(-targets, targets).item() == -3
    # The errors -1, 1, -1, 1 have variance 1, the targets 1.25.
    predictions = torch.tensor([2.0, 1.0, 4.0, 3.0])
    for scale in (1.0, 1e-3):
        for weights in (None, torch.ones(4)):
            explained = explained_variance(scale * predictions, scale * targets, weights)
            assert explained.item() == pytest.approx(1 - 1 / 1.25, rel=1e-5)


@pytest.mark.parametrize("constant", [0.0, 0.1, 1e6 + 0.3])
def test_explained_variance_of_constant_targets_is_nan(constant: float) -> None:
    for size in (*range(1, 100, 7), 97):
        for weights in (None, torch.ones(size)):
            assert explained_variance(torch.randn(size), torch.full((size,), constant), weights).isnan()
    assert explained_variance(torch.zeros(1), torch.ones(1)).isnan()
    assert explained_variance(torch.zeros(0), torch.zeros(0)).isnan()


@pytest.mark.filterwarnings("error")
def test_explained_variance_of_no_entries_is_nan_without_a_warning() -> None:
    for weights in (None, torch.zeros(0)):
        assert explained_variance(torch.zeros(0), torch.zeros(0), weights).isnan()


def test_explained_variance_ignores_masked_entries() -> None:
    predictions, targets, weights = randn(20), randn(20, seed=1), (torch.arange(20) % 3 > 0).double()
    expected = explained_variance(predictions[weights > 0], targets[weights > 0])
    predictions[0], targets[3] = NAN, INF
    close(explained_variance(predictions, targets, weights), expected)
    close(explained_variance(predictions, targets, 7 * weights), expected)


def test_normalization_uses_the_unbiased_deviation_of_each_row() -> None:
    close(normalize_rows(torch.tensor([1.0, 2.0, 3.0])), [-1.0, 0.0, 1.0])
    close(normalize_rows(torch.tensor([1.0, 3.0])), [-(0.5**0.5), 0.5**0.5])
    close(normalize_rows(torch.tensor([-2e-8, 0.0, 2e-8])), [-2 / 3, 0.0, 2 / 3])  # epsilon is 1e-8
    x = 3 * randn(2, 3, 7) + 5
    for eps in (1e-8, 0.5):
        close(normalize_rows(x, eps), (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + eps))
    with pytest.raises(ValueError, match="eps is -1"):
        normalize_rows(x, -1.0)


@pytest.mark.parametrize("eps", [1e-8, 0.0])
@pytest.mark.parametrize("constant", [0.0, 0.1, -1e6 - 0.3])
def test_constant_rows_are_normalized_to_zero(constant: float, eps: float) -> None:
    x = torch.full((97,), constant)
    assert (normalize_rows(x, eps) == 0).all()
    assert (normalize_rows(x[:1], eps) == 0).all()
    assert normalize_rows(x[:0], eps).shape == (0,)


def test_normalization_far_from_zero_is_accurate() -> None:
    x = 1e4 + torch.arange(64) / 512  # exact in float32
    torch.testing.assert_close(normalize_rows(x), normalize_rows(x.double()).float(), rtol=1e-5, atol=1e-5)


def test_wrong_shapes_raise_with_the_argument_name() -> None:
    x, column = torch.zeros(4), torch.zeros(4, 1)
    for name, call in [
        ("predictions", lambda: explained_variance(column, x)),
        ("weights", lambda: explained_variance(x, x, column)),
    ]:
        with pytest.raises(ValueError, match=rf"{name} has shape \[4, 1\], expected \[4\]"):
            call()

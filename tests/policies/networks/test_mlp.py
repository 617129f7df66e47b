"""Orthogonal layers, and heads that are computed in at least float32."""

import pytest
import torch
from torch import nn

from lightning_rl.policies.networks.mlp import HeadLinear, orthogonal


def assert_orthogonal(layer: nn.Linear | nn.Conv2d, gain: float) -> None:
    """Rows (or columns, if there are fewer) are orthogonal with the norm of the gain; the bias is 0."""
    weight = layer.weight.detach().double().flatten(1)
    product = weight @ weight.T if weight.shape[0] <= weight.shape[1] else weight.T @ weight
    torch.testing.assert_close(product, gain**2 * torch.eye(len(product)).double(), rtol=0, atol=1e-5)
    assert not layer.bias.any()


@pytest.mark.parametrize("gain", [0.01, 1.0])
def test_heads_are_orthogonal_with_their_gain(gain):
    assert_orthogonal(HeadLinear(16, 4, gain), gain)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.bfloat16, 2e-2), (torch.float16, 2e-3), (torch.float32, 1e-5), (torch.float64, 1e-12)],
)
def test_weights_are_orthogonal_in_any_precision(dtype, tolerance):
    try:
        torch.set_default_dtype(dtype)
        weight = orthogonal(nn.Linear(8, 4)).weight
    finally:
        torch.set_default_dtype(torch.float32)
    assert weight.dtype == dtype
    assert (weight.double() @ weight.double().T - 2 * torch.eye(4)).abs().max() < tolerance


def test_head_is_computed_in_float32_under_autocast_and_with_bfloat16_weights():
    head, features = HeadLinear(64, 3, 1.0), torch.randn(20, 64).bfloat16()
    expected = features.float() @ head.weight.T + head.bias
    with torch.autocast("cpu", torch.bfloat16):
        output = head(features)
    assert output.dtype == torch.float32
    torch.testing.assert_close(output, expected)
    half = HeadLinear(64, 3, 1.0).bfloat16()
    torch.testing.assert_close(half(features), features.float() @ half.weight.float().T + half.bias.float())
    assert HeadLinear(64, 3, 1.0).double()(features.double()).dtype == torch.float64

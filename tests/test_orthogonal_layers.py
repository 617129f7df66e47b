"""Orthogonal layers, heads that are computed in at least float32, and layers that are called past their hooks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_rl.layers import HeadLinear, apply_layers, orthogonal_linear


def assert_orthogonal(layer: nn.Linear | nn.Conv2d, gain: float) -> None:
    """The rows, or the columns where there are fewer, are orthogonal and as long as the gain; the bias is 0."""
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
def test_weights_are_orthogonal_in_whatever_precision_they_are_made(dtype, tolerance):
    try:
        torch.set_default_dtype(dtype)
        weight = orthogonal_linear(8, 4).weight
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


def make_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5), nn.ELU())


def test_layers_give_what_they_give_when_they_are_called():
    layers, x = make_layers(), torch.randn(7, 3)
    assert torch.equal(apply_layers(layers, x), layers(x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(apply_layers(layers, x), layers(x))
        assert apply_layers(layers, x).dtype == torch.bfloat16


def double(*arguments: torch.Tensor) -> torch.Tensor:
    return 2 * arguments[-1]


CHANGES: dict[str, Callable[[nn.Sequential], Any]] = {
    "hook": lambda layers: layers[0].register_forward_hook(double),
    "hook of all layers": lambda layers: layers.register_forward_hook(double),
    "hook of all modules": lambda _: nn.modules.module.register_module_forward_hook(double),
    "forward": lambda layers: setattr(layers[1], "forward", double),
    "parametrization": lambda layers: nn.utils.parametrize.register_parametrization(layers[2], "weight", nn.Softplus()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_takes_the_place_of_a_layer_takes_part(change):
    layers, x = make_layers(), torch.randn(7, 3)
    plain = layers(x)
    handle = CHANGES[change](layers)
    try:
        assert torch.equal(apply_layers(layers, x), layers(x))
        assert not torch.allclose(apply_layers(layers, x), plain)
    finally:
        if handle is not None and change.startswith("hook"):
            handle.remove()

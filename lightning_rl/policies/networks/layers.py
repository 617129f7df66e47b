"""Layers with orthogonal weights, the building blocks of encoders and heads."""

from __future__ import annotations

import math
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

_SQRT2 = math.sqrt(2)
_EXACT = (torch.float32, torch.float64)
# Standard deviation of a standard normal variable, given that it is within two of its own.
_DEVIATION_WITHIN_TWO = 0.87962566103423978
_Layer = TypeVar("_Layer", nn.Linear, nn.Conv2d)


@torch.no_grad()
def orthogonal(layer: _Layer, gain: float = _SQRT2) -> _Layer:
    """Give a layer orthogonal weights (Saxe et al. 2014) and zero bias, and return it."""
    # The decomposition does not exist in half precision, which a module may be born in (`Trainer.init_module`).
    weight = torch.empty_like(layer.weight, dtype=torch.promote_types(layer.weight.dtype, torch.float32))
    layer.weight.copy_(nn.init.orthogonal_(weight, gain))
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


class HeadLinear(nn.Linear):
    """The linear layer of a head: orthogonal weights, zero bias, computed in at least float32.

    Logits and values rounded to bfloat16 have two to three digits, too few for ratios and temporal differences.

    Args:
        in_features: Number of features.
        out_features: Number of outputs.
        gain: Of the orthogonal weights.
    """

    def __init__(self, in_features: int, out_features: int, gain: float) -> None:
        super().__init__(in_features, out_features)
        orthogonal(self, gain)

    def forward(self, features: Tensor) -> Tensor:
        """Map features `[..., in_features]` to `[..., out_features]`."""
        weight, bias, kind = self.weight, self.bias, features.device.type
        if features.dtype == weight.dtype in _EXACT and not torch.is_autocast_enabled(kind):
            return functional.linear(features, weight, bias)
        dtype = torch.promote_types(weight.dtype, torch.float32)
        with torch.autocast(kind, enabled=False):
            return functional.linear(features.to(dtype), weight.to(dtype), bias.to(dtype))


def orthogonal_linear(in_features: int, out_features: int, gain: float = _SQRT2) -> nn.Linear:
    """Return a linear layer with orthogonal weights (Saxe et al. 2014) and zero bias."""
    return orthogonal(nn.Linear(in_features, out_features), gain)


@torch.no_grad()
def variance_scaling(layer: HeadLinear, scale: float) -> HeadLinear:
    """Give a layer weights of variance `scale / in_features`, of a normal distribution cut off at two deviations.

    That of TensorFlow's `VarianceScaling`, which makes up for what the cut takes from the variance.
    """
    deviation = math.sqrt(scale / layer.in_features) / _DEVIATION_WITHIN_TWO
    weight = torch.empty_like(layer.weight, dtype=torch.promote_types(layer.weight.dtype, torch.float32))
    layer.weight.copy_(nn.init.trunc_normal_(weight, std=deviation, a=-2 * deviation, b=2 * deviation))
    return layer

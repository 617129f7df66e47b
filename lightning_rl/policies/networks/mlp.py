"""Linear layers, and the MLP encoder with the inputs of its observations."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar, cast

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn import functional

from lightning_rl.nested import Nested, module_name, part_at, space_leaves
from lightning_rl.validation import ConfigurationError, check, check_positive_int, is_list, is_one_of

DiscreteEncoding = Literal["one_hot", "embedding"]
Activation = Literal["tanh", "relu", "elu", "gelu", "silu"]
ACTIVATIONS: dict[str, type[nn.Module]] = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
}
_SQRT2 = math.sqrt(2)
_Layer = TypeVar("_Layer", nn.Linear, nn.Conv2d)


def at_least_float32(x: Tensor) -> Tensor:
    """Return `x` in float32 if it is in half precision, else unchanged."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


@torch.no_grad()
def orthogonal_(weight: Tensor, gain: float) -> None:
    """Fill a weight of any precision with an orthogonal matrix (Saxe et al. 2014)."""
    # PyTorch has no QR decomposition in half precision.
    weight.copy_(nn.init.orthogonal_(at_least_float32(weight), gain))


def orthogonal(layer: _Layer, gain: float = _SQRT2) -> _Layer:
    """Return the layer with orthogonal weights and zero bias."""
    orthogonal_(layer.weight, gain)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


class HeadLinear(nn.Linear):
    """Linear layer of a head, with orthogonal weights and zero bias, computed in at least float32, also under autocast.

    bfloat16 has two to three digits, too few for ratios and temporal differences.
    """

    def __init__(self, in_features: int, out_features: int, gain: float) -> None:
        super().__init__(in_features, out_features)
        orthogonal(self, gain)

    def forward(self, features: Tensor) -> Tensor:
        """Map features `[..., in_features]` to `[..., out_features]`."""
        weight, bias = at_least_float32(self.weight), at_least_float32(self.bias)
        features = features.to(weight.dtype)
        kind = features.device.type
        if not torch.is_autocast_enabled(kind):
            return functional.linear(features, weight, bias)
        with torch.autocast(kind, enabled=False):
            return functional.linear(features, weight, bias)


def embedding_size(num_classes: int) -> int:
    """Return the length of the embedding of one of `num_classes`: round(1.6 · n^0.56), at most 600."""
    return max(1, min(600, round(1.6 * math.pow(num_classes, 0.56))))


class NumericInput(nn.Module):
    """Flattens observations of a `Box` or `MultiBinary` space and divides uint8 values by 255."""

    def __init__(self, space: spaces.Space[Any]) -> None:
        super().__init__()
        shape = space.shape or ()
        self.event_dims = len(shape)
        self.is_uint8 = space.dtype == np.uint8
        self.out_features = int(np.prod(shape))

    def forward(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Map `[..., *shape]` to `[..., out_features]`; integers are cast to `dtype`."""
        if self.event_dims != 1:
            x = x.flatten(-self.event_dims) if self.event_dims else x.unsqueeze(-1)
        x = x if x.is_floating_point() else x.to(dtype)
        return x / 255 if self.is_uint8 else x


class DiscreteInput(nn.Module):
    """Encodes each entry of a `Discrete` or `MultiDiscrete` observation as a one-hot vector or a learned embedding."""

    start: Tensor
    offset: Tensor

    def __init__(self, space: spaces.Discrete | spaces.MultiDiscrete, encoding: DiscreteEncoding) -> None:
        super().__init__()
        self.event_dims = len(space.shape or ())
        counts = np.ravel(space.n if isinstance(space, spaces.Discrete) else space.nvec).tolist()
        start = torch.tensor(np.ravel(space.start).tolist())
        self.register_buffer("start", start, persistent=False)
        self.register_buffer("offset", torch.tensor([0, *np.cumsum(counts)[:-1].tolist()]), persistent=False)
        self.tables: nn.ModuleList | None = None
        self.out_features = sum(counts)
        if encoding == "embedding":
            self.tables = nn.ModuleList(nn.Embedding(n, embedding_size(n)) for n in counts)
            self.out_features = sum(map(embedding_size, counts))

    def forward(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Map `[..., *shape]` to `[..., out_features]`; one-hot vectors have the given `dtype`."""
        x = x.flatten(-self.event_dims) if self.event_dims else x.unsqueeze(-1)
        classes = x.long() - self.start
        if self.tables is not None:
            return torch.cat([table(classes[..., i]) for i, table in enumerate(self.tables)], -1)
        zeros = torch.zeros(*classes.shape[:-1], self.out_features, dtype=dtype, device=x.device)
        return zeros.scatter_(-1, classes + self.offset, 1)


def _make_input(space: spaces.Space[Any], discrete_encoding: DiscreteEncoding) -> nn.Module:
    if isinstance(space, spaces.Box | spaces.MultiBinary):
        return NumericInput(space)
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        return DiscreteInput(space, discrete_encoding)
    raise ConfigurationError(
        f"observation_space={space} is not supported: expected Box, Discrete, MultiDiscrete, MultiBinary, "
        "or a Dict or Tuple of these"
    )


class MLPEncoder(nn.Module):
    """Fully connected layers over the flattened observation; the leaves of a nested observation are concatenated.

    `encoders` are modules with `out_features` by the path of a leaf; their features replace the leaf. Without hidden
    layers the features are the flattened observation. For the other arguments see `make_encoder`.
    """

    def __init__(
        self,
        space: spaces.Space[Any],
        hidden_sizes: Sequence[int] = (64, 64),
        activation: str = "tanh",
        discrete_encoding: DiscreteEncoding = "one_hot",
        encoders: Mapping[str, nn.Module] | None = None,
    ) -> None:
        super().__init__()
        check(is_one_of(activation, ACTIVATIONS), "policy.activation", activation, f"one of {', '.join(ACTIVATIONS)}")
        check(is_list(hidden_sizes), "policy.hidden_sizes", hidden_sizes, "a list of integers of at least 1")
        for size in hidden_sizes:
            check_positive_int("policy.hidden_sizes", size)
        encoders = encoders or {}
        leaves = space_leaves(space).items()
        inputs = {path: _make_input(leaf, discrete_encoding) for path, leaf in leaves if path not in encoders}
        self._input_paths, self._encoder_paths = list(inputs), list(encoders)
        self.inputs = nn.ModuleDict({module_name(path): module for path, module in inputs.items()})
        self.encoders = nn.ModuleDict({module_name(path): module for path, module in encoders.items()})
        # Whether the layers take floating-point observations unchanged.
        self.is_vector = (
            isinstance(space, spaces.Box) and len(space.shape) == 1 and space.dtype != np.uint8 and not encoders
        )
        parts = [*inputs.values(), *encoders.values()]
        sizes = [sum(cast(int, part.out_features) for part in parts), *hidden_sizes]
        self.layers = nn.Sequential()
        for width, next_width in itertools.pairwise(sizes):
            self.layers.append(orthogonal(nn.Linear(width, next_width)))
            self.layers.append(ACTIVATIONS[activation]())
        self.out_features = sizes[-1]

    def forward(self, observations: Nested) -> Tensor:
        """Map observations `[..., *shape]`, nested or not, to features `[..., out_features]`."""
        if self.is_vector and observations.is_floating_point():
            return self.layers(observations)  # type: ignore[no-any-return]
        dtype = cast(Tensor, self.layers[0].weight).dtype if len(self.layers) else torch.get_default_dtype()
        parts = [self.inputs[module_name(path)](part_at(observations, path), dtype) for path in self._input_paths]
        parts += [self.encoders[module_name(path)](part_at(observations, path)) for path in self._encoder_paths]
        return self.layers(parts[0] if len(parts) == 1 else torch.cat(parts, -1))  # type: ignore[no-any-return]

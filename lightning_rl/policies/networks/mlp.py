"""Fully connected layers over everything that is a number, a class or a bit."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from lightning_rl.nested import Nested, module_name, part_at, space_leaves
from lightning_rl.policies.networks.inputs import DiscreteEncoding, make_input
from lightning_rl.policies.networks.layers import orthogonal_linear
from lightning_rl.validation import check, check_positive_int, is_one_of

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
}


class MLPEncoder(nn.Module):
    """Fully connected layers over the flattened observation, the leaves of a nested one side by side.

    uint8 observations are divided by 255; `Discrete` and `MultiDiscrete` ones become one-hot or learned vectors.
    Floating-point ones come in the dtype of the parameters.

    Args:
        space: Any nesting of `Box`, `Discrete`, `MultiDiscrete` and `MultiBinary`.
        hidden_sizes: Width of each layer; the last one is the number of features. Empty: the flattened
            observation itself.
        activation: One of `tanh`, `relu`, `elu`, `gelu`, `silu`, after each layer.
        discrete_encoding: `one_hot`, or `embedding`: as many numbers as `embedding_size` says, which are learned.
        encoders: Modules with `out_features`, by the path of a leaf; the layers take the features of such a leaf in
            place of its numbers.
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
        check(is_one_of(activation, ACTIVATIONS), "activation", activation, f"one of {', '.join(ACTIVATIONS)}")
        for size in hidden_sizes:
            check_positive_int("hidden_sizes", size)
        leaves = {path: leaf for path, leaf in space_leaves(space).items() if path not in (encoders or {})}
        self.inputs = _by_path({path: make_input(leaf, discrete_encoding) for path, leaf in leaves.items()})
        self.encoders = _by_path(encoders or {})
        # Whether the layers take an observation as it is.
        self.is_vector = (
            isinstance(space, spaces.Box) and len(space.shape) == 1 and space.dtype != np.uint8 and not encoders
        )
        # Where to find the part of each of them.
        self._of_inputs, self._of_encoders = list(leaves), list(encoders or {})
        parts = [*self.inputs.values(), *self.encoders.values()]
        sizes = [sum(cast(int, part.out_features) for part in parts), *hidden_sizes]
        self.layers = nn.Sequential()
        for width, next_width in itertools.pairwise(sizes):
            self.layers.append(orthogonal_linear(width, next_width))
            self.layers.append(ACTIVATIONS[activation]())
        self.out_features = sizes[-1]

    def forward(self, observations: Nested) -> Tensor:
        """Map observations `[..., *shape]`, nested or not, to features `[..., out_features]`."""
        if self.is_vector and observations.is_floating_point():  # what the layers take as it is
            return self.layers(observations)  # type: ignore[no-any-return]
        dtype = cast(Tensor, self.layers[0].weight).dtype if len(self.layers) else torch.get_default_dtype()
        pairs = zip(self._of_inputs, self.inputs.values(), strict=True)
        parts = [to_numbers(part_at(observations, path), dtype) for path, to_numbers in pairs]
        for path, encoder in zip(self._of_encoders, self.encoders.values(), strict=True):
            parts.append(encoder(part_at(observations, path)))
        return self.layers(parts[0] if len(parts) == 1 else torch.cat(parts, -1))  # type: ignore[no-any-return]


def _by_path(modules: Mapping[str, nn.Module]) -> nn.ModuleDict:
    return nn.ModuleDict({module_name(path): module for path, module in modules.items()})

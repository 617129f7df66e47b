"""Encoders side by side, for observations of several parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from gymnasium import spaces
from torch import Tensor, nn

from lightning_rl.nested import Nested, module_name, part_at, space_leaves
from lightning_rl.networks.inputs import DiscreteEncoding
from lightning_rl.networks.mlp import MLPEncoder


class NestedEncoder(nn.Module):
    """Some leaves have encoders of their own, one MLP takes all others together; the features are put side by side.

    Args:
        space: `Dict` or `Tuple`.
        encoders: By the path of the leaf; each has `out_features`.
        hidden_sizes: Layers of the MLP.
        activation: Activation of the MLP.
        discrete_encoding: See `MLPEncoder`.
    """

    def __init__(
        self,
        space: spaces.Space[Any],
        encoders: Mapping[str, nn.Module],
        hidden_sizes: Sequence[int] = (64, 64),
        activation: str = "tanh",
        discrete_encoding: DiscreteEncoding = "one_hot",
    ) -> None:
        super().__init__()
        leaves = space_leaves(space)
        rest = [path for path in leaves if path not in encoders]
        self.mlp = MLPEncoder(space, hidden_sizes, activation, discrete_encoding, rest) if rest else None
        self.event_dims = {path: len(leaves[path].shape or ()) for path in encoders}
        self.encoders = nn.ModuleDict({module_name(path): encoder for path, encoder in encoders.items()})
        parts = [*([] if self.mlp is None else [self.mlp]), *self.encoders.values()]
        self.out_features = sum(cast(int, part.out_features) for part in parts)

    def forward(self, observations: Nested) -> Tensor:
        """Map nested observations, leaves `[..., *shape]`, to features `[..., out_features]`."""
        features = [] if self.mlp is None else [self.mlp(observations)]
        for path, encoder in zip(self.event_dims, self.encoders.values(), strict=True):
            features.append(encoder(part_at(observations, path)))
        return torch.cat(features, -1)

"""From one leaf of an observation to a vector of numbers that a layer can take."""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from lightning_rl.validation import ConfigurationError, check, is_one_of

DiscreteEncoding = Literal["one_hot", "embedding"]
"""What becomes of integers that name one of several things."""


def embedding_size(num_classes: int) -> int:
    """Return how many numbers stand for one of `num_classes`: the nearest integer to 1.6 · n^0.56, at most 600."""
    return max(1, min(600, round(1.6 * math.pow(num_classes, 0.56))))


class NumbersInput(nn.Module):
    """The flattened numbers of a `Box` or `MultiBinary`; uint8 ones are divided by 255.

    Args:
        space: One of these.
    """

    def __init__(self, space: spaces.Space[Any]) -> None:
        super().__init__()
        shape = space.shape or ()
        self.event_dims = len(shape)
        self.is_uint8 = space.dtype == np.uint8
        self.out_features = int(np.prod(shape))

    def forward(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Map `[..., *shape]` to `[..., out_features]`, integers in `dtype`."""
        if self.event_dims != 1:
            x = x.flatten(-self.event_dims) if self.event_dims else x.unsqueeze(-1)
        x = x if x.is_floating_point() else x.to(dtype)
        return x / 255 if self.is_uint8 else x


class _ClassesInput(nn.Module):
    """Entries of a `Discrete` or `MultiDiscrete`, each one of a number of classes."""

    # Known from the space, so in no checkpoint.
    start: Tensor
    offset: Tensor

    def __init__(self, space: spaces.Discrete | spaces.MultiDiscrete) -> None:
        super().__init__()
        self.event_dims = len(space.shape or ())
        self.num_classes: list[int] = np.ravel(space.n if isinstance(space, spaces.Discrete) else space.nvec).tolist()
        start = torch.tensor(np.ravel(space.start).tolist())
        self.register_buffer("start", start, persistent=False)
        self.register_buffer("offset", torch.tensor([0, *np.cumsum(self.num_classes)[:-1].tolist()]), persistent=False)

    def _places(self, x: Tensor) -> Tensor:
        """Return which of all classes the entries name, `[..., entries]`."""
        x = x.flatten(-self.event_dims) if self.event_dims else x.unsqueeze(-1)
        return x.long() - (self.start - self.offset)


class OneHotInput(_ClassesInput):
    """A one-hot vector for each entry.

    Args:
        space: `Discrete` or `MultiDiscrete`.
    """

    def __init__(self, space: spaces.Discrete | spaces.MultiDiscrete) -> None:
        super().__init__(space)
        self.out_features = sum(self.num_classes)

    def forward(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Map `[..., *shape]` to `[..., out_features]`."""
        places = self._places(x)
        zeros = torch.zeros(*places.shape[:-1], self.out_features, dtype=dtype, device=x.device)
        return zeros.scatter_(-1, places, 1)


class EmbeddingInput(_ClassesInput):
    """A learned vector for each class of each entry, as long as `embedding_size` says.

    Args:
        space: `Discrete` or `MultiDiscrete`.
    """

    def __init__(self, space: spaces.Discrete | spaces.MultiDiscrete) -> None:
        super().__init__(space)
        self.tables = nn.ModuleList(nn.Embedding(n, embedding_size(n)) for n in self.num_classes)
        self.out_features = sum(embedding_size(n) for n in self.num_classes)

    def forward(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Map `[..., *shape]` to `[..., out_features]`."""
        classes = self._places(x) - self.offset
        return torch.cat([table(classes[..., i]) for i, table in enumerate(self.tables)], -1)


def make_input(space: spaces.Space[Any], discrete_encoding: DiscreteEncoding = "one_hot") -> nn.Module:
    """Return what turns observations of a leaf into vectors of `out_features` numbers.

    Args:
        space: Of the leaf.
        discrete_encoding: Of `Discrete` and `MultiDiscrete` ones.

    Raises:
        ConfigurationError: The space is of another kind, or there is no such encoding.
    """
    choices = get_args(DiscreteEncoding)
    check(is_one_of(discrete_encoding, choices), "discrete_encoding", discrete_encoding, f"one of {', '.join(choices)}")
    if isinstance(space, spaces.Box | spaces.MultiBinary):
        return NumbersInput(space)
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        return OneHotInput(space) if discrete_encoding == "one_hot" else EmbeddingInput(space)
    raise ConfigurationError(
        f"observation_space={space} is not supported: expected Box, Discrete, MultiDiscrete, MultiBinary, "
        "or a Dict or Tuple of these"
    )

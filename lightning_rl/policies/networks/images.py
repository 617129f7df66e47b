"""Convolutional encoders of images."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn import functional

from lightning_rl.policies.networks.mlp import orthogonal, orthogonal_linear
from lightning_rl.spaces import image_layout
from lightning_rl.validation import check

_NATURE_MIN_SIZE = 36  # what the three convolutions need to leave one pixel
# Numbers that convolutions on a CPU take at a time. What they make of more is too large for the memory that is kept for
# reuse: the system hands it out anew, filled with zeros, at every batch, which takes as long as a convolution or two.
_PIXELS_AT_A_TIME = 2**20


def network_for_image(space: spaces.Space[Any]) -> str:
    """Return the network that fits the size of an image: `nature` or `impala`."""
    return "nature" if min(image_layout(space.shape or ())[2:]) >= _NATURE_MIN_SIZE else "impala"


def _is_traced() -> bool:
    """Whether operations are recorded, for batches of other sizes too."""
    return torch.compiler.is_compiling() or bool(torch.jit.is_tracing())  # type: ignore[attr-defined, no-untyped-call]


class _ImageEncoder(nn.Module):
    """Scaling, channel order and batch dimensions, the same for every convolutional encoder."""

    def __init__(self, space: spaces.Space[Any]) -> None:
        super().__init__()
        shape = space.shape or ()
        check(
            len(shape) == 3,
            "observation_space",
            space,
            "an image of three dimensions for a convolutional network",
        )
        self.channels_last, self.channels, self.height, self.width = image_layout(shape)
        self.scale = 1 / 255 if space.dtype == np.uint8 else 1.0

    def _to_pixels(self, observations: Tensor, dtype: torch.dtype) -> Tensor:
        """Return `[N, channels, height, width]` in the network's dtype, laid out channels last for speed."""
        x = observations.flatten(0, -4) if observations.dim() > 4 else observations
        x = x.unsqueeze(0) if x.dim() == 3 else x
        x = x.permute(0, 3, 1, 2) if self.channels_last else x
        if x.is_floating_point() or self.channels_last or not x.is_cpu or _is_traced():
            pixels = x.to(dtype, memory_format=torch.channels_last)
        else:  # the same, channel by channel in half the time
            pixels = torch.empty(x.shape, dtype=dtype, memory_format=torch.channels_last)
            for of_pixels, channel in zip(pixels.unbind(1), x.unbind(1), strict=True):
                of_pixels.copy_(channel)
        # Integers have been copied, and one copy of a batch of images is enough.
        return pixels.mul_(self.scale) if self.scale != 1.0 else pixels

    def _convolve(self, layers: nn.Module, observations: Tensor, dtype: torch.dtype) -> Tensor:
        """Return what convolutional layers make of images, `[N, features]`, on the CPU of some at a time."""
        size = max(1, _PIXELS_AT_A_TIME // (self.channels * self.height * self.width))
        may_split = observations.dim() == 4 and observations.is_cpu and not _is_traced()
        if not may_split or len(observations) <= size:
            return layers(self._to_pixels(observations, dtype))  # type: ignore[no-any-return]
        return torch.cat([layers(self._to_pixels(part, dtype)) for part in torch.split(observations, size)])


class NatureEncoder(_ImageEncoder):
    """Three convolutions and one linear layer (Mnih et al. 2015).

    Args:
        space: An image of at least 36×36 pixels, channels first or last.
        out_features: Width of the linear layer.
    """

    def __init__(self, space: spaces.Space[Any], out_features: int = 512) -> None:
        super().__init__(space)
        check(
            min(self.height, self.width) >= _NATURE_MIN_SIZE,
            "network",
            "nature",
            f"an image of at least {_NATURE_MIN_SIZE}x{_NATURE_MIN_SIZE} pixels, got {self.height}x{self.width}; "
            "use 'impala' or 'mlp'",
        )
        self.convolutions = nn.Sequential(
            orthogonal(nn.Conv2d(self.channels, 32, 8, 4)),
            nn.ReLU(inplace=True),
            orthogonal(nn.Conv2d(32, 64, 4, 2)),
            nn.ReLU(inplace=True),
            orthogonal(nn.Conv2d(64, 64, 3, 1)),
            nn.ReLU(inplace=True),
            nn.Flatten(),
        ).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        with torch.no_grad():
            flat = self.convolutions(torch.zeros(1, self.channels, self.height, self.width)).shape[1]
        self.linear = orthogonal_linear(flat, out_features)
        self.out_features = out_features

    def forward(self, observations: Tensor) -> Tensor:
        """Map images `[..., *shape]` to features `[..., out_features]`."""
        convolved = self._convolve(self.convolutions, observations, self.linear.weight.dtype)
        features = functional.relu(self.linear(convolved))
        return features.reshape(*observations.shape[:-3], self.out_features)


class _ResidualBlock(nn.Module):
    def __init__(self, channels: int, gain: float) -> None:
        super().__init__()
        self.convolution1 = orthogonal(nn.Conv2d(channels, channels, 3, padding=1))
        self.convolution2 = orthogonal(nn.Conv2d(channels, channels, 3, padding=1), gain)

    def forward(self, x: Tensor) -> Tensor:
        y = self.convolution1(functional.relu(x))
        return x + self.convolution2(functional.relu(y))  # type: ignore[no-any-return]


class ImpalaEncoder(_ImageEncoder):
    """The residual network of Espeholt et al. 2018 (figure 3, right, without its LSTM).

    The gain √2 belongs to convolutions that a ReLU follows. Those before a pooling have gain 1, and those that end one
    of n residual blocks 1/√n, or features and first values would be tens of times those of the other networks.

    Args:
        space: An image of any size, channels first or last.
        channels: Channels of each stage; a stage halves the image and has two residual blocks.
        out_features: Width of the linear layer.
    """

    def __init__(
        self, space: spaces.Space[Any], channels: Sequence[int] = (16, 32, 32), out_features: int = 256
    ) -> None:
        super().__init__(space)
        stages = nn.Sequential()
        for width, next_width in itertools.pairwise([self.channels, *channels]):
            stages.append(orthogonal(nn.Conv2d(width, next_width, 3, padding=1), gain=1.0))
            stages.append(nn.MaxPool2d(3, 2, padding=1))
            for _ in range(2):
                stages.append(_ResidualBlock(next_width, gain=(2 * len(channels)) ** -0.5))
        stages.append(nn.ReLU()).append(nn.Flatten())
        self.stages = stages.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        with torch.no_grad():
            flat = self.stages(torch.zeros(1, self.channels, self.height, self.width)).shape[1]
        self.linear = orthogonal_linear(flat, out_features)
        self.out_features = out_features

    def forward(self, observations: Tensor) -> Tensor:
        """Map images `[..., *shape]` to features `[..., out_features]`."""
        features = functional.relu(self.linear(self._convolve(self.stages, observations, self.linear.weight.dtype)))
        return features.reshape(*observations.shape[:-3], self.out_features)

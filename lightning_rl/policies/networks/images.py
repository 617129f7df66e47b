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

from lightning_rl.policies.networks.mlp import orthogonal
from lightning_rl.spaces import image_layout
from lightning_rl.validation import check

_NATURE_MIN_SIZE = 36  # the three convolutions leave one pixel
# Pixels per convolution on a CPU. The activations of more would not fit into the memory that the allocator reuses, and
# getting zeroed pages from the system for every batch takes as long as a convolution or two.
_PIXELS_AT_A_TIME = 2**20


def network_for_image(space: spaces.Space[Any]) -> str:
    """Return the network that fits the size of an image: `nature` or `impala`."""
    return "nature" if min(image_layout(space.shape or ())[2:]) >= _NATURE_MIN_SIZE else "impala"


def _is_traced() -> bool:
    """Whether operations are recorded, for other batch sizes too."""
    return torch.compiler.is_compiling() or bool(torch.jit.is_tracing())  # type: ignore[attr-defined, no-untyped-call]


class _ImageEncoder(nn.Module):
    """Scaling and channel order of the convolutional encoders of images `[N, *shape]`, and their last linear layer."""

    linear: nn.Linear

    def __init__(self, space: spaces.Space[Any], out_features: int) -> None:
        super().__init__()
        shape = space.shape or ()
        name = type(self).__name__.removesuffix("Encoder").lower()
        expected = f"a network for {space}, which is no image of three dimensions; use mlp"
        check(len(shape) == 3, "policy.network", name, expected)
        self.channels_last, self.channels, self.height, self.width = image_layout(shape)
        self.scale = 1 / 255 if space.dtype == np.uint8 else 1.0
        self.out_features = out_features

    def _make_linear(self, layers: nn.Module) -> nn.Linear:
        with torch.no_grad():
            flat = layers(torch.zeros(1, self.channels, self.height, self.width)).shape[1]
        return orthogonal(nn.Linear(flat, self.out_features))

    def _to_features(self, layers: nn.Module, observations: Tensor) -> Tensor:
        dtype = self.linear.weight.dtype
        size = max(1, _PIXELS_AT_A_TIME // (self.channels * self.height * self.width))
        if observations.is_cpu and not _is_traced() and len(observations) > size:
            parts = torch.split(observations, size)
            convolved = torch.cat([layers(self._to_pixels(part, dtype)) for part in parts])
        else:
            convolved = layers(self._to_pixels(observations, dtype))
        return functional.relu(self.linear(convolved))

    def _to_pixels(self, observations: Tensor, dtype: torch.dtype) -> Tensor:
        """Return `[N, channels, height, width]` in the dtype of the network, with channels last in memory for speed."""
        x = observations.permute(0, 3, 1, 2) if self.channels_last else observations
        if x.is_floating_point() or self.channels_last or not x.is_cpu or _is_traced():
            pixels = x.to(dtype, memory_format=torch.channels_last)
        else:  # one channel at a time takes half the time
            pixels = torch.empty(x.shape, dtype=dtype, memory_format=torch.channels_last)
            for target, channel in zip(pixels.unbind(1), x.unbind(1), strict=True):
                target.copy_(channel)
        if self.scale == 1.0:
            return pixels
        # In place if integers have been copied; floating-point pixels may be the caller's.
        return pixels * self.scale if x.is_floating_point() else pixels.mul_(self.scale)


class NatureEncoder(_ImageEncoder):
    """Three convolutions and one linear layer (Mnih et al. 2015), for images of at least 36×36 pixels."""

    def __init__(self, space: spaces.Space[Any], out_features: int = 512) -> None:
        super().__init__(space, out_features)
        size = f"{_NATURE_MIN_SIZE}x{_NATURE_MIN_SIZE}"
        expected = f"an image of at least {size} pixels, got {self.height}x{self.width}; use 'impala' or 'mlp'"
        check(min(self.height, self.width) >= _NATURE_MIN_SIZE, "policy.network", "nature", expected)
        self.convolutions = nn.Sequential(
            orthogonal(nn.Conv2d(self.channels, 32, 8, 4)),
            nn.ReLU(inplace=True),
            orthogonal(nn.Conv2d(32, 64, 4, 2)),
            nn.ReLU(inplace=True),
            orthogonal(nn.Conv2d(64, 64, 3, 1)),
            nn.ReLU(inplace=True),
            nn.Flatten(),
        ).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.linear = self._make_linear(self.convolutions)

    def forward(self, observations: Tensor) -> Tensor:
        return self._to_features(self.convolutions, observations)


class _ResidualBlock(nn.Module):
    def __init__(self, channels: int, gain: float) -> None:
        super().__init__()
        self.convolution1 = orthogonal(nn.Conv2d(channels, channels, 3, padding=1))
        self.convolution2 = orthogonal(nn.Conv2d(channels, channels, 3, padding=1), gain)

    def forward(self, x: Tensor) -> Tensor:
        y = self.convolution1(functional.relu(x))
        return x + self.convolution2(functional.relu(y))  # type: ignore[no-any-return]


class ImpalaEncoder(_ImageEncoder):
    """The residual network of Espeholt et al. 2018 (figure 3, right, without its LSTM), for images of any size.

    Each of `channels` is a stage, which halves the image and has two residual blocks. Convolutions before a ReLU have
    gain √2, convolutions before a pooling 1, and the last convolutions of n residual blocks 1/√n. Otherwise features
    and first values would be tens of times as large as in the other networks.
    """

    def __init__(
        self, space: spaces.Space[Any], channels: Sequence[int] = (16, 32, 32), out_features: int = 256
    ) -> None:
        super().__init__(space, out_features)
        stages = nn.Sequential()
        for width, next_width in itertools.pairwise([self.channels, *channels]):
            stages.append(orthogonal(nn.Conv2d(width, next_width, 3, padding=1), gain=1.0))
            stages.append(nn.MaxPool2d(3, 2, padding=1))
            for _ in range(2):
                stages.append(_ResidualBlock(next_width, gain=(2 * len(channels)) ** -0.5))
        stages.append(nn.ReLU()).append(nn.Flatten())
        self.stages = stages.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.linear = self._make_linear(self.stages)

    def forward(self, observations: Tensor) -> Tensor:
        return self._to_features(self.stages, observations)

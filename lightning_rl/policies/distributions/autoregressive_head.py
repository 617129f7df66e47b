"""From features to choices that know of each other."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor, nn

from lightning_rl.masks import MaskLayout, component_names, has_choices, num_choices
from lightning_rl.nested import Nested, map_leaves, nested_paths, space_leaves
from lightning_rl.policies.distributions.discrete import Autoregressive
from lightning_rl.policies.distributions.heads import IMPOSSIBLE, Initialization, projection
from lightning_rl.policies.networks.layers import HeadLinear
from lightning_rl.validation import ConfigurationError, check, check_positive_int

MAX_COMBINATIONS = 4096
"""Every combination of choices is looked at, which makes sampling, mode, entropy and divergence exact."""


class AutoregressiveHead(nn.Module):
    """Logits of each component from the features and, through one hidden layer, the choices of those before it.

    Args:
        in_features: Number of features.
        space: `MultiDiscrete`, `MultiBinary`, integer `Box`, or `Dict` or `Tuple` of these and `Discrete`.
        hidden_size: Width of the hidden layer of each component but the first.
        order: Names of the components, the first to be chosen first; None: as they are in the space.
        initialization: Of the last layers, see `projection`.
        mask_space: Of the masks, None without any.

    Raises:
        ConfigurationError: There are too many combinations, the order is none of the components, or a mask depends on
            a component that is chosen later.
    """

    strides: Tensor

    def __init__(
        self,
        in_features: int,
        space: spaces.Space[Any],
        *,
        hidden_size: int = 64,
        order: Sequence[str | int] | None = None,
        initialization: Initialization = "orthogonal",
        mask_space: spaces.Space[Any] | None = None,
    ) -> None:
        super().__init__()
        check_positive_int("action_distribution.hidden_size", hidden_size)
        counts_of = _components(space)
        self.names = _ordered(order, list(counts_of))
        self.counts = [counts_of[name] for name in self.names]
        self.layout = None if mask_space is None else MaskLayout(space, mask_space)
        self._given = _check_order(self.names, {} if self.layout is None else self.layout.given)
        self.places = _places(space, self.names)
        strides = [math.prod(self.counts[k + 1 :]) for k in range(len(self.counts))]
        self.register_buffer("strides", torch.tensor(strides), persistent=False)
        earlier = [sum(self.counts[:k]) for k in range(1, len(self.counts))]
        self.first = projection(in_features, self.counts[0], initialization)
        self.hidden = nn.ModuleList(HeadLinear(in_features, hidden_size, gain=math.sqrt(2)) for _ in earlier)
        self.tables = nn.ParameterList(nn.init.normal_(torch.empty(n, hidden_size)) for n in earlier)
        self.logits = nn.ModuleList(projection(hidden_size, n, initialization) for n in self.counts[1:])
        for k in range(1, len(self.counts)):
            choices = torch.tensor(list(itertools.product(*map(range, self.counts[:k]))))
            self.register_buffer(f"_choices_{k}", choices, persistent=False)
            offsets = torch.tensor([sum(self.counts[:j]) for j in range(k)])
            self.register_buffer(f"_rows_{k}", choices + offsets, persistent=False)

    def forward(self, features: Tensor, mask: Nested = None) -> Autoregressive:
        """Map features `[..., f]` to a distribution over what nested masks allow."""
        allowed = {} if mask is None or self.layout is None else self.layout.allowed(mask)
        joint = self.first(features).new_zeros(())
        for k, name in enumerate(self.names):
            # Of each combination of the choices before: [..., combinations, n].
            logits = self._logits(k, features)
            if name in allowed:
                logits = logits.masked_fill(~self._of_combinations(k, allowed[name]), IMPOSSIBLE)
            joint = (joint.unsqueeze(-1) + logits.log_softmax(-1)).flatten(-2)
        return Autoregressive(joint, self.counts, self.names, self.strides, self.places)

    def _logits(self, k: int, features: Tensor) -> Tensor:
        if k == 0:
            return self.first(features).unsqueeze(-2)  # type: ignore[no-any-return]
        earlier = self.tables[k - 1][getattr(self, f"_rows_{k}")].sum(-2)
        hidden = torch.tanh(self.hidden[k - 1](features).unsqueeze(-2) + earlier)
        return self.logits[k - 1](hidden)  # type: ignore[no-any-return]

    def _of_combinations(self, k: int, allowed: Tensor) -> Tensor:
        place = self._given.get(self.names[k])
        if place is None:
            return allowed.unsqueeze(-2)
        return allowed.index_select(-2, getattr(self, f"_choices_{k}")[:, place])


def is_suitable(space: spaces.Space[Any]) -> bool:
    """Whether all of a space is choices, few enough of them together."""
    leaves = space_leaves(space).values()
    if not leaves or not all(map(has_choices, leaves)):
        return False
    return math.prod(n for leaf in leaves for n in num_choices(leaf)) <= MAX_COMBINATIONS


def _components(space: spaces.Space[Any]) -> dict[str, int]:
    return {
        name: n
        for path, leaf in space_leaves(space).items()
        for name, n in zip(component_names(leaf, path), num_choices(leaf), strict=True)
    }


def _ordered(order: Sequence[str | int] | None, names: list[str]) -> list[str]:
    if order is None:
        return names
    given = [str(name) for name in order] if isinstance(order, Sequence) and not isinstance(order, str) else []
    check(sorted(given) == sorted(names), "action_distribution.order", order, f"each of {', '.join(names)} once")
    return given


def _check_order(names: list[str], given: dict[str, str]) -> dict[str, int]:
    """Return the places of components that masks of others depend on."""
    for name, other in given.items():
        if names.index(other) >= names.index(name):
            raise ConfigurationError(
                f"action_distribution.order={names} is not valid: expected {other!r} before {name!r}, whose mask "
                "depends on it"
            )
    return {name: names.index(other) for name, other in given.items()}


def _places(space: spaces.Space[Any], names: list[str]) -> Nested:
    def of_leaf(path: str) -> int | list[int]:
        leaf = space_leaves(space)[path]
        places = [names.index(name) for name in component_names(leaf, path)]
        return places[0] if isinstance(leaf, spaces.Discrete) else places

    return map_leaves(of_leaf, nested_paths(space))

"""Joint distributions of actions with several components, and their heads.

`Joint` has independent parts; with `Autoregressive`, each component depends on the components before it.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any, Self, cast

import torch
from gymnasium import spaces
from torch import Tensor, nn

from lightning_rl.masks import MaskLayout, component_names, has_choices, num_choices
from lightning_rl.nested import Nested, leaves, map_leaves, map_paths, part_at, space_leaves
from lightning_rl.policies.distributions.base import Distribution, Initialization, projection
from lightning_rl.policies.distributions.discrete import IMPOSSIBLE, Categorical
from lightning_rl.policies.networks.mlp import HeadLinear
from lightning_rl.validation import PositiveInt, check

MAX_COMBINATIONS = 4096
"""Limit of the number of combinations, which are all enumerated: sampling, mode, entropy and divergence are exact."""


class Joint(Distribution):
    """Independent distributions, nested as the parts of a `Dict` or `Tuple` space; `paths` in the order of `leaves`."""

    def __init__(self, parts: Nested, paths: list[str]) -> None:
        self.parts = parts
        self.paths = paths

    def sample(self, generator: torch.Generator | None = None) -> Nested:
        return map_leaves(lambda part: part.sample(generator), self.parts)

    def mode(self) -> Nested:
        return map_leaves(lambda part: part.mode(), self.parts)

    def log_prob(self, action: Nested) -> Tensor:
        return self._sum(lambda part, x: part.log_prob(x), action)

    def entropy(self) -> Tensor:
        return self._sum(lambda part: part.entropy())

    def kl(self, other: Self) -> Tensor:
        return self._sum(lambda part, x: part.kl(x), other.parts)

    def parameters(self) -> Nested:
        return map_leaves(lambda part: part.parameters(), self.parts)

    def with_parameters(self, parameters: Nested) -> Joint:
        return Joint(map_leaves(lambda part, x: part.with_parameters(x), self.parts, parameters), self.paths)

    def to_space(self, action: Nested) -> Nested:
        return map_leaves(lambda part, x: part.to_space(x), self.parts, action)

    def entropies(self) -> dict[str, Tensor]:
        """Return the entropies of the parts by path, `arm.0.2` for a component of a part."""
        return {
            ".".join(filter(None, (path, inner))): entropy
            for path, part in zip(self.paths, leaves(self.parts), strict=True)
            for inner, entropy in part.entropies().items()
        }

    def _sum(self, term: Callable[..., Tensor], *others: Nested) -> Tensor:
        total: Tensor = functools.reduce(operator.add, leaves(map_leaves(term, self.parts, *others)))
        return total


class JointHead(nn.Module):
    """A head for every part of a `Dict` or `Tuple` space; `masked` are the paths of the parts with masks."""

    def __init__(self, heads: Nested, paths: list[str], masked: Collection[str] = ()) -> None:
        super().__init__()
        self.paths = paths
        self.masked = frozenset(masked)
        # A list, since the path of a part may be no valid name of a module.
        self.heads = nn.ModuleList(leaves(heads))
        places = iter(range(len(self.heads)))
        self.places = map_leaves(lambda _: next(places), heads)

    def forward(self, features: Tensor, mask: Nested = None) -> Joint:
        def part(place: int) -> Any:
            return self.heads[place](features, *self._own(mask, self.paths[place]))

        return Joint(map_leaves(part, self.places), self.paths)

    def clipped(self, actions: Nested, mask: Nested = None) -> Tensor | None:
        """Return which components of actions the environment clips, of all parts with bounds, as one vector."""
        each = zip(cast(Any, self.heads), self.paths, strict=True)
        heads = [(head, path) for head, path in each if hasattr(head, "clipped")]
        # By path: recorded actions may have the parts of a dict in another order.
        parts = [head.clipped(part_at(actions, path), *self._own(mask, path)) for head, path in heads]
        flags = [part for part in parts if part is not None]
        return torch.cat(flags) if flags else None

    def _own(self, mask: Nested, path: str) -> tuple[Any, ...]:
        return () if mask is None or path not in self.masked else (part_at(mask, path),)


class Autoregressive(Categorical):
    """A joint distribution of the components of an action, as one categorical choice between all combinations.

    Args:
        logits: Log-probability of each combination, `[..., n_1 · … · n_k]`; the last component varies fastest.
        counts: Number of choices of each component.
        names: Names of the components.
        strides: Distance of combinations that differ by one in a component, shape `[k]`.
        places: Index of the component, or list of the indices of the components, of each leaf of an action.
    """

    def __init__(self, logits: Tensor, counts: list[int], names: list[str], strides: Tensor, places: Nested) -> None:
        super().__init__(logits)
        self.counts = counts
        self.names = names
        self.strides = strides
        self.places = places

    def sample(self, generator: torch.Generator | None = None) -> Nested:
        return self._action(super().sample(generator))

    def mode(self) -> Nested:
        """Return the most likely combination, which choosing the mode of each component in turn may miss."""
        return self._action(super().mode())

    def log_prob(self, action: Nested) -> Tensor:
        """Return the log-probability of `action` (integers, nested as the space is)."""

        def term(place: int | list[int], x: Tensor) -> Tensor:
            product = x * self.strides[place]
            return product.sum(-1) if isinstance(place, list) else product

        terms = leaves(map_leaves(term, self.places, action))
        return super().log_prob(torch.stack(terms).sum(0))

    def with_parameters(self, parameters: Tensor) -> Autoregressive:
        return Autoregressive(parameters, self.counts, self.names, self.strides, self.places)

    def entropies(self) -> dict[str, Tensor]:
        """Return the entropy of every component given the components before it, by name."""
        found: dict[str, Tensor] = {}
        joint, size = self.log_probs, 1
        before = joint.new_zeros(())
        for name, count in zip(self.names, self.counts, strict=True):
            size *= count
            up_to = Categorical(joint.reshape(*joint.shape[:-1], size, joint.shape[-1] // size).logsumexp(-1)).entropy()
            found[name], before = up_to - before, up_to
        return found

    def _action(self, combination: Tensor) -> Nested:
        counts = self.strides.new_tensor(self.counts)
        choices = combination.unsqueeze(-1) // self.strides % counts
        return map_leaves(lambda place: choices[..., place], self.places)


class AutoregressiveHead(nn.Module):
    """Logits of each component from the features and, through one hidden layer, the choices of earlier components.

    `hidden_size` is the width of the hidden layer of each component but the first, and `order` has the names of the
    components in the order of the choices. See `is_suitable` for the space.
    """

    strides: Tensor

    def __init__(
        self,
        in_features: int,
        space: spaces.Space[Any],
        *,
        hidden_size: PositiveInt = 64,
        order: Sequence[str | int] | None = None,
        initialization: Initialization = "orthogonal",
        mask_space: spaces.Space[Any] | None = None,
    ) -> None:
        super().__init__()
        counts_of = {
            name: n
            for path, leaf in space_leaves(space).items()
            for name, n in zip(component_names(leaf, path), num_choices(leaf), strict=True)
        }
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
        """Map features `[..., f]` to a distribution over the actions that nested masks allow."""
        allowed = {} if mask is None or self.layout is None else self.layout.allowed(mask)
        joint = torch.zeros((), device=features.device)
        for k, name in enumerate(self.names):
            # One row for each combination of the earlier choices: [..., combinations, n].
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
    """Whether a space consists of choices with at most `MAX_COMBINATIONS` combinations."""
    parts = space_leaves(space).values()
    if not parts or not all(map(has_choices, parts)):
        return False
    return math.prod(n for part in parts for n in num_choices(part)) <= MAX_COMBINATIONS


def _ordered(order: Sequence[str | int] | None, names: list[str]) -> list[str]:
    if order is None:
        return names
    given = [str(name) for name in order] if isinstance(order, Sequence) and not isinstance(order, str) else []
    check(sorted(given) == sorted(names), "policy.action_distribution.order", order, f"each of {', '.join(names)} once")
    return given


def _check_order(names: list[str], given: dict[str, str]) -> dict[str, int]:
    for name, other in given.items():
        expected = f"{other!r} before {name!r}, whose mask depends on it"
        check(names.index(other) < names.index(name), "policy.action_distribution.order", names, expected)
    return {name: names.index(other) for name, other in given.items()}


def _places(space: spaces.Space[Any], names: list[str]) -> Nested:
    def of_leaf(path: str, leaf: spaces.Space[Any]) -> int | list[int]:
        places = [names.index(name) for name in component_names(leaf, path)]
        return places[0] if isinstance(leaf, spaces.Discrete) else places

    return map_paths(of_leaf, space)

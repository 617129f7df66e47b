"""The interface of policies: how they act, and how environments take their actions, as tensors and as arrays."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from lightning_rl.masks import is_continuous
from lightning_rl.nested import (
    Nested,
    first_leaf,
    leaves,
    map_leaves,
    map_paths,
    map_space,
    nested_paths,
    part_at,
    space_leaves,
    without,
)
from lightning_rl.policies.distributions import Distribution
from lightning_rl.policies.recurrent import MemoryOptions, reset_memory
from lightning_rl.rollouts.sequences import Sequences
from lightning_rl.spaces import observation_dtype
from lightning_rl.validation import check


@dataclass
class PolicyOutput:
    """What a policy returns for a batch of observations.

    Attributes:
        action: One action per row, `[B]` or `[B, a]`, nested as the action space is; in the policy's own form, in which
            its log-probability is exact (see `lightning_rl.policies.distributions.Distribution`).
        log_prob: Log-probability of the action, `[B]`. If None, the collector computes it after the rollout.
        value: Value of the observation, `[B]`. If None, the collector computes it after the rollout.
        environment_action: The action in the units of the action space. None means `action`.
        memory: Recurrent state for the next step, `[B, ...]`; None without memory.
    """

    action: Nested
    log_prob: Tensor | None = None
    value: Tensor | None = None
    environment_action: Nested | None = None
    memory: Nested | None = None

    def __post_init__(self) -> None:
        if self.environment_action is None:
            self.environment_action = self.action


class Policy(Protocol):
    """The methods that collecting rollouts needs; `ActorCritic` has them, and a custom policy may be any object.

    Learning also needs an `nn.Module` whose `forward(observations)` returns the action distribution and the values.

    Observations are tensors, or dicts and tuples of tensors for `Dict` and `Tuple` spaces. A policy may declare
    `chooses_rows_alone = True` if each action depends only on its own observation and a fixed amount of noise. Then it
    acts for half of the worker processes while the other half steps.
    """

    def act(
        self, observations: Nested, generator: torch.Generator | None = None, deterministic: bool = False
    ) -> PolicyOutput:
        """Choose an action for every row of `observations`, shape `[B, ...]`."""

    def log_prob(self, observations: Nested, actions: Nested) -> Tensor:
        """Return log-probabilities `[...]` of actions taken at observations `[..., *shape]`."""

    def value(self, observations: Nested) -> Tensor:
        """Return value estimates `[...]` of observations `[..., *shape]`."""


class RecurrentPolicy(Protocol):
    """The methods that collecting and learning need of a policy with memory, such as `ActorCritic` with `memory`."""

    memory: MemoryOptions | None

    def initial_memory(self, batch_size: int, critic: bool = True) -> Nested:
        """Return the recurrent state before an episode, nested zeros `[B, ...]`, with or without the critic's state."""

    def act(
        self,
        observations: Nested,
        generator: torch.Generator | None = None,
        deterministic: bool = False,
        memory: Nested = None,
    ) -> PolicyOutput:
        """Choose an action for every row `[B, ...]`, and return the next recurrent state in the output.

        If `memory` has the critic's state, the output has log-probabilities and values too.
        """

    def value(self, observations: Nested, memory: Nested) -> Tensor:
        """Return value estimates `[B]` of observations `[B, ...]` seen with a recurrent state `[B, ...]`."""

    def __call__(self, observations: Nested, sequences: Sequences) -> tuple[Distribution, Tensor]:
        """Return the action distribution and values `[N]` of the rows `[N, ...]` of sequences."""


def as_recurrent(policy: object) -> RecurrentPolicy | None:
    """Return the policy if it has memory, else None."""
    return cast(RecurrentPolicy, policy) if getattr(policy, "memory", None) is not None else None


def to_environment(space: spaces.Space[Any], action: Nested) -> Nested:
    """Convert actions `[B, ...]`, in the units of one environment's space, to what the environments take.

    Discrete choices are shifted by the space's `start` (for an integer `Box` by its `low`), and continuous actions are
    clipped to the bounds. All parts get the space's shape and dtype.
    """
    # In this order, because it takes longer to find out whether a space is a `Dict`, which has abstract base classes.
    if isinstance(space, spaces.Discrete) or not isinstance(space, spaces.Dict | spaces.Tuple):
        return _leaf_to_environment(space, action)
    return map_leaves(_leaf_to_environment, map_space(lambda leaf: leaf, space), action)


def _leaf_to_environment(leaf: Any, action: Any) -> Any:  # any space; arrays
    if isinstance(leaf, spaces.Discrete):
        return (action + leaf.start if leaf.start else action).astype(leaf.dtype, copy=False)
    shaped = action.reshape(-1, *leaf.shape)
    if is_continuous(leaf):
        return np.clip(shaped, leaf.low, leaf.high).astype(leaf.dtype, copy=False)
    # The cast may wrap around; adding the first choice wraps back.
    return shaped.astype(leaf.dtype, copy=False) + _first_choice(leaf)


def from_environment(space: spaces.Space[Any], action: Nested) -> Nested:
    """Undo `to_environment`: convert actions `[B, ...]` that environments took to the units of the space."""
    return map_leaves(_leaf_from_environment, map_space(lambda leaf: leaf, space), action)


def _leaf_from_environment(leaf: Any, action: Any) -> Any:  # any space; arrays
    rows = np.asarray(action)
    if not (is_continuous(leaf) or isinstance(leaf, spaces.MultiBinary)):
        rows = rows.astype(np.int64) - np.asarray(_first_choice(leaf), np.int64)
    return rows.reshape(-1) if isinstance(leaf, spaces.Discrete) else rows.reshape(len(rows), -1)


def tensor_conversion(space: spaces.Space[Any], device: torch.device) -> Callable[[Nested], Nested]:
    """Return a function that converts tensors, as `to_environment` converts arrays, and moves them to `device`."""

    def conversion(leaf: Any) -> Callable[[Tensor], Tensor]:  # any space
        dtype = torch.from_numpy(np.zeros(0, leaf.dtype)).dtype
        if is_continuous(leaf):
            low, high = (torch.from_numpy(bound).to(device) for bound in (leaf.low, leaf.high))
            return lambda x: x.to(device, dtype).reshape(-1, *leaf.shape).clamp(low, high)
        # int64, since PyTorch does not add unsigned types to it; the cast wraps around.
        start = torch.from_numpy(np.asarray(_first_choice(leaf)).astype(np.int64)).to(device)
        return lambda x: (x.to(device).reshape(-1, *leaf.shape) + start).to(dtype)

    conversions = map_space(conversion, space)
    return lambda action: map_leaves(lambda convert, x: convert(x), conversions, action)


def _first_choice(leaf: Any) -> Any:  # a discrete space; a number or an array
    """Return what environments take for choice 0 of each component."""
    return leaf.low if isinstance(leaf, spaces.Box) else getattr(leaf, "start", 0)


def acting_space(policy: nn.Module, observation_space: spaces.Space[Any]) -> spaces.Space[Any]:
    """Return the observation space without the parts that only the critic sees."""
    return without(observation_space, getattr(policy, "critic_only", None) or ())  # type: ignore[no-any-return]


@torch.no_grad()
def act(
    policy: nn.Module,
    observation_space: spaces.Space[Any],
    action_space: spaces.Space[Any],
    observation: Nested,
    deterministic: bool,
    memory: Nested | None,
    episode_starts: Any,  # flags of one environment or several
) -> Nested:
    """Return the action for one observation `[*shape]`, or actions for several; see `OnPolicyAlgorithm.act`."""
    space, parameter = acting_space(policy, observation_space), next(policy.parameters())
    shapes = {path: tuple(leaf.shape or ()) for path, leaf in space_leaves(space).items()}
    try:
        parts = {path: part_at(observation, path) for path in shapes}
    except (LookupError, TypeError, ValueError):
        nested = isinstance(observation, dict | tuple)
        given = ", ".join(leaves(nested_paths(observation))) if nested else type(observation).__name__
        check(False, "observation: parts", given, f"dicts and tuples with {', '.join(shapes)}")
    for path, part in parts.items():
        try:
            parts[path] = np.asarray(part)
        except (TypeError, ValueError) as error:  # such as a tensor on a GPU, or the pair that `env.reset` returns
            expected = f"an array of numbers on the CPU ({error})"
            check(False, f"observation {path}".rstrip(), type(part), expected)
    found = {path: part.shape for path, part in parts.items()}
    first, shape = next(iter(shapes.items()))
    leading = found[first][: max(0, len(found[first]) - len(shape))]  # the number of rows; () for one observation
    fits = len(leading) <= 1 and all(found[path] == leading + shape for path, shape in shapes.items())
    check(fits, "observation: shapes", found, f"{shapes}, or the same number of rows of each")

    def rows(path: str, leaf: spaces.Space[Any]) -> Tensor:
        given, dtype = parts[path], observation_dtype(leaf, parameter.dtype)
        with np.errstate(invalid="ignore", over="ignore"):
            part = given.astype(dtype)
        # As environments are checked: pixels that were divided by 255 would all become 0.
        wrong = ~np.isfinite(part) if dtype.kind == "f" else part != given
        if wrong.any():
            expected = f"a finite number that {dtype} can hold"
            check(False, f"observation {path}".rstrip(), given[wrong].tolist()[0], expected)
        return torch.from_numpy(part if leading else part[None]).to(parameter.device)

    recurrent = as_recurrent(policy)
    check(recurrent is not None or memory is None, "memory", "given", "None, since the policy has no memory")
    acting = {}
    if recurrent is not None:
        num_rows = math.prod(leading)
        if memory is None:
            memory = recurrent.initial_memory(num_rows, critic=False)
        elif (found_rows := len(first_leaf(memory))) != num_rows:  # minGRU would broadcast one state to all rows
            check(False, "memory: rows", found_rows, f"{num_rows}, as many as observations")
        if episode_starts is not None:
            starts = np.atleast_1d(np.asarray(episode_starts, bool))
            check(len(starts) == num_rows, "episode_starts: rows", len(starts), f"{num_rows}, as many as observations")
            memory = reset_memory(memory, starts)
        acting["memory"] = memory
    output = policy.act(map_paths(rows, space), deterministic=deterministic, **acting)  # type: ignore[operator]
    actions = to_environment(action_space, map_leaves(lambda x: x.cpu().numpy(), output.environment_action))
    if not leading:
        actions = map_leaves(lambda x: x[0], actions)
    return actions if recurrent is None else (actions, output.memory)

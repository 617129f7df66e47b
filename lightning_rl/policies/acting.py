"""Actions for the environments from their observations, both as arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import nn

from lightning_rl.nested import Nested, map_leaves, map_space, part_at, space_leaves, without
from lightning_rl.policies.interface import as_recurrent, to_environment
from lightning_rl.policies.recurrent_state import reset_memory
from lightning_rl.spaces import observation_dtype
from lightning_rl.validation import ConfigurationError, check


def acting_space(policy: nn.Module, observation_space: spaces.Space[Any]) -> spaces.Space[Any]:
    """Return the observation space without the parts that only the critic sees."""
    return without(observation_space, getattr(policy, "critic_only", None) or ())  # type: ignore[no-any-return]


@torch.no_grad()
def act(
    policy: nn.Module,
    observation_space: spaces.Space[Any],
    action_space: spaces.Space[Any],
    observation: Nested,
    *,
    deterministic: bool = True,
    memory: Nested | None = None,
    episode_starts: Any = None,  # noqa: ANN401 - flags of one environment or several
) -> Nested:
    """Return the action for one observation `[*shape]`, or actions for several; see `OnPolicyAlgorithm.act`."""
    space = acting_space(policy, observation_space)
    parts = {path: np.asarray(_part(observation, path)) for path in space_leaves(space)}
    num_rows = _num_rows(space, parts)
    single = num_rows is None
    parameter = next(policy.parameters())
    paths = iter(parts)

    def rows(leaf: spaces.Space[Any]) -> torch.Tensor:
        part = parts[next(paths)].astype(observation_dtype(leaf, parameter.dtype))
        return torch.from_numpy(part[None] if single else part).to(parameter.device)

    recurrent = as_recurrent(policy)
    check(recurrent is not None or memory is None, "memory", "given", "None, since the policy has no memory")
    acting = {}
    if recurrent is not None:
        if memory is None:
            memory = recurrent.initial_memory(1 if num_rows is None else num_rows, critic=False)
        if episode_starts is not None:
            memory = reset_memory(memory, np.atleast_1d(np.asarray(episode_starts, bool)))
        acting["memory"] = memory
    output = policy.act(map_space(rows, space), deterministic=deterministic, **acting)  # type: ignore[operator]
    actions = to_environment(action_space, map_leaves(lambda x: x.cpu().numpy(), output.environment_action))
    if single:
        actions = map_leaves(lambda x: x[0], actions)
    return actions if recurrent is None else (actions, output.memory)


def _part(observation: Nested, path: str) -> Any:  # noqa: ANN401
    try:
        return part_at(observation, path)
    except (KeyError, IndexError, TypeError) as error:
        raise ConfigurationError(f"observation has no {path!r}: expected every part that the policy acts on") from error


def _num_rows(space: spaces.Space[Any], parts: dict[str, Any]) -> int | None:
    """Return the number of rows of an observation; None for a single observation."""
    leading = set()
    for path, leaf in space_leaves(space).items():
        shape, found = tuple(leaf.shape or ()), parts[path].shape
        rows = found[: max(0, len(found) - len(shape))]
        if len(rows) > 1 or rows + shape != found:
            name = f"observation.{path}".rstrip(".")
            raise ConfigurationError(f"{name} has the shape {found}: expected {shape}, or rows of this shape")
        leading.add(rows)
    if len(leading) > 1:
        numbers = ", ".join(sorted(map(str, leading)))
        raise ConfigurationError(f"observation: its parts have different numbers of rows: {numbers}")
    rows = leading.pop()
    return rows[0] if rows else None

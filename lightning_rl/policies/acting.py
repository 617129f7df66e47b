"""From an observation as an environment gives it to an action as it takes one, for a single environment or several."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import nn

from lightning_rl.nested import Nested, leaves, map_leaves, map_space, part_at, space_leaves, without
from lightning_rl.policies.interface import as_recurrent, to_environment
from lightning_rl.policies.recurrent_state import forget
from lightning_rl.spaces import observation_dtype
from lightning_rl.validation import ConfigurationError, check


def acting_space(policy: nn.Module, observation_space: spaces.Space[Any]) -> spaces.Space[Any]:
    """Return the space of what a policy needs to act: without the parts that only its critic sees."""
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
    episode_starts: Any = None,  # noqa: ANN401 - flags, of one environment or several
) -> Nested:
    """Return what environments take for what they give; see `OnPolicyAlgorithm.act`.

    Args:
        policy: Any policy of this package.
        observation_space: Of one environment.
        action_space: Of one environment.
        observation: `[*shape]` or `[B, *shape]`, nested as the space is.
        deterministic: Take the mode rather than a sample, which PyTorch's global generator then draws.
        memory: What came with the last action.
        episode_starts: Where an episode begins, `[]` or `[B]`.

    Raises:
        ConfigurationError: A part of the observation is missing or of another shape, or there is a memory too many.
    """
    space = acting_space(policy, observation_space)
    parts = {path: np.asarray(_part(observation, path)) for path in space_leaves(space)}
    single = _is_single(space, parts)
    parameter = next(policy.parameters())
    paths = iter(parts)

    def rows(leaf: spaces.Space[Any]) -> torch.Tensor:
        part = parts[next(paths)].astype(observation_dtype(leaf, parameter.dtype))
        return torch.from_numpy(part[None] if single else part).to(parameter.device)

    observations = map_space(rows, space)
    recurrent = as_recurrent(policy)
    check(recurrent is not None or memory is None, "memory", "given", "None, since the policy has none")
    acting = {}
    if recurrent is not None:
        num_rows = len(next(leaves(observations)))
        before = recurrent.initial_memory(num_rows, critic=False) if memory is None else memory
        acting["memory"] = (
            before if episode_starts is None else forget(before, np.atleast_1d(np.asarray(episode_starts, bool)))
        )
    output = policy.act(observations, deterministic=deterministic, **acting)  # type: ignore[operator]
    actions = to_environment(action_space, map_leaves(lambda x: x.cpu().numpy(), output.environment_action))
    if single:
        actions = map_leaves(lambda x: x[0], actions)
    return actions if recurrent is None else (actions, output.memory)


def _part(observation: Nested, path: str) -> Any:  # noqa: ANN401
    try:
        return part_at(observation, path)
    except (KeyError, IndexError, TypeError) as error:
        raise ConfigurationError(f"observation has no {path!r}: expected every part that the policy acts on") from error


def _is_single(space: spaces.Space[Any], parts: dict[str, Any]) -> bool:
    """Whether observations are of one environment rather than rows of several."""
    found = set()
    for path, leaf in space_leaves(space).items():
        shape, part = tuple(leaf.shape or ()), parts[path]
        rows = part.shape[: part.ndim - len(shape)] if part.ndim >= len(shape) else None
        fits = rows is not None and len(rows) < 2 and part.shape[len(rows) :] == shape
        name = f"observation.{path}".rstrip(".")
        if not fits:
            raise ConfigurationError(f"{name} has the shape {part.shape}: expected {shape}, or rows of these")
        found.add(rows)
    if len(found) > 1:
        numbers = ", ".join(sorted(map(str, found)))
        raise ConfigurationError(f"observation: its parts are of different numbers of rows: {numbers}")
    return found == {()}

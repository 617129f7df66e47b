"""What is to be known about an exported policy: what goes in, what comes out, where it comes from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_rl.__about__ import __version__
from lightning_rl.export.program import DeployedPolicy, example_inputs
from lightning_rl.nested import Nested, join, leaves, map_leaves
from lightning_rl.policies.acting import acting_space
from lightning_rl.policies.actor_critic import copy_to_cpu
from lightning_rl.spaces import space_to_dict

FORMAT = 2
"""Number of the format of a description. Any change to what is in it takes the next one."""


def names_of(x: Nested, name: str) -> Nested:
    """Return the name of every leaf, nested as `x` is: `observation`, or `observation.arm.0` where there are parts."""
    if isinstance(x, dict):
        return {key: names_of(part, join(name, key)) for key, part in x.items()}
    if isinstance(x, tuple):
        return tuple(names_of(part, join(name, index)) for index, part in enumerate(x))
    return name


def input_names(inputs: tuple[Nested, ...]) -> tuple[Nested, ...]:
    """Return the names of observations, and of a memory if there is one, nested as they are."""
    return tuple(names_of(x, name) for x, name in zip(inputs, ("observation", "memory"), strict=False))


def output_names(output: Nested, has_memory: bool) -> Nested:
    """Return the names of actions, and of the next memory if there is one, nested as they are."""
    if not has_memory:
        return names_of(output, "action")
    return names_of(output[0], "action"), names_of(output[1], "next_memory")


@torch.no_grad()
def describe(
    model: LightningModule, env_id: str | None = None, score: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return what is to be known about an exported policy, as what JSON can hold.

    Args:
        model: An algorithm of this package.
        env_id: What it was trained on, if that is known.
        score: How well it did, if that is known; see `lightning_rl.trained.Score`.
    """
    algorithm: Any = model
    policy = copy_to_cpu(algorithm.policy)
    inputs = example_inputs(policy, algorithm.observation_space)
    observations, *memory = inputs
    output = DeployedPolicy(policy, algorithm.action_space, deterministic=True)(*inputs)
    return {
        "format": FORMAT,
        "version": __version__,
        "torch": str(torch.__version__),
        "algorithm": type(model).__name__,
        "env_id": env_id,
        "env_steps": algorithm.env_steps,
        "score": None if score is None else dict(score),
        "observation_space": _finite(space_to_dict(acting_space(policy, algorithm.observation_space))),
        "action_space": _finite(space_to_dict(algorithm.action_space)),
        "observations": map_leaves(_describe_tensor, observations),
        "memory": map_leaves(_describe_tensor, memory[0]) if memory else None,
        "inputs": _describe_named(input_names(inputs), inputs),
        "outputs": _describe_named(output_names(output, bool(memory)), output),
    }


def _describe_named(names: Nested, tensors: Nested) -> list[dict[str, Any]]:
    """Return name, dtype and shape of one row of every leaf."""
    pairs = zip(leaves(names), leaves(tensors), strict=True)
    return [{"name": name, **_describe_tensor(x)} for name, x in pairs]


def _describe_tensor(x: Tensor) -> dict[str, Any]:
    """Return dtype and shape of one row of a tensor."""
    return {"dtype": str(x.dtype).removeprefix("torch."), "shape": list(x.shape[1:])}


def _finite(x: Any) -> Any:  # noqa: ANN401 - the description of a space
    """Return a description with the words `inf` and `-inf` for these numbers, which JSON has not."""
    if isinstance(x, dict):
        return {key: _finite(part) for key, part in x.items()}
    if isinstance(x, list):
        return [_finite(part) for part in x]
    return str(x) if isinstance(x, float) and not math.isfinite(x) else x

"""Policies as `torch.export` programs, and their descriptions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from gymnasium import spaces
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from lightning_rl.__about__ import __version__
from lightning_rl.nested import Nested, join, leaves, map_leaves
from lightning_rl.policies.actor_critic import copy_to_cpu
from lightning_rl.policies.interface import acting_space, as_recurrent, tensor_conversion
from lightning_rl.spaces import sampled_observations, space_to_dict
from lightning_rl.validation import ConfigurationError

FORMAT = 2
"""Format of the description; every change to its content needs the next number."""


class DeployedPolicy(nn.Module):
    """A policy on the CPU that maps observations to actions for the environment.

    Without `deterministic`, PyTorch's global generator samples the actions.
    """

    def __init__(self, policy: nn.Module, action_space: spaces.Space[Any], deterministic: bool) -> None:
        super().__init__()
        self.policy = policy
        self.deterministic = deterministic
        self._to_environment = tensor_conversion(action_space, torch.device("cpu"))

    def forward(self, observations: Nested, memory: Nested | None = None) -> Nested:
        """Return actions `[B, ...]` for observations `[B, *shape]`; with memory, a pair of actions and the next memory.

        The recurrent state is zeros at the start of an episode, then the state that the last call returned.
        """
        policy: Any = self.policy
        acting = {} if memory is None else {"memory": memory}
        output = policy.act(observations, deterministic=self.deterministic, **acting)
        actions = self._to_environment(output.environment_action)
        return actions if memory is None else (actions, output.memory)


def deploy(policy: nn.Module, action_space: spaces.Space[Any], deterministic: bool) -> DeployedPolicy:
    """Return a `DeployedPolicy` with a copy of a policy on the CPU, without gradients."""
    return DeployedPolicy(copy_to_cpu(policy).eval().requires_grad_(False), action_space, deterministic)


def example_observations(policy: nn.Module, observation_space: spaces.Space[Any], seed: int = 0) -> Nested:
    """Return two rows of sampled observations, with masks that allow all actions."""
    space = acting_space(policy, observation_space)
    return sampled_observations(space, next(policy.parameters()).dtype, num_rows=2, seed=seed)


def example_inputs(policy: nn.Module, observation_space: spaces.Space[Any]) -> tuple[Nested, ...]:
    """Return two rows of inputs for a `DeployedPolicy`: observations and, if the policy is recurrent, its memory."""
    observations = example_observations(policy, observation_space)
    recurrent = as_recurrent(policy)
    return (observations,) if recurrent is None else (observations, recurrent.initial_memory(2, critic=False))


def export_program(
    policy: nn.Module,
    observation_space: spaces.Space[Any],
    action_space: spaces.Space[Any],
    deterministic: bool = True,
) -> ExportedProgram:
    """Return a policy as a `torch.export` program for any number of rows on the CPU.

    `torch.export.save` writes it. `torch.export.load(path).module()` is called like `DeployedPolicy` and only needs
    PyTorch. A policy that PyTorch cannot export raises a `ConfigurationError`.
    """
    deployed = deploy(policy, action_space, deterministic)
    inputs = example_inputs(deployed.policy, observation_space)
    shapes = map_leaves(lambda x: {0: Dim("batch", min=1)}, inputs)
    with torch.no_grad():
        # Distributions make their constants in the first call, which must not be traced.
        DeployedPolicy(deployed.policy, action_space, deterministic=True)(*inputs)
        try:
            return torch.export.export(deployed, inputs, dynamic_shapes=shapes)
        except Exception as error:
            raise ConfigurationError(
                f"policy={type(policy).__name__} cannot be exported: expected one that torch.export can trace; "
                f"{type(error).__name__}: {error}"
            ) from error


def input_names(inputs: tuple[Nested, ...]) -> tuple[Nested, ...]:
    """Return a name for each input: `observation`, or `observation.arm.0` in nested ones, and `memory`."""
    return tuple(_names(x, name) for x, name in zip(inputs, ("observation", "memory"), strict=False))


def output_names(output: Nested, has_memory: bool) -> Nested:
    """Return a name for each output: `action`, or `action.arm.0` in nested ones, and `next_memory`."""
    if not has_memory:
        return _names(output, "action")
    return _names(output[0], "action"), _names(output[1], "next_memory")


def _names(x: Nested, name: str) -> Nested:
    if isinstance(x, dict):
        return {key: _names(part, join(name, key)) for key, part in x.items()}
    if isinstance(x, tuple):
        return tuple(_names(part, join(name, index)) for index, part in enumerate(x))
    return name


@torch.no_grad()
def describe(
    model: LightningModule, env_id: str | None = None, score: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return a description of an exported policy for a JSON file."""
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
        "observations": map_leaves(_describe_row, observations),
        "memory": map_leaves(_describe_row, memory[0]) if memory else None,
        "inputs": _describe_named(input_names(inputs), inputs),
        "outputs": _describe_named(output_names(output, bool(memory)), output),
    }


def _describe_named(names: Nested, tensors: Nested) -> list[dict[str, Any]]:
    pairs = zip(leaves(names), leaves(tensors), strict=True)
    return [{"name": name, **_describe_row(x)} for name, x in pairs]


def _describe_row(x: Tensor) -> dict[str, Any]:
    return {"dtype": str(x.dtype).removeprefix("torch."), "shape": list(x.shape[1:])}


def _finite(x: Any) -> Any:  # noqa: ANN401 - the description of a space
    """Replace infinite numbers by the strings `inf` and `-inf`, since JSON has none."""
    if isinstance(x, dict):
        return {key: _finite(part) for key, part in x.items()}
    if isinstance(x, list):
        return [_finite(part) for part in x]
    return str(x) if isinstance(x, float) and not math.isfinite(x) else x

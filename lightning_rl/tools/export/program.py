"""Policies as `torch.export` programs, and the description beside them."""

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
from lightning_rl.policies.acting import acting_space
from lightning_rl.policies.actor_critic import copy_to_cpu
from lightning_rl.policies.interface import as_recurrent, tensor_conversion
from lightning_rl.spaces import sampled_observations, space_to_dict
from lightning_rl.validation import ConfigurationError

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
        score: How well it did, if that is known; see `lightning_rl.tools.trained.Score`.
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


class DeployedPolicy(nn.Module):
    """A policy as those who only act see it: observations in, actions for the environment out.

    Args:
        policy: Any policy of this package, on the CPU. It is not copied.
        action_space: Of one environment.
        deterministic: Take the mode rather than a sample, which PyTorch's global generator then draws.
    """

    def __init__(self, policy: nn.Module, action_space: spaces.Space[Any], deterministic: bool) -> None:
        super().__init__()
        self.policy = policy
        self.deterministic = deterministic
        self._to_environment = tensor_conversion(action_space, torch.device("cpu"))

    def forward(self, observations: Nested, memory: Nested | None = None) -> Nested:
        """Return actions `[B, ...]` as the environment takes them; with a memory a pair, the next memory second.

        Args:
            observations: `[B, *shape]`, nested as the space is.
            memory: Of a policy that has one: zeros where episodes begin, then what came with the last actions.
        """
        policy: Any = self.policy
        acting = {} if memory is None else {"memory": memory}
        output = policy.act(observations, deterministic=self.deterministic, **acting)
        actions = self._to_environment(output.environment_action)
        return actions if memory is None else (actions, output.memory)


def deploy(policy: nn.Module, action_space: spaces.Space[Any], deterministic: bool) -> DeployedPolicy:
    """Return a copy of a policy, on the CPU and without gradients, as those who only act see it."""
    # Without gradients, or a graph would be made where it acts.
    return DeployedPolicy(copy_to_cpu(policy).eval().requires_grad_(False), action_space, deterministic)


def example_observations(policy: nn.Module, observation_space: spaces.Space[Any], seed: int = 0) -> Nested:
    """Return two rows of observations from the space, with masks that allow everything.

    Args:
        policy: What they are for.
        observation_space: Of one environment.
        seed: Which ones.
    """
    space = acting_space(policy, observation_space)
    return sampled_observations(space, next(policy.parameters()).dtype, num_rows=2, seed=seed)


def example_inputs(policy: nn.Module, observation_space: spaces.Space[Any]) -> tuple[Nested, ...]:
    """Return inputs of a `DeployedPolicy`, two rows of them: observations, and the memory if it has one.

    Args:
        policy: On the CPU.
        observation_space: Of one environment.
    """
    observations = example_observations(policy, observation_space)
    recurrent = as_recurrent(policy)
    return (observations,) if recurrent is None else (observations, recurrent.initial_memory(2, critic=False))


def export_program(
    policy: nn.Module,
    observation_space: spaces.Space[Any],
    action_space: spaces.Space[Any],
    deterministic: bool = True,
) -> ExportedProgram:
    """Return a policy as a program of `torch.export`, for any number of rows on the CPU.

    `torch.export.save` writes it; `torch.export.load(path).module()` is called as `DeployedPolicy` is, and needs
    PyTorch alone.

    Args:
        policy: Stays as and where it is.
        observation_space: Of one environment.
        action_space: Of one environment.
        deterministic: Take the mode rather than a sample.

    Raises:
        ConfigurationError: The policy does what PyTorch cannot export, which is said.
    """
    deployed = deploy(policy, action_space, deterministic)
    inputs = example_inputs(deployed.policy, observation_space)
    shapes = map_leaves(lambda x: {0: Dim("batch", min=1)}, inputs)
    with torch.no_grad():
        # Distributions keep constants that they make when they are first asked: they are not to be made while tracing.
        DeployedPolicy(deployed.policy, action_space, deterministic=True)(*inputs)
        try:
            return torch.export.export(deployed, inputs, dynamic_shapes=shapes)
        except Exception as error:
            raise ConfigurationError(
                f"policy={type(policy).__name__} cannot be exported: expected one that torch.export can trace; "
                f"{type(error).__name__}: {error}"
            ) from error

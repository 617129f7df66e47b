"""A policy as those who only act see it, as a program of `torch.export`."""

from __future__ import annotations

from typing import Any

import torch
from gymnasium import spaces
from torch import nn
from torch.export import Dim, ExportedProgram

from lightning_rl.nested import Nested, map_leaves
from lightning_rl.policies.acting import acting_space
from lightning_rl.policies.actor_critic import copy_to_cpu
from lightning_rl.policies.distributions import tensor_conversion
from lightning_rl.policies.interface import as_recurrent
from lightning_rl.spaces import sampled_observations
from lightning_rl.validation import ConfigurationError


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
        actions = map_leaves(lambda convert, x: convert(x), self._to_environment, output.environment_action)
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

"""A policy as a program that acts without this package: normaliser, memory, masks and bounds of actions included."""

from __future__ import annotations

import copy
import json
import math
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from lightning_rl.__about__ import __version__
from lightning_rl.distributions import tensor_conversion
from lightning_rl.masks import ActionMask
from lightning_rl.nested import Nested, map_leaves, map_space, without
from lightning_rl.policy import copy_to_cpu, observation_dtype
from lightning_rl.policy_interface import as_recurrent
from lightning_rl.spaces import space_to_dict
from lightning_rl.validation import ConfigurationError, check

FORMAT = 1
"""Number of the format of `METADATA`. Any change to what is in it takes the next one."""

METADATA = "policy.json"
"""The file beside the programs that says what they take and give."""

PROGRAMS = {"greedy": "greedy.pt2", "sampled": "sampled.pt2"}
"""The file of each program: with the mode of the policy, and with samples of it."""

FOLDER_PATTERN = "step={}"
"""Name of the folder of an export that is one of several, by environment steps."""


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


def acting_space(policy: nn.Module, observation_space: spaces.Space[Any]) -> spaces.Space[Any]:
    """Return the space of what a policy needs to act: without the parts that only its critic sees."""
    return without(observation_space, getattr(policy, "critic_only", None) or ())  # type: ignore[no-any-return]


def example_inputs(policy: nn.Module, observation_space: spaces.Space[Any]) -> tuple[Nested, ...]:
    """Return inputs of a `DeployedPolicy`, two rows of them: observations, and the memory if it has one.

    Args:
        policy: On the CPU.
        observation_space: Of one environment.
    """
    dtype = next(policy.parameters()).dtype

    def rows(space: spaces.Space[Any]) -> Tensor:
        space = copy.deepcopy(space)  # a space has a generator
        space.seed(0)
        row = np.asarray(space.sample()).astype(observation_dtype(space, dtype))
        return torch.from_numpy(np.stack([np.ones_like(row) if isinstance(space, ActionMask) else row] * 2))

    observations = map_space(rows, acting_space(policy, observation_space))
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
    policy = copy_to_cpu(policy).eval().requires_grad_(False)  # so that no graph is made where it acts
    deployed = DeployedPolicy(policy, action_space, deterministic)
    inputs = example_inputs(policy, observation_space)
    shapes = map_leaves(lambda x: {0: Dim("batch", min=1)}, inputs)
    with torch.no_grad():
        # Distributions keep constants that they make when they are first asked: they are not to be made while tracing.
        DeployedPolicy(policy, action_space, deterministic=True)(*inputs)
        try:
            return torch.export.export(deployed, inputs, dynamic_shapes=shapes)
        except Exception as error:
            raise ConfigurationError(
                f"policy={type(policy).__name__} cannot be exported: expected one that torch.export can trace; "
                f"{type(error).__name__}: {error}"
            ) from error


def describe(model: LightningModule, env_id: str | None = None) -> dict[str, Any]:
    """Return what is to be known about an exported policy, as what JSON can hold.

    Args:
        model: An algorithm of this package.
        env_id: What it was trained on, if that is known.
    """
    algorithm: Any = model
    policy = copy_to_cpu(algorithm.policy)
    observations, *memory = example_inputs(policy, algorithm.observation_space)
    return {
        "format": FORMAT,
        "version": __version__,
        "torch": str(torch.__version__),
        "algorithm": type(model).__name__,
        "env_id": env_id,
        "env_steps": algorithm.env_steps,
        "observation_space": _finite(space_to_dict(acting_space(policy, algorithm.observation_space))),
        "action_space": _finite(space_to_dict(algorithm.action_space)),
        "observations": map_leaves(_describe_tensor, observations),
        "memory": map_leaves(_describe_tensor, memory[0]) if memory else None,
        "programs": dict(PROGRAMS),
    }


def export_policy(model: LightningModule, folder: str | Path, env_id: str | None = None) -> Path:
    """Write a policy into a folder: its programs (`PROGRAMS`) and what describes them (`METADATA`).

    The folder appears as a whole or not at all; an earlier export of that name is replaced.

    Args:
        model: An algorithm of this package.
        folder: Where to; what it is in is made if need be.
        env_id: What it was trained on, for the description.

    Returns:
        The folder.

    Raises:
        ConfigurationError: There is something else of that name, or the policy cannot be exported.
    """
    algorithm: Any = model
    folder = Path(folder)
    replaceable = not folder.exists() or (folder / METADATA).is_file()
    check(replaceable, "folder", str(folder), "a new folder, or one of an earlier export")
    programs = {
        file: export_program(algorithm.policy, algorithm.observation_space, algorithm.action_space, name == "greedy")
        for name, file in PROGRAMS.items()
    }
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=folder.parent) as scratch:
        new = Path(scratch) / "new"
        new.mkdir()
        for file, program in programs.items():
            _save(program, new / file)
        (new / METADATA).write_text(json.dumps(describe(model, env_id), indent=2, allow_nan=False) + "\n")
        if folder.exists():
            os.replace(folder, Path(scratch) / "old")
        os.replace(new, folder)
    return folder


def _save(program: ExportedProgram, path: Path) -> None:
    with warnings.catch_warnings():
        # About constants that are views of one another; they are on the CPU.
        warnings.filterwarnings("ignore", "No complete tensor found in the group")
        torch.export.save(program, path)


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

"""Exports policies as programs that run without this package, checked against the policy."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import logging
import math
import os
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from gymnasium import spaces
from lightning.pytorch import LightningModule
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from lightning_rl import __version__
from lightning_rl.distributed import causes
from lightning_rl.files import unfinished_folder, write_file
from lightning_rl.nested import Nested, first_leaf, leaves, map_leaves, map_paths, nested_paths, part_at
from lightning_rl.policies.actor_critic import copy_to_cpu
from lightning_rl.policies.interface import acting_space, as_recurrent, tensor_conversion
from lightning_rl.spaces import observation_dtype, sampled_observations, space_to_dict
from lightning_rl.validation import ConfigurationError, ExplainedError, check, check_installed

ExportFormat = Literal["torch_export", "onnx"]
"""`torch_export` programs need PyTorch, `onnx` models any ONNX runtime."""
METADATA = "policy.json"
"""File with the description of inputs and outputs, which is also inside each program."""
ProgramName = Literal["greedy", "sampled"]
PROGRAMS: tuple[ProgramName, ...] = get_args(ProgramName)
"""`greedy` takes the mode of the policy, `sampled` samples."""
FOLDER_PATTERN = "step={}"
"""Folder name of one of several exports, with the environment steps."""
TOLERANCE = 1e-5
"""Maximum absolute plus relative difference between a program and the policy."""
_SUFFIXES: dict[ExportFormat, str] = {"torch_export": ".pt2", "onnx": ".onnx"}
_MAX_STEPS = _MAX_ROWS = 8
INPUTS, OUTPUTS = ("observation", "memory"), ("action", "next_memory")
"""Names of inputs and outputs; memory is left out if the policy has none."""
_ONNX_METADATA = "policy"  # key of the description in an ONNX model
FORMAT = 2
"""Format of the description; every change to its content needs the next number."""


class DeployedPolicy(nn.Module):
    """A copy of a policy on the CPU, without gradients, that maps observations to actions for the environment.

    Without `deterministic`, PyTorch's global generator samples the actions.
    """

    def __init__(
        self,
        policy: nn.Module,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        deterministic: bool = True,
    ) -> None:
        super().__init__()
        self.policy = copy_to_cpu(policy).eval().requires_grad_(False)
        self.dtype = next(self.policy.parameters()).dtype
        self.observation_space, self.action_space = acting_space(policy, observation_space), action_space
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

    def initial_memory(self, num_rows: int) -> tuple[Nested, ...]:
        """Return the second input of a recurrent policy at the start of an episode; others have none."""
        recurrent = as_recurrent(self.policy)
        return () if recurrent is None else (recurrent.initial_memory(num_rows, critic=False),)

    def example(self, seed: int = 0) -> tuple[Nested, ...]:
        """Return two rows of inputs: sampled observations, with masks that allow all actions, and the memory."""
        observations = sampled_observations(self.observation_space, self.dtype, num_rows=2, seed=seed)
        return (observations, *self.initial_memory(2))


def export_program(deployed: DeployedPolicy) -> ExportedProgram:
    """Return a policy as a `torch.export` program for any number of rows on the CPU.

    `torch.export.save` writes it. `torch.export.load(path).module()` is called like `DeployedPolicy` and only needs
    PyTorch. A policy that PyTorch cannot export raises a `ConfigurationError`.
    """
    inputs = deployed.example()
    shapes = map_leaves(lambda x: {0: Dim("batch", min=1)}, inputs)
    _seeded(deployed, inputs)  # distributions make their constants in the first call, which must not be traced
    try:
        with torch.no_grad():
            program = torch.export.export(deployed, inputs, dynamic_shapes=shapes)
    except Exception as error:
        raise ConfigurationError(
            f"policy={type(deployed.policy).__name__} cannot be exported: expected one that torch.export can trace; "
            f"{PROGRAMS[not deployed.deterministic]} program: {type(error).__name__}: {error}"
        ) from error
    used = {node.name for node in program.graph.nodes if node.users}
    for spec in program.graph_signature.input_specs:
        x = program.state_dict.get(spec.target)
        if isinstance(x, nn.Parameter) and spec.arg.name not in used:  # of the critic: one number in the file
            program.state_dict[str(spec.target)] = nn.Parameter(x.new_zeros(1).expand(x.shape), requires_grad=False)
    return program


def named_leaves(parts: tuple[Nested, ...], *names: str) -> dict[str, Tensor]:
    """Return each leaf of inputs or outputs by its name: `observation`, or `observation.arm.0` in nested ones."""
    named = dict(zip(names, parts, strict=False))
    return dict(zip(leaves(nested_paths(named)), leaves(named), strict=True))


@torch.no_grad()
def describe(
    model: LightningModule, env_id: str | None = None, score: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return a description of an exported policy for a JSON file."""
    algorithm: Any = model
    deployed = _deployed(algorithm)
    inputs = deployed.example()
    observations, *memory = inputs
    output = deployed(*inputs)
    named_inputs = named_leaves(inputs, *INPUTS)
    named_outputs = named_leaves(output if memory else (output,), *OUTPUTS)
    return {
        "format": FORMAT,
        "version": __version__,
        "torch": str(torch.__version__),
        "algorithm": type(model).__name__,
        "env_id": env_id,
        "env_steps": algorithm.env_steps,
        "score": None if score is None else dict(score),
        "observation_space": _finite(space_to_dict(deployed.observation_space)),
        "action_space": _finite(space_to_dict(deployed.action_space)),
        "observations": map_leaves(_describe_row, observations),
        "memory": map_leaves(_describe_row, memory[0]) if memory else None,
        "inputs": [{"name": name, **_describe_row(x)} for name, x in named_inputs.items()],
        "outputs": [{"name": name, **_describe_row(x)} for name, x in named_outputs.items()],
    }


def _describe_row(x: Tensor) -> dict[str, Any]:
    return {"dtype": str(x.dtype).removeprefix("torch."), "shape": list(x.shape[1:])}


def _finite(x: Any) -> Any:  # the description of a space
    """Replace infinite numbers by the strings `inf` and `-inf`, since JSON has none."""
    return apply_to_collection(x, float, lambda number: number if math.isfinite(number) else str(number))


def save_onnx(
    program: ExportedProgram, deployed: DeployedPolicy, description: str, path: Path
) -> Callable[..., Nested]:
    """Write the program of a policy as an ONNX model; return the model in onnxruntime, to be called like the program.

    An operator without a counterpart in ONNX, or in onnxruntime, raises a `ConfigurationError`.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    # The exporter would warn of packages that are not needed, and print its progress.
    logging.getLogger("torch.onnx._internal.exporter._registration").setLevel(logging.ERROR)
    inputs = deployed.example()
    outputs = _seeded(deployed, inputs)
    input_names = list(named_leaves(inputs, *INPUTS))
    output_names = list(named_leaves(outputs if len(inputs) > 1 else (outputs,), *OUTPUTS))
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            model: Any = torch.onnx.export(
                program,
                dynamo=True,
                optimize=False,  # runtimes optimize the model
                verbose=False,
                input_names=input_names,
                output_names=output_names,
            )
        for value in (*model.model.graph.inputs, *model.model.graph.outputs):
            value.shape[0] = "batch"
        model.model.metadata_props[_ONNX_METADATA] = description
        content = model.model_proto.SerializeToString()
        session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        *_, cause = causes(error)  # names the operator
        raise ConfigurationError(
            f"policy={type(deployed.policy).__name__} cannot be exported to ONNX: expected other actions or networks, "
            f"programs=['greedy'] if only sampling cannot be exported, or format='torch_export'; "
            f"{PROGRAMS[not deployed.deterministic]} program: {type(cause).__name__}: {cause}"
        ) from error
    write_file(path, content)

    def run(*given: Nested) -> Nested:
        feed = {name: x.numpy() for name, x in zip(input_names, leaves(given), strict=True)}
        found = iter(session.run(output_names, feed))
        return map_leaves(lambda _: torch.from_numpy(np.asarray(next(found))), outputs)

    return run


class RoundTripError(ExplainedError, RuntimeError):
    """An exported program does not act like the policy; nothing was written."""


def check_options(format_: str, programs: Sequence[str]) -> None:
    """Raise a `ConfigurationError` for an unknown format or program, or if packages are missing."""
    check(format_ in get_args(ExportFormat), "format", format_, "one of " + ", ".join(get_args(ExportFormat)))
    known = not isinstance(programs, str) and bool(programs) and set(programs) <= set(PROGRAMS)
    check(known, "programs", programs, "a list of " + ", ".join(PROGRAMS))
    if format_ == "onnx":  # torch_export needs PyTorch alone
        check_installed("format='onnx'", "onnx", "onnx", "onnxscript", "onnxruntime")


def check_folder(field: str, folder: str | Path, format_: ExportFormat, programs: Sequence[str]) -> None:
    """Raise a `ConfigurationError` if an export to a folder would delete other files."""
    folder = Path(folder)
    _check_replaceable(field, folder)
    others = {path.name for path in folder.glob("*")} - {METADATA, *_files(format_, programs).values()}
    expected = f"a new folder: an earlier export in it has {', '.join(sorted(others))}, which would be deleted"
    check(not others, field, str(folder), expected)


def _check_replaceable(field: str, folder: Path) -> None:
    replaceable = not folder.exists() or (folder / METADATA).is_file()
    check(replaceable, field, str(folder), "a new folder, or one of an earlier export")


def _files(format_: ExportFormat, programs: Sequence[str]) -> dict[str, str]:
    return {name: name + _SUFFIXES[format_] for name in programs}


def export_policy(
    model: LightningModule,
    folder: str | Path,
    env_id: str | None = None,
    *,
    format: ExportFormat = "torch_export",
    programs: Sequence[str] = PROGRAMS,
    observations: Sequence[Nested] | None = None,
    score: Mapping[str, Any] | None = None,
) -> Path:
    """Write the programs of a policy and their description into a folder, and return the folder.

    Every program is compared with the policy first. The folder then appears complete, and replaces an earlier export
    with all of its programs.

    Args:
        model: An algorithm of this package.
        folder: The folder; its parents are made.
        env_id: Environment, for the description.
        format: `torch_export` or `onnx`.
        programs: `greedy`, `sampled`, or both.
        observations: Observations `[B, *shape]` of consecutive steps, for the comparison; None samples them.
        score: Score of the policy, for the description.

    Raises:
        ConfigurationError: The folder has other files, or the policy cannot be exported.
        RoundTripError: A program does not act like the policy.
    """
    check_options(format, programs)
    folder = Path(folder)
    _check_replaceable("folder", folder)
    files = _files(format, programs)
    about = describe(model, env_id, score) | {"program_format": format, "programs": files}
    text = json.dumps(about, indent=2, allow_nan=False) + "\n"
    with unfinished_folder(folder.parent) as scratch:
        new = Path(scratch) / "new"
        new.mkdir()
        for name, file in files.items():
            deployed = _deployed(model, name)
            program = _save(deployed, format, new / file, text)
            _compare(file, program, deployed, _steps(deployed, observations), format == "torch_export")
        (new / METADATA).write_text(text)
        if folder.exists():
            os.replace(folder, Path(scratch) / "old")
        os.replace(new, folder)
    return folder


def check_exportable(
    model: LightningModule, format_: ExportFormat = "torch_export", programs: Sequence[str] = PROGRAMS
) -> None:
    """Raise a `ConfigurationError` if a policy cannot be exported; its programs are not compared with it."""
    with tempfile.TemporaryDirectory() as scratch:
        for name, file in _files(format_, programs).items():
            _save(_deployed(model, name), format_, Path(scratch) / file, "")


def first_steps(observations: Nested) -> list[Nested]:
    """Return a copy of the part of observations `[T, B, *shape]` that `export_policy` compares programs on."""
    few = map_leaves(lambda x: x[:_MAX_STEPS, :_MAX_ROWS].clone(), observations)
    return [map_leaves(lambda x: x[step], few) for step in range(len(first_leaf(few)))]  # noqa: B023 - called at once


def _deployed(model: Any, program: str = "greedy") -> DeployedPolicy:  # an algorithm
    policy = model.acting_policy()  # with whole parameters
    return DeployedPolicy(policy, model.observation_space, model.action_space, program == "greedy")


def _steps(deployed: DeployedPolicy, observations: Sequence[Nested] | None) -> list[Nested]:
    if observations is None:
        return [deployed.example(seed)[0] for seed in range(_MAX_STEPS)]

    def rows(observation: Nested, path: str, leaf: spaces.Space[Any]) -> Tensor:
        part = part_at(observation, path)
        array = part.cpu().numpy() if isinstance(part, Tensor) else np.asarray(part)
        return torch.from_numpy(array[:_MAX_ROWS].astype(observation_dtype(leaf, deployed.dtype)))

    return [map_paths(functools.partial(rows, x), deployed.observation_space) for x in observations[:_MAX_STEPS]]


def _save(deployed: DeployedPolicy, format_: ExportFormat, path: Path, about: str) -> Callable[..., Nested]:
    if format_ == "onnx" and deployed.dtype not in (torch.float32, torch.float64):
        raise ConfigurationError(f"format='onnx': the policy is in {deployed.dtype}: expected float32 or float64")
    program = export_program(deployed)
    if format_ == "onnx":
        return save_onnx(program, deployed, about, path)
    with warnings.catch_warnings():
        # A warning about constants that are views of each other.
        warnings.filterwarnings("ignore", "No complete tensor found in the group")
        torch.export.save(program, buffer := io.BytesIO(), extra_files={METADATA: about})
    write_file(path, buffer.getbuffer())  # `torch.export.save` would end the process if the disk is full
    return torch.export.load(path).module()


def _compare(
    name: str,
    program: Callable[..., Nested],
    deployed: DeployedPolicy,
    observations: Sequence[Nested],
    same_random_numbers: bool,
) -> None:
    """Raise a `RoundTripError` unless a program acts like the policy on the observations of consecutive steps.

    All rows are compared, and the first one alone. Samples only have to be in the action space, unless a seeded program
    draws the same ones as the policy (`same_random_numbers`).
    """
    for num_rows in {len(first_leaf(observations[0])), 1}:
        memory = deployed.initial_memory(num_rows)
        for step, batch in enumerate(observations):
            inputs = (map_leaves(lambda x: x[:num_rows], batch), *memory)  # noqa: B023 - called at once
            found, expected = _seeded(program, inputs), _seeded(deployed, inputs)
            where = f"{name}, step {step} of {len(observations)}, {num_rows} rows"
            if not (deployed.deterministic or same_random_numbers):
                _check_samples(where, found[0] if memory else found, deployed.action_space)
                found, expected = (found[1:], expected[1:]) if memory else ((), ())
            memory = expected[-1:] if memory else ()
            try:
                torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE)
            except AssertionError as error:
                raise RoundTripError(f"{where}: the program differs from the policy: {error}") from error


@torch.no_grad()
def _seeded(program: Callable[..., Nested], inputs: tuple[Nested, ...]) -> Nested:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return program(*inputs)


def _check_samples(where: str, actions: Nested, action_space: spaces.Space[Any]) -> None:
    for row in range(len(first_leaf(actions))):
        action = map_leaves(lambda x: x[row].numpy()[()], actions)  # noqa: B023 - called at once
        if not action_space.contains(action):
            raise RoundTripError(f"{where}: the action {action} is not in {action_space}")

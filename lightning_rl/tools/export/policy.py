"""The folder of an export: programs that act as the policy does, and what describes them."""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from gymnasium import spaces
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_rl.nested import Nested, leaves, map_leaves, map_space, part_at, space_leaves
from lightning_rl.policies.acting import acting_space
from lightning_rl.spaces import observation_dtype
from lightning_rl.tools.export import onnx
from lightning_rl.tools.export.program import (
    DeployedPolicy,
    deploy,
    describe,
    example_inputs,
    example_observations,
    export_program,
)
from lightning_rl.tools.export.round_trip import Program, check_round_trip
from lightning_rl.validation import check, check_can_make

ExportFormat = Literal["torch_export", "onnx"]
"""`torch_export` needs PyTorch to act, `onnx` any runtime of ONNX."""
METADATA = "policy.json"
"""The file beside the programs that says what they take and give; each of them has it in itself too."""
ProgramName = Literal["greedy", "sampled"]
PROGRAMS: tuple[ProgramName, ...] = get_args(ProgramName)
"""The programs: with the mode of the policy, and with samples of it."""
FOLDER_PATTERN = "step={}"
"""Name of the folder of an export that is one of several, by environment steps."""
_SUFFIXES: dict[ExportFormat, str] = {"torch_export": ".pt2", "onnx": ".onnx"}
_MOST_STEPS = _MOST_ROWS = 8


def check_options(format_: str, programs: Sequence[str]) -> None:
    """Raise unless these are a format and programs, and what writes the format is there.

    Raises:
        ConfigurationError: They are not.
    """
    check(format_ in get_args(ExportFormat), "format", format_, "one of " + ", ".join(get_args(ExportFormat)))
    known = not isinstance(programs, str) and bool(programs) and set(programs) <= set(PROGRAMS)
    check(known, "programs", programs, "a list of " + ", ".join(PROGRAMS))
    if format_ == "onnx":
        onnx.check_packages()


def check_folder(field: str, folder: str | Path, format_: ExportFormat, programs: Sequence[str]) -> None:
    """Raise unless an export can go to a folder, and deletes no program of an earlier one that it does not replace.

    Raises:
        ConfigurationError: The folder cannot be made, is something else, or has other programs.
    """
    folder = Path(folder)
    _check_replaceable(field, folder)
    others = {path.name for path in folder.glob("*")} - {METADATA, *_files(format_, programs).values()}
    expected = f"a new folder: an earlier export in it has {', '.join(sorted(others))}, which would be deleted"
    check(not others, field, str(folder), expected)
    check_can_make(field, folder)


def _check_replaceable(field: str, folder: Path) -> None:
    replaceable = not folder.exists() or (folder / METADATA).is_file()
    check(replaceable, field, str(folder), "a new folder, or one of an earlier export")


def _files(format_: ExportFormat, programs: Sequence[str]) -> dict[str, str]:
    """Return the file of each program."""
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
    """Write a policy into a folder: its programs, and what describes them (`METADATA`).

    Each program is run beside the policy before the folder appears, which it does as a whole or not at all; an earlier
    export of that name is replaced, whatever its programs are (`check_folder` refuses to lose any).

    Args:
        model: An algorithm of this package.
        folder: Where to; what it is in is made if need be.
        env_id: What it was trained on, for the description.
        format: `torch_export`, or `onnx`.
        programs: Which of `greedy` and `sampled`.
        observations: What programs are held to the policy on: of a few consecutive steps, each `[B, *shape]`; None
            draws from the space.
        score: How well the policy did, for the description.

    Returns:
        The folder.

    Raises:
        ConfigurationError: There is something else of that name, or the policy cannot be exported.
        RoundTripError: A program does not act as the policy does.
    """
    check_options(format, programs)
    algorithm: Any = model
    folder = Path(folder)
    _check_replaceable("folder", folder)
    files = _files(format, programs)
    about = describe(model, env_id, score) | {"program_format": format, "programs": files}
    text = json.dumps(about, indent=2, allow_nan=False) + "\n"
    steps = _steps(algorithm.policy, algorithm.observation_space, observations)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=folder.parent) as scratch:
        new = Path(scratch) / "new"
        new.mkdir()
        for name, file in files.items():
            _write(algorithm, name == "greedy", format, new / file, text, steps)
        (new / METADATA).write_text(text)
        if folder.exists():
            os.replace(folder, Path(scratch) / "old")
        os.replace(new, folder)
    return folder


def check_exportable(
    model: LightningModule, format_: ExportFormat = "torch_export", programs: Sequence[str] = PROGRAMS
) -> None:
    """Raise unless a policy can be exported; what its programs compute is not looked at.

    Raises:
        ConfigurationError: The policy does what cannot be exported, which is said.
    """
    with tempfile.TemporaryDirectory() as scratch:
        for name in programs:
            _save(model, name == "greedy", format_, Path(scratch) / (name + _SUFFIXES[format_]), "")


def first_steps(observations: Nested) -> list[Nested]:
    """Return a copy of what `export_policy` looks at of observations `[T, B, *shape]`."""
    few = map_leaves(lambda x: x[:_MOST_STEPS, :_MOST_ROWS].clone(), observations)
    return [map_leaves(lambda x: x[step], few) for step in range(len(next(leaves(few))))]  # noqa: B023 - called at once


def _write(model: Any, greedy: bool, format_: ExportFormat, path: Path, about: str, steps: list[Nested]) -> None:  # noqa: ANN401
    """Write one program, read it back, and run it beside the policy."""
    read, deployed = _save(model, greedy, format_, path, about)
    check_round_trip(path.name, read, deployed, steps, model.action_space, format_ == "torch_export")


def _save(
    model: Any,  # noqa: ANN401
    greedy: bool,
    format_: ExportFormat,
    path: Path,
    about: str,
) -> tuple[Program, DeployedPolicy]:
    """Write one program, and return it as it is read back, and the policy that it is of."""
    deployed = deploy(model.policy, model.action_space, greedy)
    program = export_program(model.policy, model.observation_space, model.action_space, greedy)
    if format_ == "onnx":
        example = example_inputs(deployed.policy, model.observation_space)
        onnx.save_onnx(program, deployed, example, about, path)
        return onnx.load_onnx(path, deployed, example), deployed
    with warnings.catch_warnings():
        # About constants that are views of one another; they are on the CPU.
        warnings.filterwarnings("ignore", "No complete tensor found in the group")
        torch.export.save(program, path, extra_files={METADATA: about})
    return torch.export.load(path).module(), deployed


def _steps(
    policy: nn.Module, observation_space: spaces.Space[Any], observations: Sequence[Nested] | None
) -> list[Nested]:
    """Return observations of some steps as the policy takes them, without what only its critic sees."""
    if observations is None:
        return [example_observations(policy, observation_space, seed) for seed in range(_MOST_STEPS)]
    dtype = next(policy.parameters()).dtype
    space = acting_space(policy, observation_space)

    def step(observation: Nested) -> Nested:
        paths = iter(space_leaves(space))

        def rows(leaf: spaces.Space[Any]) -> Tensor:
            part = part_at(observation, next(paths))
            array = part.cpu().numpy() if isinstance(part, Tensor) else np.asarray(part)
            return torch.from_numpy(array[:_MOST_ROWS].astype(observation_dtype(leaf, dtype)))

        return map_space(rows, space)

    return [step(observation) for observation in observations[:_MOST_STEPS]]

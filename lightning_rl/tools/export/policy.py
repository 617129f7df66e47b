"""Writes a policy into a folder as programs that are checked against the policy."""

from __future__ import annotations

import json
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
from torch import Tensor, nn

from lightning_rl.nested import Nested, first_leaf, leaves, map_leaves, nested_paths, part_at
from lightning_rl.policies.interface import acting_space, as_recurrent
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
from lightning_rl.validation import ExplainedError, check, check_can_make

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
"""Maximum difference between a program and the policy: absolute up to 1, relative above."""
_SUFFIXES: dict[ExportFormat, str] = {"torch_export": ".pt2", "onnx": ".onnx"}
_MAX_STEPS = _MAX_ROWS = 8


class RoundTripError(ExplainedError, RuntimeError):
    """An exported program does not act like the policy; nothing was written."""


def check_options(format_: str, programs: Sequence[str]) -> None:
    """Raise a `ConfigurationError` for an unknown format or program, or if packages are missing."""
    check(format_ in get_args(ExportFormat), "format", format_, "one of " + ", ".join(get_args(ExportFormat)))
    known = not isinstance(programs, str) and bool(programs) and set(programs) <= set(PROGRAMS)
    check(known, "programs", programs, "a list of " + ", ".join(PROGRAMS))
    if format_ == "onnx":
        onnx.check_packages()


def check_folder(field: str, folder: str | Path, format_: ExportFormat, programs: Sequence[str]) -> None:
    """Raise a `ConfigurationError` if a folder is not writable, or an export to it would delete other programs."""
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
        observations: Observations of some consecutive steps, each `[B, *shape]`, for the comparison; None samples them
            from the space.
        score: Score of the policy, for the description.

    Raises:
        ConfigurationError: The folder has other files, or the policy cannot be exported.
        RoundTripError: A program does not act like the policy.
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
            program, deployed = _save(algorithm, name == "greedy", format, new / file, text)
            _compare(file, program, deployed, steps, algorithm.action_space, format == "torch_export")
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
            _save(model, name == "greedy", format_, Path(scratch) / file, "")


def first_steps(observations: Nested) -> list[Nested]:
    """Return a copy of the part of observations `[T, B, *shape]` that `export_policy` compares programs on."""
    few = map_leaves(lambda x: x[:_MAX_STEPS, :_MAX_ROWS].clone(), observations)
    return [map_leaves(lambda x: x[step], few) for step in range(len(first_leaf(few)))]  # noqa: B023 - called at once


def _steps(
    policy: nn.Module, observation_space: spaces.Space[Any], observations: Sequence[Nested] | None
) -> list[Nested]:
    if observations is None:
        return [example_observations(policy, observation_space, seed) for seed in range(_MAX_STEPS)]
    dtype, space = next(policy.parameters()).dtype, acting_space(policy, observation_space)

    def rows(observation: Nested, path: str) -> Tensor:
        part = part_at(observation, path)
        array = part.cpu().numpy() if isinstance(part, Tensor) else np.asarray(part)
        return torch.from_numpy(array[:_MAX_ROWS].astype(observation_dtype(part_at(space, path), dtype)))

    paths = nested_paths(space)
    return [map_leaves(lambda path: rows(x, path), paths) for x in observations[:_MAX_STEPS]]  # noqa: B023 - at once


def _save(
    model: Any,  # noqa: ANN401 - an algorithm
    greedy: bool,
    format_: ExportFormat,
    path: Path,
    about: str,
) -> tuple[Callable[..., Nested], DeployedPolicy]:
    deployed = deploy(model.policy, model.action_space, greedy)
    program = export_program(model.policy, model.observation_space, model.action_space, greedy)
    if format_ == "onnx":
        example = example_inputs(deployed.policy, model.observation_space)
        return onnx.save_onnx(program, deployed, example, about, path), deployed
    with warnings.catch_warnings():
        # A warning about constants that are views of each other.
        warnings.filterwarnings("ignore", "No complete tensor found in the group")
        torch.export.save(program, path, extra_files={METADATA: about})
    return torch.export.load(path).module(), deployed


@torch.no_grad()
def _compare(
    name: str,
    program: Callable[..., Nested],
    deployed: DeployedPolicy,
    observations: Sequence[Nested],
    action_space: spaces.Space[Any],
    same_random_numbers: bool,
) -> None:
    """Raise a `RoundTripError` unless a program acts like the policy on the observations of consecutive steps.

    All rows are compared, and the first one alone. Samples only have to be in the action space, unless a seeded program
    draws the same ones as the policy (`same_random_numbers`).
    """
    recurrent = as_recurrent(deployed.policy)
    for num_rows in {len(first_leaf(observations[0])), 1}:
        memory = () if recurrent is None else (recurrent.initial_memory(num_rows, critic=False),)
        for step, batch in enumerate(observations):
            inputs = (map_leaves(lambda x: x[:num_rows], batch), *memory)  # noqa: B023 - called at once
            found, expected = _seeded(program, inputs), _seeded(deployed, inputs)
            where = f"{name}, step {step} of {len(observations)}, {num_rows} rows"
            actions = (found, expected) if recurrent is None else (found[0], expected[0])
            if deployed.deterministic or same_random_numbers:
                _compare_values(where, "action", *actions)
            else:
                _check_samples(where, *actions, action_space)
            if recurrent is not None:
                _compare_values(where, "memory", found[1], expected[1])
                memory = (expected[1],)


def _seeded(program: Callable[..., Nested], inputs: tuple[Nested, ...]) -> Nested:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return program(*inputs)


def _compare_values(where: str, what: str, found: Nested, expected: Nested) -> None:
    for index, (x, y) in enumerate(zip(leaves(found), leaves(expected), strict=True)):
        _compare_form(f"{where}: {what} {index}", x, y)
        difference = (x.double() - y.double()).abs() / y.double().abs().clamp(min=1)
        if not bool((difference <= TOLERANCE).all()):
            raise RoundTripError(
                f"{where}: {what} {index} differs from the policy by {difference.max().item():.3g}: expected at most "
                f"{TOLERANCE:g}"
            )


def _compare_form(what: str, found: Tensor, expected: Tensor) -> None:
    forms = [(x.dtype, tuple(x.shape)) for x in (found, expected)]
    if forms[0] != forms[1]:
        raise RoundTripError(f"{what} is {forms[0]}: expected {forms[1]}")


def _check_samples(where: str, found: Nested, expected: Nested, action_space: spaces.Space[Any]) -> None:
    for index, (x, y) in enumerate(zip(leaves(found), leaves(expected), strict=True)):
        _compare_form(f"{where}: action {index}", x, y)
    for row in range(len(first_leaf(found))):
        action = map_leaves(lambda x: x[row].numpy()[()], found)  # noqa: B023 - called at once
        if not action_space.contains(action):
            raise RoundTripError(f"{where}: the action {action} is not in {action_space}")

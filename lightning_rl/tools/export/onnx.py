"""Policies as ONNX models."""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.export import ExportedProgram

from lightning_rl.nested import Nested, leaves, map_leaves
from lightning_rl.tools.export.program import DeployedPolicy, input_names, output_names
from lightning_rl.validation import ConfigurationError, how_to_install

METADATA_KEY = "policy"
"""Key of the description in the model's metadata."""
_MISSING_OPERATOR = re.compile(r"No ONNX function found for <OpOverload\(op='([\w.]+)'")


def check_packages() -> None:
    """Raise a `ConfigurationError` if a package for writing or running ONNX models is missing."""
    for name in ("onnx", "onnxscript", "onnxruntime"):
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ConfigurationError(
                f"format='onnx' needs the package {name}, while format='torch_export' needs PyTorch alone: "
                f"{how_to_install('onnx')}"
            ) from error


def save_onnx(
    program: ExportedProgram, deployed: DeployedPolicy, example: tuple[Nested, ...], description: str, path: Path
) -> Callable[..., Nested]:
    """Write the program of a policy as an ONNX model; return the model in onnxruntime, to be called like `deployed`.

    An operator without a counterpart in ONNX, or in onnxruntime, raises a `ConfigurationError`.
    """
    policy = deployed.policy
    dtype = next(policy.parameters()).dtype
    if dtype not in (torch.float32, torch.float64):
        raise ConfigurationError(f"format='onnx': the policy is in {dtype}: expected float32 or float64")
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        output = deployed(*example)
    inputs, outputs = input_names(example), output_names(output, len(example) > 1)
    feed_names, names = list(leaves(inputs)), list(leaves(outputs))
    try:
        with _quietly():
            model: Any = torch.onnx.export(
                program,
                dynamo=True,
                optimize=False,  # runtimes optimize the model
                verbose=False,
                input_names=feed_names,
                output_names=names,
            )
    except Exception as error:
        raise _cannot_export(program, policy, error) from error
    for value in (*model.model.graph.inputs, *model.model.graph.outputs):
        value.shape[0] = "batch"
    model.model.metadata_props[METADATA_KEY] = description
    model.save(str(path), external_data=False)
    session = _session(path, policy)

    def run(*given: Nested) -> Nested:
        feed = {name: x.numpy() for name, x in zip(feed_names, leaves(given), strict=True)}
        found = dict(zip(names, session.run(names, feed), strict=True))
        return map_leaves(lambda name: torch.from_numpy(np.asarray(found[name])), outputs)

    return run


def _session(path: Path, policy: nn.Module) -> Any:  # noqa: ANN401 - has no types
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise ConfigurationError(
            f"policy={type(policy).__name__} cannot be exported: onnxruntime rejects the model; "
            f"{type(error).__name__}: {error}"
        ) from error


def _cannot_export(program: ExportedProgram, policy: nn.Module, error: Exception) -> ConfigurationError:
    """Return an error that names the operator without a counterpart and the module that calls it."""
    name = type(policy).__name__
    missing = _MISSING_OPERATOR.search(str(error))
    if missing is None:
        return ConfigurationError(f"policy={name} cannot be exported to ONNX: {type(error).__name__}: {error}")
    operator = missing[1]
    stem = operator.rpartition(".")[2]  # the exporter may have decomposed it
    place = next((_place(node, policy) for node in program.graph.nodes if stem in str(node.target)), "")
    return ConfigurationError(
        f"policy={name} cannot be exported to ONNX, which has no counterpart of {operator}{place}: expected other "
        "actions or networks, programs=['greedy'] if only sampling uses it, or format='torch_export'"
    )


def _place(node: Any, policy: nn.Module) -> str:  # noqa: ANN401 - of a graph
    """Return the module that calls an operator, or the action heads if the policy itself calls it."""
    *_, (path, kind) = (node.meta.get("nn_module_stack") or {"": ("", "")}).values()
    if path:
        return f" (in {path}, {kind})"
    head: Any = getattr(policy, "action_head", policy)
    kinds = [type(module).__name__ for module in head.modules()]
    return f" (in the actions of {', '.join(name for name in dict.fromkeys(kinds) if name.endswith('Head'))})"


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Suppress the exporter's progress, and its messages about packages that are not needed."""
    logger = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)

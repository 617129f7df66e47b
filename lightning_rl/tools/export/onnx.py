"""A policy as an ONNX model, which runtimes without PyTorch act with."""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import re
import warnings
from collections.abc import Iterator
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
"""Under which a model carries its description."""
_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
_MISSING_OPERATOR = re.compile(r"No ONNX function found for <OpOverload\(op='([\w.]+)'")


def check_packages() -> None:
    """Raise unless everything is installed that writes ONNX and looks whether it is right.

    Raises:
        ConfigurationError: A package is missing.
    """
    for name in _PACKAGES:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ConfigurationError(
                f"format='onnx' needs the package {name}, while format='torch_export' needs PyTorch alone: "
                f"{how_to_install('onnx')}"
            ) from error


def save_onnx(
    program: ExportedProgram, deployed: DeployedPolicy, example: tuple[Nested, ...], description: str, path: Path
) -> None:
    """Write a program as an ONNX model with named inputs and outputs, any number of rows, and its description.

    Args:
        program: Made from `deployed`.
        deployed: The policy.
        example: Inputs of it.
        description: What `METADATA_KEY` leads to in the model's metadata.
        path: The file.

    Raises:
        ConfigurationError: The policy does what ONNX has no operator for; names it, and where it is done.
    """
    dtype = next(deployed.policy.parameters()).dtype
    if dtype not in (torch.float32, torch.float64):
        raise ConfigurationError(f"format='onnx': the policy is in {dtype}: expected float32 or float64")
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        output = deployed(*example)
    ins, outs = input_names(example), output_names(output, len(example) > 1)
    try:
        with _quietly():
            model: Any = torch.onnx.export(
                program,
                dynamo=True,
                optimize=False,  # what runs it optimises it
                verbose=False,
                input_names=list(leaves(ins)),
                output_names=list(leaves(outs)),
            )
    except Exception as error:
        raise _refused(program, deployed.policy, error) from error
    for value in (*model.model.graph.inputs, *model.model.graph.outputs):
        value.shape[0] = "batch"
    model.model.metadata_props[METADATA_KEY] = description
    model.save(str(path), external_data=False)


class OnnxProgram:
    """A model in onnxruntime that is called as a `DeployedPolicy` is.

    Args:
        path: The file.
        policy: Of this policy.
        example: Inputs of it.
        output: What it gives for them.
    """

    def __init__(self, path: Path, policy: nn.Module, example: tuple[Nested, ...], output: Nested) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # errors
        try:
            self.session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except Exception as error:
            raise ConfigurationError(
                f"policy={type(policy).__name__} cannot be exported: onnxruntime refuses the model; "
                f"{type(error).__name__}: {error}"
            ) from error
        self._inputs = input_names(example)
        self._outputs = output_names(output, len(example) > 1)

    def __call__(self, *inputs: Nested) -> Nested:
        """Return what the model gives, nested as the policy does."""
        feed = {n: x.numpy() for n, x in zip(leaves(self._inputs), leaves(inputs), strict=True)}
        names = list(leaves(self._outputs))
        found = dict(zip(names, self.session.run(names, feed), strict=True))
        return map_leaves(lambda name: torch.from_numpy(np.asarray(found[name])), self._outputs)


def load_onnx(path: Path, deployed: DeployedPolicy, example: tuple[Nested, ...]) -> OnnxProgram:
    """Return a model as it is used, to look whether it is right."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        return OnnxProgram(path, deployed.policy, example, deployed(*example))


def _refused(program: ExportedProgram, policy: nn.Module, error: Exception) -> ConfigurationError:
    name = type(policy).__name__
    missing = _MISSING_OPERATOR.search(str(error))
    if missing is None:
        return ConfigurationError(f"policy={name} cannot be exported to ONNX: {type(error).__name__}: {error}")
    operator = missing[1]
    stem = operator.rpartition(".")[2]  # the exporter may have taken it apart
    places = (_place(node, policy) for node in program.graph.nodes if stem in str(node.target))
    place = next(places, "")
    return ConfigurationError(
        f"policy={name} cannot be exported to ONNX, which has no counterpart of {operator}{place}: expected other "
        "actions or networks, programs=['greedy'] where only samples need it, or format='torch_export'"
    )


def _place(node: Any, policy: nn.Module) -> str:  # noqa: ANN401 - of a graph
    """Return the module that an operator is called in; where that is the policy, what its actions are drawn by."""
    *_, (path, kind) = (node.meta.get("nn_module_stack") or {"": ("", "")}).values()
    if path:
        return f" (in {path}, {kind})"
    head: Any = getattr(policy, "action_head", policy)
    kinds = [type(module).__name__ for module in head.modules()]
    return f" (in the actions of {', '.join(name for name in dict.fromkeys(kinds) if name.endswith('Head'))})"


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Leave out what the exporter says about packages that are not needed, and its progress."""
    logger = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)

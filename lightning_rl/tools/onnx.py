"""Policies as ONNX models."""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.export import ExportedProgram

from lightning_rl.distributed import causes
from lightning_rl.nested import Nested, leaves, map_leaves
from lightning_rl.validation import ConfigurationError, how_to_install

METADATA_KEY = "policy"
"""Key of the description in the model's metadata."""


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
    program: ExportedProgram, policy: nn.Module, inputs: Nested, outputs: Nested, description: str, path: Path
) -> Callable[..., Nested]:
    """Write the program of a policy as an ONNX model; return the model in onnxruntime, to be called like the program.

    `inputs` and `outputs` are names, nested as the tensors. An operator without a counterpart in ONNX, or in
    onnxruntime, raises a `ConfigurationError`.
    """
    dtype = next(policy.parameters()).dtype
    if dtype not in (torch.float32, torch.float64):
        raise ConfigurationError(f"format='onnx': the policy is in {dtype}: expected float32 or float64")
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
        for value in (*model.model.graph.inputs, *model.model.graph.outputs):
            value.shape[0] = "batch"
        model.model.metadata_props[METADATA_KEY] = description
        model.save(str(path), external_data=False)
        session = _session(path)
    except Exception as error:
        *_, cause = causes(error)  # names the operator
        raise ConfigurationError(
            f"policy={type(policy).__name__} cannot be exported to ONNX: expected other actions or networks, "
            f"programs=['greedy'] if only sampling cannot be exported, or format='torch_export'; "
            f"{type(cause).__name__}: {cause}"
        ) from error

    def run(*given: Nested) -> Nested:
        feed = {name: x.numpy() for name, x in zip(feed_names, leaves(given), strict=True)}
        found = dict(zip(names, session.run(names, feed), strict=True))
        return map_leaves(lambda name: torch.from_numpy(np.asarray(found[name])), outputs)

    return run


def _session(path: Path) -> Any:  # noqa: ANN401 - has no types
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


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

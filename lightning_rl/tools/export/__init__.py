"""A policy as a program that acts without this package: normaliser, memory, masks and bounds of actions included."""

from __future__ import annotations

from lightning_rl.tools.export.policy import (
    FOLDER_PATTERN,
    METADATA,
    PROGRAMS,
    ExportFormat,
    ProgramName,
    export_policy,
)
from lightning_rl.tools.export.program import FORMAT, DeployedPolicy, describe, example_inputs, export_program
from lightning_rl.tools.export.round_trip import TOLERANCE, RoundTripError

__all__ = [
    "FOLDER_PATTERN",
    "FORMAT",
    "METADATA",
    "PROGRAMS",
    "TOLERANCE",
    "DeployedPolicy",
    "ExportFormat",
    "ProgramName",
    "RoundTripError",
    "describe",
    "example_inputs",
    "export_policy",
    "export_program",
]

"""Exports policies as programs that run without this package."""

from __future__ import annotations

from lightning_rl.tools.export.policy import (
    FOLDER_PATTERN,
    METADATA,
    PROGRAMS,
    TOLERANCE,
    ExportFormat,
    ProgramName,
    RoundTripError,
    export_policy,
)
from lightning_rl.tools.export.program import export_program

__all__ = [
    "FOLDER_PATTERN",
    "METADATA",
    "PROGRAMS",
    "TOLERANCE",
    "ExportFormat",
    "ProgramName",
    "RoundTripError",
    "export_policy",
    "export_program",
]

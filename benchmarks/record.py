"""Provenance of a result: source, versions and hardware, without names of hosts, users or folders."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import lightning_rl

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
# All inputs of a run.
_SOURCES = ("lightning_rl", "configs", ":(glob)benchmarks/*.py", ":(glob)benchmarks/*.json", "benchmarks/peers")
_PACKAGES = ("torch", "lightning", "gymnasium", "numpy")
_PACKAGES_IF_PRESENT = ("mujoco", "Box2D", "ale-py", "envpool", "minigrid", "MinAtar", "popgym", "mpe2", "pettingzoo")


def source() -> dict[str, Any]:
    """Return the commit, whether the working tree differs from it, and a digest of the package."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "lightning_rl").rglob("*.py")):
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    changes = _git("status", "--porcelain", "--", *_SOURCES)
    return {
        "commit": _git("rev-parse", "HEAD"),
        "dirty": None if changes is None else bool(changes),
        "package_sha256": digest.hexdigest(),
    }


def _git(*args: str) -> str | None:
    """Return the output of git; None without git or outside a repository."""
    try:
        done = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that can change a score."""
    found = {"python": platform.python_version(), "lightning_rl": lightning_rl.__version__}
    found |= {name: version(name) for name in _PACKAGES}
    for name in _PACKAGES_IF_PRESENT:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def hardware() -> dict[str, Any]:
    """Return processor, memory, accelerator and the number of PyTorch's threads."""
    accelerator = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "logical_cpus": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "accelerator": accelerator,
        "torch_threads": torch.get_num_threads(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def add_saving(parser: argparse.ArgumentParser) -> None:
    """Add `--save`, alone or with a folder in place of `benchmarks/results`."""
    parser.add_argument(
        "--save",
        nargs="?",
        type=Path,
        const=RESULTS,
        metavar="FOLDER",
        help="write the result",
    )


def save(result: dict[str, Any], folder: Path | None, name: str, imported: dict[str, Any] | None = None) -> None:
    """Write a result with its provenance as `name` into a folder; do nothing if the folder is None.

    `imported` is the source before a measurement that takes so long that files may change meanwhile.
    """
    if folder is not None:
        provenance = {"source": imported or source(), "versions": versions(), "hardware": hardware()}
        write_json(folder / name, result | provenance)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write JSON with one line per entry, and per row of a table, so that differences are readable."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_format(content) + "\n")


def _format(value: Any, depth: int = 1) -> str:  # JSON
    pad = "  " * depth
    if isinstance(value, dict) and value and (depth < 3 or len(json.dumps(value)) > 100):
        rows = [f"{pad}{json.dumps(key)}: {_format(item, depth + 1)}" for key, item in value.items()]
        return "{\n" + ",\n".join(rows) + "\n" + pad[2:] + "}"
    if isinstance(value, list) and value and isinstance(value[0], list | dict):
        return "[\n" + ",\n".join(f"{pad}{json.dumps(item)}" for item in value) + "\n" + pad[2:] + "]"
    return json.dumps(value)

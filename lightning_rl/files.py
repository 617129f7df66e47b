"""Files: read without trust, by checksums and plain data, and written whole or not at all."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import torch
import yaml
from lightning.fabric.utilities.cloud_io import get_filesystem

from lightning_rl.validation import ConfigurationError, ExplainedError

_CHUNK = 1 << 18  # bytes; larger ones are not faster
# PyTorch treats an entry with this attribute as a folder, and leaves the memory of its tensor uninitialized.
_FOLDER = 0x10
# Must not look like a checkpoint: Lightning looks for numbers in names.
_PREFIX, _SUFFIX = ".unfinished-", ".tmp"
# Seconds that a program which reads a file on Windows, such as an evaluation, may delay its replacement or removal.
_PATIENCE = 30.0
# Age in seconds of a folder that a killed process left. By age, since the process may run on another machine.
_ABANDONED = 3600.0


class DamagedFileError(ConfigurationError):
    """A file is truncated, does not match its checksums, or is not a checkpoint."""


class WriteFailure(ExplainedError):
    """A file could not be written; an earlier file of the same name is unchanged."""


def check_intact(path: object, field: str = "ckpt_path", expected: str = "an intact checkpoint") -> None:
    """Compare every entry of a file from `torch.save` with its checksum, at 0.3 s per GiB in the page cache.

    URLs, open files, folders and missing files are not checked. `field` and `expected` are for the `DamagedFileError`.
    """
    if not isinstance(path, str | Path) or not Path(path).is_file():
        return
    named = f"{field}={str(path)!r}"
    try:
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():  # not by name: damage can make names equal
                _check_entry(archive, entry)
        with contextlib.suppress(pickle.UnpicklingError):  # intact, but not plain data
            # Checks sizes, for example, which zipfile does not; tensors stay on disk.
            torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError as error:
        raise DamagedFileError(f"{named} cannot be read ({error.strerror or error}): expected {expected}") from error
    except Exception as error:  # of zipfile, a decompressor or PyTorch
        reason = str(error).partition(". ")[0] or type(error).__name__
        raise DamagedFileError(f"{named} is damaged or another kind of file ({reason}): expected {expected}") from error


def _check_entry(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> None:
    """Read an entry to its end, where `zipfile` compares the checksum."""
    if entry.external_attr & _FOLDER:
        raise zipfile.BadZipFile(f"Bad header of file {entry.filename!r}")
    with archive.open(entry) as content:
        while content.read(_CHUNK):
            pass


def load_plain(path: str | Path, field: str, expected: str, mapped: bool = False) -> dict[str, Any]:
    """Read a file of tensors and plain values without unpickling.

    `mapped` maps tensors from disk and skips checksums: faster if only a few values are needed. A file that is missing,
    damaged or has other content than `expected` raises a `ConfigurationError`.
    """
    named = f"{field}={str(path)!r}"
    if not Path(path).is_file():
        problem = "is a folder" if Path(path).is_dir() else "does not exist"
        raise ConfigurationError(f"{named} {problem}: expected {expected}")
    if not mapped:
        check_intact(path, field, expected)
    try:
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:
        raise ConfigurationError(f"{named} cannot be read ({type(error).__name__}): expected {expected}") from error
    return content


def save_file(content: dict[str, Any], path: str | Path) -> None:
    """Write tensors and plain values by `torch.save`, whole or not at all; a `WriteFailure` names the file."""
    # In memory first: the errors of torch.save hide why a file cannot be written.
    torch.save(content, buffer := io.BytesIO())
    buffer.seek(0)
    if found := torch.serialization.get_unsafe_globals_in_checkpoint(buffer):
        problem = f"{str(path)!r} contains {', '.join(sorted(found))}, so this package cannot load it as data"
        warnings.warn(f"{problem}: expected tensors, numbers, strings, lists and dicts", stacklevel=2)
    write_file(path, buffer.getbuffer())


def write_file(path: str | Path, content: bytes | memoryview) -> None:
    """Write a file whole or not at all, under a temporary name first; a `WriteFailure` names it."""
    try:
        _write(Path(path), content)
    except OSError as error:
        raise WriteFailure(f"{str(path)!r} could not be written: {error.strerror or error}") from error


def _write(path: Path, content: bytes | memoryview) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_unfinished(path.parent)
    unfinished = path.parent / f"{_PREFIX}{os.getpid()}{_SUFFIX}"
    try:
        with unfinished.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        when_closed(os.replace, unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    if os.name == "posix":  # so that the new name survives a power failure; Windows cannot open folders
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def when_closed(change: Callable[..., object], *paths: str | Path) -> None:
    """Rename or remove a file; on Windows, which refuses this for open files, wait until other programs close it."""
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            change(*paths)
            return
        except PermissionError:
            if os.name != "nt" or time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def unfinished_folder(parent: Path) -> tempfile.TemporaryDirectory[str]:
    """Make a temporary folder for a `with` statement; first remove old folders that killed processes left there."""
    parent.mkdir(parents=True, exist_ok=True)
    for path in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # another process removes it too
            if path.is_dir() and time.time() - path.stat().st_mtime > _ABANDONED:
                shutil.rmtree(path)
    return tempfile.TemporaryDirectory(prefix=_PREFIX, dir=parent)


def _remove_unfinished(folder: Path) -> None:
    for path in folder.glob(f"{_PREFIX}[0-9]*{_SUFFIX}"):
        if not _is_running(int(path.stem.removeprefix(_PREFIX))):
            path.unlink(missing_ok=True)


def _is_running(pid: int) -> bool:
    if os.name != "posix":  # os.kill would end the process
        return True
    try:
        os.kill(pid, 0)
    except OSError as error:  # PermissionError: the process belongs to another user
        return not isinstance(error, ProcessLookupError)
    return True


def read_data(
    source: str | Path | IO[bytes],
    map_location: Any = None,  # as torch.load has it
    weights_only: bool | None = None,
    field: str = "ckpt_path",
) -> dict[str, Any]:
    """Read a checkpoint from an intact file or URL; nothing is unpickled unless `weights_only` is False."""
    check_intact(source, field)
    # Lightning 2.5 unpickles all checkpoints by default, later versions those from URLs.
    options: dict[str, Any] = {"map_location": map_location, "weights_only": weights_only is not False}
    if not isinstance(source, str | Path):
        return torch.load(source, **options)  # type: ignore[no-any-return]
    with get_filesystem(source).open(str(source), "rb") as file:
        return torch.load(file, **options)  # type: ignore[no-any-return]


class YamlLoader(yaml.SafeLoader):  # type: ignore[misc]
    """Refuses a key that occurs twice, of which PyYAML uses the last value; reads values as the command line does."""

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        keys = set()
        for key, _ in node.value:
            if (key.tag, str(key.value)) in keys:
                raise yaml.MarkedYAMLError(problem=f"the key {key.value!r} occurs twice", problem_mark=key.start_mark)
            keys.add((key.tag, str(key.value)))
        return node


# PyYAML reads these numbers and None as text, and dates as objects.
_EXPONENT = re.compile(r"[-+]?\d[\d_]*\.?\d*[eE][-+]?\d+$")
YamlLoader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+0123456789"))
YamlLoader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile("None$"), ["N"])
YamlLoader.add_constructor("tag:yaml.org,2002:timestamp", YamlLoader.construct_yaml_str)


def read_yaml(path: str | Path, field: str) -> Any:  # YAML
    """Return the plain values in a YAML file; other content, or a key twice, raises a `ConfigurationError`."""
    try:
        return yaml.load(Path(path).read_text(encoding="utf-8"), YamlLoader)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        why = " ".join(str(error).split()) or type(error).__name__
        raise ConfigurationError(f"{field}={str(path)!r} cannot be read: expected plain YAML: {why}") from error


def relative(path: str | Path) -> str:
    """Return a path as it can be typed in a shell, relative to the current folder if that contains it."""
    path = Path(path).absolute()
    return typed([str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)])


def print_line(text: str) -> None:
    """Print a line at once. A run continues without output if the reader of its output, such as `tee`, has ended."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python fails at exit otherwise
    except OSError:  # the disk is full
        pass


def typed(arguments: Sequence[str]) -> str:
    """Return arguments as they can be typed in a shell; `cmd` of Windows knows no single quotes."""
    return subprocess.list2cmdline(arguments) if os.name == "nt" else shlex.join(arguments)

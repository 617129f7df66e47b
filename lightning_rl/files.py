"""Reads files that others may have written: checksums, plain data, YAML."""

from __future__ import annotations

import contextlib
import pickle
import zipfile
from pathlib import Path
from typing import IO, Any

import torch
import yaml
from lightning.fabric.utilities.cloud_io import get_filesystem

from lightning_rl.validation import ConfigurationError

_CHUNK = 1 << 18  # bytes; larger ones are not faster
# PyTorch takes an entry with this attribute for a folder, and leaves the memory of its tensor uninitialized.
_FOLDER = 0x10


class DamagedFileError(ConfigurationError):
    """A file is truncated, its content does not match its checksums, or it is no checkpoint at all."""


def check_intact(path: object, field: str, expected: str) -> None:
    """Compare every entry of a file that `torch.save` wrote with its checksum.

    Only files on this machine are checked: URLs, open files and folders are left to Lightning, and so is the error for
    a file that does not exist. The whole file is read once more, which takes 0.3 s for each GiB in the page cache.

    Args:
        path: The file.
        field: The option that named it, for errors.
        expected: What the file should be, for errors.

    Raises:
        DamagedFileError: The file is damaged, or is not an archive.
    """
    if not isinstance(path, str | Path) or not Path(path).is_file():
        return
    named = f"{field}={str(path)!r}"
    try:
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():  # not names, which damage can make equal
                _check_entry(archive, entry)
        with contextlib.suppress(pickle.UnpicklingError):  # intact, but more than plain data
            # Checks what zipfile does not, such as sizes, and leaves tensors on the disk.
            torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError as error:
        raise DamagedFileError(f"{named} cannot be read ({error.strerror or error}): expected {expected}") from error
    except Exception as error:  # whatever zipfile, a decompressor or PyTorch meets
        reason = str(error).partition(". ")[0] or type(error).__name__
        raise DamagedFileError(f"{named} is damaged or another kind of file ({reason}): expected {expected}") from error


def _check_entry(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> None:
    """Read an entry to its end, where `zipfile` compares its checksum."""
    if entry.external_attr & _FOLDER:
        raise zipfile.BadZipFile(f"Bad header of file {entry.filename!r}")
    with archive.open(entry) as content:
        while content.read(_CHUNK):
            pass


def load_plain(path: str | Path, field: str, expected: str, mapped: bool = False) -> dict[str, Any]:
    """Read a file of tensors and plain values; nothing in it is executed.

    Raises:
        ConfigurationError: There is no such file, or it is damaged or holds something else.
    """
    named = f"{field}={str(path)!r}"
    if not Path(path).is_file():
        raise ConfigurationError(f"{named} does not exist: expected {expected}")
    if not mapped:
        check_intact(path, field, expected)
    try:
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:
        raise ConfigurationError(f"{named} cannot be read ({type(error).__name__}): expected {expected}") from error
    return content


def read_data(
    source: str | Path | IO[bytes],
    map_location: Any = None,  # noqa: ANN401 - as torch.load has it
    weights_only: bool | None = None,
) -> dict[str, Any]:
    """Read a checkpoint, a file or at a URL; unless `weights_only` is False, nothing in it is unpickled."""
    # Lightning unpickles by default: up to 2.5 every checkpoint, later those at URLs.
    options: dict[str, Any] = {"map_location": map_location, "weights_only": weights_only is not False}
    if not isinstance(source, str | Path):
        return torch.load(source, **options)  # type: ignore[no-any-return]
    with get_filesystem(source).open(str(source), "rb") as file:
        return torch.load(file, **options)  # type: ignore[no-any-return]


# A configuration of a run has about 200.
_MOST_ENTRIES = 100_000


def read_yaml(path: str | Path, field: str) -> Any:  # noqa: ANN401 - YAML
    """Return the content of a YAML file: lists and dicts of plain values.

    Args:
        path: The file.
        field: The option that named it, for errors.

    Raises:
        ConfigurationError: The file cannot be read or is no YAML, names Python objects, or aliases make it huge.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        entries = _entries(yaml.compose(text, yaml.SafeLoader), {})
        content = yaml.safe_load(text) if entries <= _MOST_ENTRIES else None
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        why = " ".join(str(error).split()) or type(error).__name__
        raise ConfigurationError(f"{field}={str(path)!r} cannot be read: expected plain YAML: {why}") from error
    if entries > _MOST_ENTRIES:
        raise ConfigurationError(
            f"{field}={str(path)!r} has more than {_MOST_ENTRIES} entries once its aliases are followed: expected the "
            "configuration of a run"
        )
    return content


def _entries(node: yaml.Node | None, known: dict[int, int]) -> int:
    """Return how many entries a document has with each alias followed, which takes no longer than reading it.

    Args:
        node: The document, or a part of it.
        known: The counts of parts that were met before.
    """
    if not isinstance(node, yaml.CollectionNode):
        return 1
    if id(node) not in known:
        known[id(node)] = _MOST_ENTRIES + 1  # an alias of itself has no end
        pairs = isinstance(node, yaml.MappingNode)
        parts = [part for pair in node.value for part in pair] if pairs else node.value
        known[id(node)] = 1 + sum(_entries(part, known) for part in parts)
    return known[id(node)]

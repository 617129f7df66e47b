"""Checksums of checkpoints: a damaged file is refused before any of it is used.

`torch.save` writes a zip archive with a CRC-32 of each entry; `torch.load` does not compare them.
"""

from __future__ import annotations

import contextlib
import pickle
import zipfile
from pathlib import Path

import torch

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

"""Damaged checkpoints are rejected by all readers, unless the damage changes nothing."""

from __future__ import annotations

import random
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO

from lightning_rl import PPO, FailedUpdate, RolloutDataModule
from lightning_rl.checkpointing.format import read_checkpoint
from lightning_rl.files import DamagedFileError, check_intact, typed
from lightning_rl.tools.hub import make_hub_folder
from lightning_rl.tools.trained import Score, load_algorithm, load_data
from lightning_rl.validation import ConfigurationError
from tests.helpers import flip_a_bit, make_data, make_model, make_trainer


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("run") / "trained.ckpt"
    data = make_data()
    trainer = make_trainer()
    trainer.fit(make_model(data), data)
    trainer.save_checkpoint(path)
    return path


@pytest.fixture
def damaged(trained, tmp_path) -> Path:
    """Return a checkpoint with a flipped bit in a tensor, which PyTorch loads without an error."""
    path = tmp_path / "damaged.ckpt"
    path.write_bytes(trained.read_bytes())
    flip_a_bit(path, "data/11")
    assert not same(*(torch.load(x, weights_only=True) for x in (trained, path)))
    return path


def same(one: Any, other: Any) -> bool:
    """Whether two nested structures are equal, types and every bit included."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor):
        alike = one.dtype == other.dtype and one.shape == other.shape and one.stride() == other.stride()
        return alike and one.numpy().tobytes() == other.numpy().tobytes()
    return repr(one) == repr(other)


def damages(content: bytes) -> Iterator[bytes]:
    """Flip 200 random bits, and overwrite 200 random blocks of 4 KiB by zeros, one at a time."""
    generator = random.Random(0)
    for _ in range(200):
        flipped = bytearray(content)
        flipped[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
        yield bytes(flipped)
    for _ in range(200):
        begin = generator.randrange(len(content))
        length = min(4096, len(content) - begin)
        yield content[:begin] + bytes(length) + content[begin + length :]


def is_refused(path: Path, expected: dict[str, Any]) -> bool:
    """Return whether a checkpoint is rejected by name; if not, compare its content."""
    try:
        loaded = read_checkpoint(path)
    except DamagedFileError as error:
        assert str(error).startswith(f"ckpt_path='{path}' ")
        return True
    assert same(loaded, expected)
    return False


def test_random_damage_is_rejected_or_harmless(trained, tmp_path):
    path, expected = tmp_path / "damaged.ckpt", read_checkpoint(trained)
    refused = []
    for content in damages(trained.read_bytes()):
        path.write_bytes(content)
        refused.append(is_refused(path, expected))
    assert sum(refused[:200]) > 160  # the other bits are padding
    assert sum(refused[200:]) > 180  # a block at the very end may have been zeros


# Offset of each field in a directory entry, and how many of its lowest bits must be checked.
FIELDS = {"flags": (8, 1), "method": (10, 8), "checksum": (16, 8), "size in the archive": (20, 8), "size": (24, 8)}
FIELDS |= {"length of the name": (28, 8), "place": (42, 8), "name": (46, 8)}


@pytest.mark.parametrize("field", FIELDS)
def test_damaged_tensor_header_is_rejected(field, trained, tmp_path):
    path, expected = tmp_path / "damaged.ckpt", read_checkpoint(trained)
    offset, bits = FIELDS[field]
    content = trained.read_bytes()
    begin = content.rindex(b"archive/data/11") - 46
    for bit in range(bits):
        changed = bytearray(content)
        changed[begin + offset] ^= 1 << bit
        path.write_bytes(changed)
        assert is_refused(path, expected), bit


def test_tensor_marked_as_folder_is_rejected(trained, tmp_path):
    """PyTorch skips the entry, and leaves the tensor's memory uninitialized."""
    content = bytearray(trained.read_bytes())
    content[content.rindex(b"archive/data/11") - 46 + 38] ^= 0x10
    path = tmp_path / "damaged.ckpt"
    path.write_bytes(content)
    torch.load(path, weights_only=True)  # raises nothing
    with pytest.raises(DamagedFileError, match="Bad header of file 'archive/data/11'"):
        read_checkpoint(path)


@pytest.mark.parametrize("share", [0, 0.3, 0.9, 0.999])
def test_truncated_file_is_rejected_by_name(share, trained, tmp_path):
    path, content = tmp_path / "half.ckpt", trained.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(
        DamagedFileError, match=f"init_from='{path}' is damaged or another kind of file .*: expected an"
    ):
        check_intact(path, "init_from", "an intact checkpoint")


def test_unreadable_file_is_reported_with_reason(trained, monkeypatch):
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(zipfile, "ZipFile", refuse)  # instead of permissions, since root may read any file
    with pytest.raises(
        DamagedFileError, match=r"ckpt_path='.*' cannot be read \(Permission denied\): expected an intact"
    ):
        check_intact(trained, "ckpt_path", "an intact checkpoint")


class OwnIO(TorchCheckpointIO):
    """A checkpoint plugin of the user."""


def fit(path: Path, **options: Any) -> None:
    data = make_data()
    make_trainer(max_epochs=2, **options).fit(make_model(data), data, ckpt_path=path)


def validate(path: Path) -> None:
    data = make_data()
    make_trainer(limit_val_batches=1).validate(make_model(data), data, ckpt_path=path, verbose=False)


READERS: dict[str, Callable[[Path], object]] = {
    "Trainer.fit": fit,
    "Trainer.fit with its own reader": lambda path: fit(path, plugins=[OwnIO()]),
    "Trainer.validate": validate,
    "init_from": lambda path: make_model(make_data()).init_from(path),
    "load_from_checkpoint": PPO.load_from_checkpoint,
    "RolloutDataModule": lambda path: RolloutDataModule.load_from_checkpoint(path, env_id="CartPole-v1", num_envs=2),
    "load_algorithm": load_algorithm,
    "load_data": load_data,
    "make_hub_folder": lambda path: make_hub_folder(
        path.parent / "hub", path, Score(mean=1.0, std=0.0, episodes=1, deterministic=True), "CartPole-v1"
    ),
}


@pytest.mark.parametrize("reader", READERS)
def test_all_readers_reject_damaged_checkpoint_by_name(reader, trained, damaged):
    READERS[reader](trained)
    if (folder := damaged.parent / "hub").exists():
        folder.rename(damaged.parent / "first")
    with pytest.raises(DamagedFileError, match=f"='{damaged}' is damaged .*Bad CRC-32 for file 'archive/data/11'"):
        READERS[reader](damaged)


def test_damaged_failed_update_is_rejected_by_name(tmp_path):
    path = tmp_path / "failed-update-32.pt"
    torch.save({"number": 0, "state_dict": {"weight": torch.ones(100)}}, path)
    flip_a_bit(path, "data/0")
    with pytest.raises(ConfigurationError, match=f"path='{path}' is damaged .*: expected a file that a failed update"):
        FailedUpdate.load(path)


def test_printed_arguments_are_quoted_for_the_shells_of_the_system(monkeypatch):
    given = ["--config", r"runs\ppo\config.yaml", r"C:\Jane Doe\last.ckpt"]
    assert typed(given) == r"--config 'runs\ppo\config.yaml' 'C:\Jane Doe\last.ckpt'"
    with monkeypatch.context() as patch:
        patch.setattr("os.name", "nt")
        printed = typed(given)
    assert printed == r'--config runs\ppo\config.yaml "C:\Jane Doe\last.ckpt"'

"""Whatever is wrong with a checkpoint is found, and said by the file's name."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from fxzero.checkpoint.manifest import METADATA, NAME, VALUES, Manifest, hash_blocks
from fxzero.checkpoint.verifying import verify
from tests.checkpoint.saved import Run, change_metadata, drop_a_part, flip, rewrite

FILE = "__0_0.distcp"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that is whole."""
    run = Run()
    run.train()
    return run.save(tmp_path_factory.mktemp("checkpoints"), 1)


@pytest.fixture
def path(original: Path, tmp_path: Path) -> Path:
    """A copy to change."""
    return Path(shutil.copytree(original, tmp_path / original.name))


@pytest.fixture
def of_others(tmp_path: Path) -> Path:
    """What `dcp.save` writes by itself."""
    path = tmp_path / "others"
    dcp.save({"model": {"w": torch.arange(4096.0)}, "lr": 0.1}, checkpoint_id=path, no_dist=True)
    return path


def test_a_whole_one(path: Path) -> None:
    """All of it was read."""
    found = verify(path)
    assert found.faults == ()
    assert found.is_whole
    assert found.has_hashes
    assert found.num_files == 3
    assert found.num_tensors == 27
    sizes = [file.stat().st_size for file in path.iterdir() if file.name != NAME]
    assert found.num_bytes == sum(sizes)


def test_of_others(of_others: Path) -> None:
    """By checksums."""
    found = verify(of_others)
    assert found.faults == ()
    assert not found.has_hashes
    assert found.num_tensors == 1
    assert found.num_bytes > 4096 * 4


@pytest.mark.parametrize("seed", range(20))
def test_a_bit_anywhere(path: Path, seed: int) -> None:
    """In whichever file: the manifest too."""
    draw = random.Random(seed)
    file = draw.choice(sorted(path.iterdir()))
    flip(file, draw.randrange(file.stat().st_size))
    faults = verify(path).faults
    assert faults
    assert faults[0].file == str(file)


def test_several_files(path: Path) -> None:
    """All are named, each with its place."""
    flip(path / FILE)
    flip(path / VALUES)
    said = [str(fault) for fault in verify(path).faults]
    assert len(said) == 2
    assert f"{path / FILE} was changed since it was written: its bytes 0 to" in said[0]
    assert f"{path / VALUES} was changed" in said[1]


def test_blocks_are_told_apart(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a file was changed, and in how many places."""
    monkeypatch.setattr("fxzero.checkpoint.manifest.BLOCK_BYTES", 512)
    monkeypatch.setattr("fxzero.checkpoint.verifying.BLOCK_BYTES", 512)
    monkeypatch.setattr("fxzero.checkpoint.blocks.BLOCK_BYTES", 512)
    files = {name: hash_blocks((path / name).read_bytes()) for name in (FILE, METADATA, VALUES)}
    content = json.loads((path / NAME).read_bytes())
    about = {key: content[key] for key in content.keys() - {"format", "sha256", "files"}}
    (path / NAME).write_bytes(Manifest(**about, files=files).to_bytes())
    assert verify(path).is_whole
    flip(path / FILE, 512 * 3 + 5)
    flip(path / FILE, 512 * 7)
    (fault,) = verify(path).faults
    assert "its bytes 1536 to 2048 have another hash, and those of 1 more blocks" in fault.what


def test_short_and_missing_files(path: Path) -> None:
    """With sizes, and the system's word."""
    size = (path / FILE).stat().st_size
    with open(path / FILE, "r+b") as file:
        file.truncate(100)
    assert str(verify(path).faults[0]) == f"{path / FILE} has 100 bytes instead of {size}"
    (path / FILE).unlink()
    assert str(verify(path).faults[0]).startswith(f"{path / FILE} cannot be read: No such file")
    (path / NAME).unlink()
    assert str(verify(path).faults[0]).startswith(f"{path / NAME} cannot be read: No such file")


def test_a_gap_that_no_hash_shows(path: Path) -> None:
    """The bytes are those that were written, and do not hold the tensor."""
    change_metadata(path, drop_a_part("model.thin"))
    (fault,) = verify(path).faults
    assert fault.file == str(path)
    assert "lacks a part of model.thin: its 0 parts hold 0 of 15 elements of [3, 5]" in fault.what


def test_places_that_there_are_not(path: Path) -> None:
    """A part without a place, behind the end, in no file, in too few bytes."""

    def change(metadata: Any) -> None:
        places = {index.fqn: index for index in metadata.storage_data}
        del metadata.storage_data[places["model.scale"]]
        metadata.storage_data[places["model.thin"]].offset = 1 << 40
        metadata.storage_data[places["model.mask"]].relative_path = "__9_0.distcp"
        metadata.storage_data[places["model.counts"]].length = 3

    change_metadata(path, change)
    said = "\n".join(map(str, verify(path).faults))
    assert "has no place for model.scale's part at []" in said
    assert f"{path / FILE} ends before a part of model.thin" in said
    assert f"{path / '__9_0.distcp'} is not there: model.mask is in it" in said
    assert "has 3 bytes of model.counts, where 16 should be" in said


def test_values_that_cannot_be_decoded(path: Path) -> None:
    """Also of another number of ranks."""
    content = json.loads((path / VALUES).read_bytes())
    content["scheduler"] = {"all": {"!": "tensor", "dtype": "float99", "shape": [1], "of": ""}}
    rewrite(path, VALUES, json.dumps(content).encode())
    (fault,) = verify(path).faults
    assert fault.file == str(path / VALUES)
    assert "cannot be decoded: a value that nobody writes" in fault.what
    content["scheduler"] = {"ranks": [1, 2, 3]}
    rewrite(path, VALUES, json.dumps(content).encode())
    assert "has scheduler of 3 of 1 ranks" in str(verify(path).faults[0])


def test_metadata_that_are_something_else(path: Path) -> None:
    """A pickle of another class is not made."""
    rewrite(path, METADATA, b"cos\nsystem\n(S'true'\ntR.")
    (fault,) = verify(path).faults
    assert fault.file == str(path / METADATA)
    assert "os.system is no part of a checkpoint's metadata" in fault.what


def test_a_bit_in_a_file_of_others(of_others: Path) -> None:
    """Of a tensor, and of what is no tensor."""
    (file,) = of_others.glob("*.distcp")
    flip(file)
    (fault,) = verify(of_others).faults
    assert fault.file == str(file)
    assert "has another checksum, where model.w is" in fault.what


def test_a_gap_in_what_others_have_saved(of_others: Path) -> None:
    """Which torch would read, and leave the rest of the memory as it was."""
    change_metadata(of_others, drop_a_part("model.w"))
    assert "lacks a part of model.w" in str(verify(of_others).faults[0])

"""Files that are not as they were written: none is loaded, and nothing in a run is changed by one.

Two checkpoints lie in a folder. What is done to the newer one must end in the older one, said in
`skipped`, or where both are struck in an error that names the file.
"""

from __future__ import annotations

import io
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fxzero
from fxzero.checkpoint import folder as folders
from fxzero.errors import CheckpointError
from tests.checkpoint.runs import all_of, make_run, save_now, unchanged

Corruption = Callable[[Path, Path, random.Random], Any]


def flip(file: Path, _other: Path, draw: random.Random) -> None:
    """One bit."""
    data = bytearray(file.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    file.write_bytes(data)


def truncate(file: Path, _other: Path, draw: random.Random) -> None:
    """The end is missing."""
    os.truncate(file, draw.randrange(file.stat().st_size))


def extend(file: Path, _other: Path, draw: random.Random) -> None:
    """Something is behind the end."""
    with file.open("ab") as appended:
        appended.write(draw.randbytes(draw.randrange(1, 5000)))


def delete(file: Path, _other: Path, _draw: random.Random) -> None:
    """No file."""
    file.unlink()


def empty(file: Path, _other: Path, _draw: random.Random) -> None:
    """No bytes."""
    file.write_bytes(b"")


def zero(file: Path, _other: Path, draw: random.Random) -> None:
    """A page that never reached the disk: as a file system that has crashed leaves it."""
    data = bytearray(file.read_bytes())
    begin = draw.randrange(len(data))
    length = min(512, len(data) - begin)
    data[begin : begin + length] = bytes(b ^ 255 if b == 0 else 0 for b in data[begin:][:length])
    file.write_bytes(data)


def folder_instead(file: Path, _other: Path, _draw: random.Random) -> None:
    """What cannot be read; root may read whatever has no permissions."""
    file.unlink()
    file.mkdir()


def other_one(file: Path, other: Path, _draw: random.Random) -> None:
    """The file of the other checkpoint, whole."""
    shutil.copy(other, file)


CORRUPTIONS: list[Corruption] = [
    flip,
    flip,
    flip,
    truncate,
    extend,
    delete,
    empty,
    zero,
    folder_instead,
    other_one,
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """A folder of two checkpoints, and the runs that they hold, as bits."""
    folder = tmp_path_factory.mktemp("saved")
    run = make_run(0)
    run.train(2)
    save_now(run, folder, 100)
    older = all_of(run)
    run.train(2)
    save_now(run, folder, 200)
    return folder, older, all_of(run)


@pytest.fixture
def folder(saved: tuple[Path, Any, Any], tmp_path: Path) -> Path:
    """A copy of it to break."""
    return Path(shutil.copytree(saved[0], tmp_path / "checkpoints"))


def file_names(folder: Path) -> list[str]:
    """Of the checkpoint."""
    return sorted(path.name for path in (folder / "step-0000000200").iterdir())


@pytest.mark.parametrize("seed", range(100))
def test_none_of_a_hundred_corruptions_is_loaded(
    saved: tuple[Path, Any, Any], folder: Path, seed: int
) -> None:
    """The newer one is struck: the older one is loaded, and why is said. Then that one too."""
    draw = random.Random(seed)
    corrupt = CORRUPTIONS[seed % len(CORRUPTIONS)]
    names = file_names(folder)
    name = names[(seed // len(CORRUPTIONS)) % len(names)]
    older, newer = folder / "step-0000000100", folder / "step-0000000200"
    before = (newer / name).read_bytes()
    corrupt(newer / name, older / name, draw)
    assert not (newer / name).is_file() or (newer / name).read_bytes() != before, "the premise"

    run = make_run(7)
    run.train()
    loaded = fxzero.checkpoint.load(run.state, folder)
    assert loaded is not None
    assert (loaded.step, loaded.path) == (100, older)
    (reason,) = loaded.skipped
    struck = newer / ("" if corrupt is other_one and name == "manifest.json" else name)
    assert str(struck) in reason
    assert all_of(run) == saved[1]

    run = make_run(7)
    run.train()
    other = names[draw.randrange(len(names))]
    (delete if corrupt is other_one else corrupt)(older / other, newer / other, draw)
    with unchanged(run), pytest.raises(CheckpointError) as caught:
        fxzero.checkpoint.load(run.state, folder)
    assert str(struck) in str(caught.value)
    assert str(older / other) in str(caught.value)


def test_whole_ones_are_loaded_to_the_bit(saved: tuple[Path, Any, Any], folder: Path) -> None:
    """What the others are compared with."""
    for step, expected in ((None, saved[2]), (100, saved[1]), (200, saved[2])):
        run = make_run(7)
        run.train()
        loaded = fxzero.checkpoint.load(run.state, folder, step=step)
        assert loaded is not None
        assert loaded.skipped == ()
        assert loaded.left == ()
        assert all_of(run) == expected


def test_every_byte_counts(folder: Path) -> None:
    """Those between a zip archive's entries too, of which no reader takes notice."""
    (file,) = (folder / "step-0000000200").glob("*.distcp")
    data = file.read_bytes()
    run = make_run(7)
    for place in range(0, len(data), 401):
        changed = bytearray(data)
        changed[place] ^= 4
        file.write_bytes(changed)
        loaded = fxzero.checkpoint.load(run.state, folder)
        assert loaded is not None
        assert loaded.step == 100, place


def test_the_files_of_two_checkpoints_were_swapped(folder: Path) -> None:
    """Each of them is whole, for another one."""
    older, newer = folder / "step-0000000100", folder / "step-0000000200"
    for name in file_names(folder):
        copy = folder.with_name(f"of-{name}")
        shutil.copytree(folder, copy)
        for path in (older, newer):
            other = newer if path is older else older
            shutil.copy(other / name, copy / path.name / name)
        if (older / name).read_bytes() == (newer / name).read_bytes():
            continue
        run = make_run(7)
        struck = "" if name == "manifest.json" else f"/{name}"
        with unchanged(run), pytest.raises(CheckpointError) as caught:
            fxzero.checkpoint.load(run.state, copy)
        for path in (older, newer):
            assert f"{path.name}{struck}" in str(caught.value)


def test_permission_is_denied(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one file."""
    real_open, real_io = os.open, io.open

    for name in file_names(folder):
        denied = folder / "step-0000000200" / name

        def refuse(path: Any, *args: Any, denied: Path = denied, **kwargs: Any) -> int:
            if Path(os.fspath(path)) == denied:
                raise PermissionError(13, "Permission denied", str(path))
            return real_open(path, *args, **kwargs)

        def refuse_io(file: Any, *args: Any, denied: Path = denied, **kwargs: Any) -> Any:
            if Path(os.fspath(file)) == denied:
                raise PermissionError(13, "Permission denied", str(file))
            return real_io(file, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(os, "open", refuse)
            patch.setattr(io, "open", refuse_io)
            loaded = fxzero.checkpoint.load(make_run(7).state, folder)
        assert loaded is not None
        assert loaded.step == 100
        assert f"{denied} cannot be read: Permission denied" in loaded.skipped[0]


def test_the_one_that_was_asked_for_is_struck(folder: Path) -> None:
    """No other one is taken for it."""
    os.truncate(folder / "step-0000000200" / "values.json", 3)
    run = make_run(7)
    with unchanged(run), pytest.raises(CheckpointError, match=r"step-0000000200/values\.json"):
        fxzero.checkpoint.load(run.state, folder, step=200)


@pytest.mark.parametrize("name", [".metadata", "manifest.json", "values.json", "__0_0.distcp"])
def test_one_that_was_given_by_its_path_lacks_a_file(folder: Path, name: str) -> None:
    """It is an error: None would mean that training begins anew."""
    path = folder / "step-0000000200"
    (path / name).unlink()
    run = make_run(7)
    with unchanged(run), pytest.raises(CheckpointError, match=re.escape(f"{path / name}")):
        fxzero.checkpoint.load(run.state, path)


@pytest.mark.parametrize("name", [".metadata", "manifest.json", "values.json", "__0_0.distcp"])
def test_one_under_another_name_lacks_a_file(folder: Path, name: str) -> None:
    """A copy that somebody called ``best``: ours, although its name does not say so."""
    path = (folder / "step-0000000200").rename(folder / "best")
    (path / name).unlink()
    run = make_run(7)
    with unchanged(run), pytest.raises(CheckpointError):
        fxzero.checkpoint.load(run.state, path)


def test_one_under_the_number_of_another(folder: Path) -> None:
    """Whoever asks for 300 does not get 200."""
    (folder / "step-0000000200").rename(folder / "step-0000000300")
    run = make_run(7)
    try:
        loaded = fxzero.checkpoint.load(run.state, folder, step=300)
    except CheckpointError:
        return
    assert loaded is not None
    assert loaded.step == 300


def test_half_a_checkpoint_is_none(folder: Path) -> None:
    """What a crash leaves behind, whole but for its name."""
    (folder / "step-0000000200").rename(folders.writing_path(folder, 200))
    loaded = fxzero.checkpoint.load(make_run(7).state, folder)
    assert loaded is not None
    assert (loaded.step, loaded.skipped) == (100, ())

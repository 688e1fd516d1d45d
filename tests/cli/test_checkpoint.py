"""`fxzero checkpoint` and `fxzero export`: what they print, as JSON too, and how they end."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from fxzero.cli.app import app
from tests.checkpoint.saved import Run, change_metadata, drop_a_part, flip

DOCS = Path(__file__).parents[2] / "docs"


def call(*arguments: str | Path) -> Result:
    """Run a command, wide enough not to wrap."""
    return CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "200"})


def text_of(*arguments: str | Path, exit_code: int = 0) -> str:
    """What a command says, on one line."""
    result = call(*arguments)
    assert result.exit_code == exit_code, result.output
    assert "Traceback" not in result.output
    return " ".join(result.output.split())


def said(*arguments: str | Path, exit_code: int = 0) -> Any:
    """What a command prints as JSON."""
    result = call(*arguments, "--json")
    assert result.exit_code == exit_code, result.output
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two checkpoints."""
    folder = tmp_path_factory.mktemp("original")
    run = Run()
    for step in (1, 2):
        run.train()
        run.save(folder, step)
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A copy to change."""
    return Path(shutil.copytree(original, tmp_path / "checkpoints"))


def newest(folder: Path) -> Path:
    """The last of the two."""
    return folder / "step-0000000002"


def file_of(folder: Path) -> Path:
    """Its tensors."""
    return newest(folder) / "__0_0.distcp"


def assert_documented(page: str, *rows: dict[str, Any]) -> None:
    """Every key stands on the page."""
    text = (DOCS / page).read_text()
    for row in rows:
        for key in row:
            assert f"`{key}`" in text, key


# -- ls


def test_ls(folder: Path) -> None:
    """Both, whole; and what was left."""
    (folder / ".writing-0000000003").mkdir()
    text = text_of("checkpoint", "ls", folder)
    assert "step-0000000001 │ 1 │" in text
    assert "no fxzero on 1 ranks" in text
    assert f"torch {torch.__version__}" in text
    assert text.count("whole") == 2
    assert ".writing-0000000003: being written, or left by a job that ended" in text


def test_ls_as_json(folder: Path) -> None:
    """As docs/checkpoint.md says."""
    found = said("checkpoint", "ls", folder)
    assert [row["step"] for row in found["checkpoints"]] == [1, 2]
    assert [row["fault"] for row in found["checkpoints"]] == [None, None]
    assert found["checkpoints"][0]["world_size"] == 1
    assert found["unfinished"] == []
    assert_documented("checkpoint.md", found, found["checkpoints"][0])


def test_ls_of_what_is_not_whole(folder: Path) -> None:
    """The file, and 1; a flipped bit is for verify to find."""
    flip(file_of(folder))
    assert call("checkpoint", "ls", folder).exit_code == 0
    with open(file_of(folder), "ab") as file:
        file.write(b"more")
    assert "__0_0.distcp has" in text_of("checkpoint", "ls", folder, exit_code=1)
    (newest(folder) / "manifest.json").write_text("{}")
    found = said("checkpoint", "ls", folder, exit_code=1)
    assert found["checkpoints"][0]["fault"] is None
    row = found["checkpoints"][1]
    assert row["step"] == 2
    assert row["written"] is None
    assert "manifest.json is not whole" in row["fault"]


def test_ls_of_nothing(tmp_path: Path) -> None:
    """No checkpoint is no error; no folder is."""
    assert "no checkpoint in" in text_of("checkpoint", "ls", tmp_path)
    assert "is no folder" in text_of("checkpoint", "ls", tmp_path / "none", exit_code=2)


# -- verify


def test_verify(folder: Path) -> None:
    """All, or one of them, with a rate."""
    text = text_of("checkpoint", "verify", folder)
    assert text.count(": whole; 27 tensors, 3 files, ") == 2
    assert " MB/s" in text
    for words in ((folder, "--step", "2"), (newest(folder),)):
        assert text_of("checkpoint", "verify", *words).count(": whole;") == 1


def test_verify_names_the_file(folder: Path) -> None:
    """And ends with 1; the other one is whole."""
    flip(file_of(folder))
    text = text_of("checkpoint", "verify", folder, exit_code=1)
    assert f"{folder}/step-0000000001: whole" in text
    assert f"{newest(folder)}: not whole" in text
    assert f"{file_of(folder)} was changed since it was written" in text
    assert call("checkpoint", "verify", folder, "--step", "1").exit_code == 0


def test_verify_as_json(folder: Path) -> None:
    """As docs/checkpoint.md says."""
    change_metadata(newest(folder), drop_a_part("model.thin"))
    first, second = said("checkpoint", "verify", folder, exit_code=1)
    assert first["is_whole"]
    assert not second["is_whole"]
    assert "lacks a part of model.thin" in second["faults"][0]["what"]
    assert first["bytes_per_s"] == pytest.approx(first["num_bytes"] / first["seconds"])
    assert_documented("checkpoint.md", second, second["faults"][0])


# -- diff


def test_diff(folder: Path) -> None:
    """0 for equal, 1 for different."""
    text = text_of("checkpoint", "diff", folder, newest(folder))
    assert "nothing differs; 27 tensors are equal" in text
    text = text_of("checkpoint", "diff", folder / "step-0000000001", folder, exit_code=1)
    assert "model.embed.weight" in text
    assert "scheduler.last_epoch │ 1 │ 2" in text


def test_diff_as_json(folder: Path) -> None:
    """As docs/checkpoint.md says."""
    found = said("checkpoint", "diff", folder / "step-0000000001", folder, exit_code=1)
    assert not found["is_equal"]
    assert_documented("checkpoint.md", found, found["tensors"][0], found["values"][0])
    assert_documented("checkpoint.md", {"forms": 0, "name": 0})


def test_diff_of_what_is_not_whole(folder: Path) -> None:
    """The file, and 1."""
    flip(file_of(folder))
    text = text_of("checkpoint", "diff", folder, folder / "step-0000000001", exit_code=1)
    assert text.startswith(f"CheckpointError: {file_of(folder)} was changed since it was written")


# -- export


def test_export(folder: Path, tmp_path: Path) -> None:
    """What was written, tied and left out."""
    text = text_of("export", folder, tmp_path / "model.safetensors", "--dtype", "bfloat16")
    assert f"{newest(folder)}: 11 tensors (" in text
    assert "8 bfloat16" in text
    assert "tied, and written once: head.weight" in text
    assert "left out: 28 of optimizer, 5 of values" in text
    assert f"written: {tmp_path / 'model.safetensors'}" in text
    assert (tmp_path / "model.safetensors").exists()


def test_export_as_json(folder: Path, tmp_path: Path) -> None:
    """As docs/export.md says."""
    found = said("export", folder, tmp_path / "out", "--shard-size", "300B")
    assert len(found["files"]) > 1
    assert all(Path(file).exists() for file in [*found["files"], found["index"]])
    assert_documented("export.md", found)


def test_export_of_what_is_not_whole(folder: Path, tmp_path: Path) -> None:
    """The file, 1, and nothing written; one that lacks a file is passed over, and that is said."""
    flip(file_of(folder))
    text = text_of("export", folder, tmp_path / "out", exit_code=1)
    assert text.startswith(f"CheckpointError: {file_of(folder)} was changed since it was written")
    assert list((tmp_path / "out").iterdir()) == []
    file_of(folder).unlink()
    text = text_of("export", folder, tmp_path / "out")
    assert f"warning: a newer checkpoint is not whole: {file_of(folder)} cannot be read" in text
    assert "step-0000000001: 11 tensors" in text


WRONG: list[tuple[tuple[str, ...], str]] = [
    (("checkpoint", "verify", "{folder}", "--step", "7"), "has no checkpoint 7. It has 1, 2."),
    (("checkpoint", "verify", "{one}", "--step", "2"), "is one checkpoint: name its folder"),
    (("checkpoint", "verify", "{folder}", "--step", "x"), "Invalid value for '--step'"),
    (("checkpoint", "verify", "{out}/none"), "is not there. Name a folder of checkpoints"),
    (("checkpoint", "diff", "{folder}"), "Missing argument"),
    (("checkpoint", "diff", "{folder}", "{out}"), "has no checkpoint"),
    (("checkpoint", "lst", "{folder}"), "No such command 'lst'"),
    (("export", "{folder}"), "Missing argument"),
    (("export", "{out}", "{out}/x"), "has no checkpoint"),
    (("export", "{folder}", "{out}/x", "--dtype", "float64"), "Invalid value for '--dtype'"),
    (("export", "{folder}", "{out}/x", "--shard-size", "much"), "--shard-size much: write a"),
    (("export", "{folder}", "{out}/x", "--shard-size", "0"), "--shard-size 0: write a number"),
    (("export", "{folder}", "{out}/x", "--prefix", "modle"), "did you mean 'model'"),
    (("export", "{folder}", "{one}/manifest.json"), "manifest.json is a file"),
    (("export", "{folder}", "{out}/x", "--deepspeed"), "has no file 'latest'"),
    (
        ("export", "{folder}", "{out}/x", "--deepspeed", "--prefix", "a"),
        "--prefix has a meaning only with no --deepspeed",
    ),
]


@pytest.mark.parametrize(("words", "message"), WRONG)
def test_wrong_use(words: tuple[str, ...], message: str, folder: Path, tmp_path: Path) -> None:
    """A sentence, exit code 2, nothing written."""
    (tmp_path / "out").mkdir()
    names = {"folder": folder, "one": newest(folder), "out": tmp_path / "out"}
    text = text_of(*[word.format(**names) for word in words], exit_code=2)
    assert message in text.replace(" │ │ ", " "), text
    assert list((tmp_path / "out").iterdir()) == []


def test_traceback(tmp_path: Path) -> None:
    """On request alone."""
    result = call("checkpoint", "ls", tmp_path / "none", "--traceback")
    assert type(result.exception).__name__ == "ConfigError"

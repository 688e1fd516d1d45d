"""`fxzero.checkpoint.manifest`: one that was cut short, changed, or says what it must not."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxzero.checkpoint import manifest as manifests
from fxzero.checkpoint.manifest import BLOCK_BYTES, FileRecord, Manifest, hash_blocks
from fxzero.errors import CheckpointError

PATH = Path("DIR/step-0000000100/manifest.json")


def written(**changes: Any) -> Manifest:
    """What a save writes."""
    settings: dict[str, Any] = {
        "step": 100,
        "written": "2030-01-02T03:04:05+00:00",
        "world_size": 2,
        "layout": "zero 3 on 2 ranks",
        "tensor_bytes": 12,
        "versions": {"torch": "2.13"},
        "files": {"__0_0.distcp": hash_blocks(b"abc"), ".metadata": hash_blocks(b"")},
    }
    return Manifest(**{**settings, **changes})


def signed(content: dict[str, Any]) -> bytes:
    """A manifest that somebody else has written: its own hash is right."""
    return json.dumps({**content, "sha256": manifests._hash(content)}).encode()


def content_of(manifest: Manifest) -> dict[str, Any]:
    """All of it but its hash."""
    content: dict[str, Any] = json.loads(manifest.to_bytes())
    del content["sha256"]
    return content


def test_it_comes_back() -> None:
    """All of it."""
    assert Manifest.from_bytes(written().to_bytes(), PATH) == written()


@settings(max_examples=50, deadline=None)
@given(
    step=st.integers(0),
    layout=st.text(),
    files=st.dictionaries(
        st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,20}", fullmatch=True),
        st.binary(max_size=40).map(hash_blocks),
    ),
)
def test_any_comes_back(step: int, layout: str, files: dict[str, FileRecord]) -> None:
    """Whatever the model is called."""
    one = written(step=step, layout=layout, files=files)
    assert Manifest.from_bytes(one.to_bytes(), PATH) == one


def test_one_that_was_cut_short_anywhere_is_refused() -> None:
    """And the message names the file."""
    data = written().to_bytes()
    for length in range(len(data)):
        with pytest.raises(CheckpointError, match=r"step-0000000100/manifest\.json"):
            Manifest.from_bytes(data[:length], PATH)


def test_one_of_whose_bytes_one_was_changed_is_refused_or_says_the_same() -> None:
    """White space means nothing."""
    data = written().to_bytes()
    for place in range(len(data)):
        for bit in (0, 5):
            changed = bytearray(data)
            changed[place] ^= 1 << bit
            found: Manifest | str
            try:
                found = Manifest.from_bytes(bytes(changed), PATH)
            except CheckpointError as error:
                found = str(error)
            assert found == written() or str(PATH) in str(found)


def test_of_the_first_version() -> None:
    """Its blocks have SHA-256."""
    block = hashlib.sha256(b"abc").hexdigest()
    files = {"__0_0.distcp": {"bytes": 3, "blocks": [block]}}
    content = {**content_of(written()), "format": "fxzero checkpoint 1", "files": files}
    (record,) = Manifest.from_bytes(signed(content), PATH).files.values()
    assert record.is_block(0, b"abc")
    assert not record.is_block(0, b"abd")


def test_a_hash_that_is_no_text() -> None:
    """Whoever wrote it."""
    files = {"__0_0.distcp": {"bytes": 3, "blocks": [3]}}
    with pytest.raises(CheckpointError, match="is not whole"):
        Manifest.from_bytes(signed({**content_of(written()), "files": files}), PATH)


def test_of_another_version() -> None:
    """It says so, and what to do."""
    content = {**content_of(written()), "format": "fxzero checkpoint 3"}
    with pytest.raises(CheckpointError, match=r"another version.*fxzero that wrote it"):
        Manifest.from_bytes(signed(content), PATH)


@pytest.mark.parametrize(
    "name",
    ["../x", "..", ".", "", "/etc/passwd", "a/b", "a\\b", "a\n", "a\0b", "-rf", "~", "é"],
)
def test_a_file_outside_of_the_folder_is_refused(name: str) -> None:
    """Whoever wrote it."""
    manifest = written(files={name: hash_blocks(b"abc")})
    with pytest.raises(CheckpointError, match="not in its folder"):
        Manifest.from_bytes(manifest.to_bytes(), PATH)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b"3",
        b'"text"',
        b"{}",
        b"\xff\xfe",
        b'{"sha256": 1, "format": "fxzero checkpoint 1", "files": []}',
        b'{"sha256": 1, "format": "fxzero checkpoint 1", "files": {"a": 1}}',
        b'{"sha256": 1, "format": "fxzero checkpoint 1", "files": {}, "other": 1}',
        b"[" * 100_000,
    ],
    ids=lambda data: data[:40].decode(errors="replace"),
)
def test_what_is_no_manifest(data: bytes) -> None:
    """A CheckpointError, whatever it is."""
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        Manifest.from_bytes(data, PATH)


@pytest.mark.parametrize(
    "record",
    [
        {"bytes": -1, "blocks": []},
        {"bytes": "3", "blocks": ["ff"]},
        {"bytes": 3, "blocks": []},
        {"bytes": 3, "blocks": "ff"},
        {"bytes": 3, "blocks": ["ff", "ff"]},
        {"bytes": None, "blocks": None},
    ],
    ids=json.dumps,
)
def test_a_record_that_cannot_be_is_refused(record: dict[str, Any]) -> None:
    """As many hashes as there are blocks: a file without would be read unchecked."""
    content = content_of(written())
    content["files"]["__0_0.distcp"] = record
    with pytest.raises(CheckpointError):
        Manifest.from_bytes(signed(content), PATH)


@pytest.mark.parametrize(
    ("size", "blocks"), [(0, 0), (1, 1), (BLOCK_BYTES, 1), (BLOCK_BYTES + 1, 2)]
)
def test_each_block_has_a_hash(size: int, blocks: int) -> None:
    """The last one may be short."""
    record = hash_blocks(bytes(size))
    assert record.bytes == size
    assert len(record.blocks) == blocks

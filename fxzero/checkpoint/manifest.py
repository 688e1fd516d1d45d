"""What a checkpoint consists of: every file, how long it is, and the hash of each of its blocks.

    manifest.json   {"step": 100, "files": {"__0_0.distcp": {"bytes": …, "blocks": [xxh3, …]}, …},
                     …, "sha256": of all the rest}

It is written last: a folder without one was never finished. Blocks are hashed one by one, so that a
reader checks what it reads and nothing else, whichever part of a file that is.

Hashes tell what a disk or a network has changed, not what somebody has who could write the manifest
anew, too. XXH3 is as fast as memory (https://xxhash.com); SHA-256, which the first version had,
takes as long for a block as a disk does, and is still read.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from fxzero.errors import CheckpointError

NAME = "manifest.json"
VALUES = "values.json"
"""What is no tensor: see `fxzero.checkpoint.values`."""
METADATA = ".metadata"
"""Of torch.distributed.checkpoint: which file holds which part of which tensor."""
BLOCK_BYTES = 8 << 20
_FORMAT = "fxzero checkpoint 2"
_KNOWN_FORMATS = ("fxzero checkpoint 1", _FORMAT)
_SHA256_DIGITS = 64

Data = bytes | memoryview
_FILE_NAME = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class FileRecord:
    """One file: its length, and the hash of every `BLOCK_BYTES` of it."""

    bytes: int
    blocks: tuple[str, ...]

    @property
    def num_blocks(self) -> int:
        """How many blocks so many bytes are."""
        return -(-self.bytes // BLOCK_BYTES)

    def is_block(self, number: int, *data: Data) -> bool:
        """Whether some bytes, in one piece or in several, are those of a block."""
        wanted = self.blocks[number]
        hashed = hashlib.sha256() if len(wanted) == _SHA256_DIGITS else block_hash()
        for piece in data:
            hashed.update(piece)
        return hashed.hexdigest() == wanted


@dataclass(frozen=True)
class Manifest:
    """See the module."""

    step: int
    """The number that it was saved under."""
    written: str
    """When, by the clock of rank 0: ISO 8601."""
    world_size: int
    layout: str
    """How the model lay: ``"zero 3 on 2 ranks"``, for people."""
    tensor_bytes: int
    """Of all tensors, each counted once."""
    versions: Mapping[str, str]
    files: Mapping[str, FileRecord]

    def to_bytes(self) -> bytes:
        """The file."""
        content = {"format": _FORMAT, **asdict(self)}
        return json.dumps({**content, "sha256": _hash(content)}, indent=1).encode()

    @classmethod
    def from_bytes(cls, data: bytes, path: Path) -> Manifest:
        """Read and check one.

        Raises:
            CheckpointError: it was cut short or changed, or is of another version.
        """
        try:
            content: dict[str, Any] = json.loads(data)
            written_hash = content.pop("sha256")
            version = content.pop("format")
            if version not in _KNOWN_FORMATS:
                raise CheckpointError(
                    f"{path} is of another version of this format than {_FORMAT!r}. Read it with "
                    "the fxzero that wrote it."
                )
            files = {
                name: FileRecord(record["bytes"], tuple(record["blocks"]))
                for name, record in content.pop("files").items()
            }
            manifest = cls(**content, files=files)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(
                f"{path} is not whole ({type(error).__name__}: {error})"
            ) from error
        if written_hash != _hash({"format": version, **asdict(manifest)}):
            raise CheckpointError(f"{path} was changed since it was written: its hash is another")
        for name, record in files.items():
            if (
                type(record.bytes) is not int
                or record.bytes < 0
                or len(record.blocks) != record.num_blocks
                or not all(type(block) is str for block in record.blocks)
            ):
                raise CheckpointError(f"{path} is not whole: {len(record.blocks)} hashes of {name}")
            if not _FILE_NAME.fullmatch(name) or name in (".", ".."):
                raise CheckpointError(f"{path} names a file {name!r} that is not in its folder")
        return manifest


def file_of_rank(rank: int) -> str:
    """The file that a rank has written, as torch.distributed.checkpoint names it."""
    return f"__{rank}_0.distcp"


def block_hash(data: Data = b"") -> xxhash.xxh3_128:
    """What blocks are hashed with, begun with some bytes."""
    return xxhash.xxh3_128(data)


def hash_blocks(data: bytes) -> FileRecord:
    """The record of a file that is in memory."""
    blocks = range(0, len(data), BLOCK_BYTES)
    return FileRecord(
        len(data), tuple(block_hash(data[i : i + BLOCK_BYTES]).hexdigest() for i in blocks)
    )


def _hash(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

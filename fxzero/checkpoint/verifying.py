"""Whether a checkpoint is what was written, without a model: every byte, and what the bytes say.

    files       as long as the manifest says, and every block has its hash
    metadata    readable; the parts of every tensor cover it, and lie in a file that has them
    values      decodable: schedules, generators, groups

A checkpoint of others has no hashes: its archives' checksums are compared instead.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from fxzero.checkpoint.archives import fault_of_archive
from fxzero.checkpoint.coverage import fault_of_chunks
from fxzero.checkpoint.folder import is_ours, read_manifest
from fxzero.checkpoint.manifest import BLOCK_BYTES, METADATA, NAME, VALUES, FileRecord, Manifest
from fxzero.checkpoint.reader import CheckedReader
from fxzero.checkpoint.values import decode
from fxzero.cost.resources import cores
from fxzero.errors import CheckpointError

_MOST_THREADS = 16


@dataclass(frozen=True)
class Fault:
    """Something that is not as it was written."""

    file: str
    """Its path; of a tensor, that of the checkpoint."""
    what: str

    def __str__(self) -> str:
        return f"{self.file} {self.what}"


@dataclass(frozen=True)
class Verified:
    """What was found of one checkpoint."""

    path: Path
    faults: tuple[Fault, ...]
    has_hashes: bool
    """Whether every byte was compared with a hash: not in a checkpoint of others."""
    num_files: int
    num_tensors: int
    num_bytes: int
    """That were read."""
    seconds: float

    @property
    def is_whole(self) -> bool:
        """Nothing is wrong with it."""
        return not self.faults

    @property
    def bytes_per_s(self) -> float:
        """How fast it was read and hashed."""
        return self.num_bytes / max(self.seconds, 1e-9)

    def to_json(self) -> dict[str, Any]:
        """As docs/checkpoint.md says."""
        return {
            "path": str(self.path),
            "is_whole": self.is_whole,
            "faults": [{"file": fault.file, "what": fault.what} for fault in self.faults],
            "has_hashes": self.has_hashes,
            "num_files": self.num_files,
            "num_tensors": self.num_tensors,
            "num_bytes": self.num_bytes,
            "seconds": self.seconds,
            "bytes_per_s": self.bytes_per_s,
        }


def verify(path: Path, threads: int | None = None) -> Verified:
    """Read all of a checkpoint, and say what is wrong with it.

    Args:
        path: one checkpoint, of ours or of `torch.distributed.checkpoint.save`.
        threads: that read and hash at once; None takes one for each core, up to 16.
    """
    began = time.perf_counter()
    threads = threads or min(cores(), _MOST_THREADS)
    faults: list[Fault] = []
    sizes: dict[str, int] = {}
    num_bytes = num_tensors = 0
    try:
        manifest = read_manifest(path, sizes=False) if is_ours(path) else None
        if manifest is not None:
            sizes = {name: record.bytes for name, record in manifest.files.items()}
            with ThreadPoolExecutor(threads) as pool:
                num_bytes = _check_files(path, manifest.files, pool, faults)
        else:
            sizes = {e.name: e.stat().st_size for e in os.scandir(path) if e.is_file()}
        metadata = _read(faults, path / METADATA, CheckedReader(path, manifest).read_metadata)
        if metadata is not None:
            num_tensors = sum(
                isinstance(about, TensorStorageMetadata)
                for about in metadata.state_dict_metadata.values()
            )
            faults += _faults_of_tensors(path, metadata, sizes)
            if manifest is None and not faults:
                num_bytes = _check_archives(path, metadata, faults)
        if manifest is not None and all(fault.file != str(path / VALUES) for fault in faults):
            faults += _faults_of_values(path, manifest)
    except CheckpointError as error:
        faults.append(_fault(path / NAME, error))
    except OSError as error:
        faults.append(Fault(str(error.filename or path), f"cannot be read: {error.strerror}"))
    return Verified(
        path=path,
        faults=tuple(dict.fromkeys(faults)),
        has_hashes=is_ours(path),
        num_files=len(sizes),
        num_tensors=num_tensors,
        num_bytes=num_bytes,
        seconds=time.perf_counter() - began,
    )


def _fault(file: Path, error: Exception) -> Fault:
    """A fault of an error, whose sentence begins with the file."""
    return Fault(str(file), str(error).removeprefix(f"{file} "))


def _read(faults: list[Fault], file: Path, function: Any) -> Any:
    """What a function reads; None, and a fault, if it cannot."""
    try:
        return function()
    except CheckpointError as error:
        if not any(fault.file == str(file) for fault in faults):
            faults.append(_fault(file, error))
        return None


# -- bytes


def _check_files(
    path: Path, files: Mapping[str, FileRecord], pool: ThreadPoolExecutor, faults: list[Fault]
) -> int:
    """Hash every block of every file, and add what is wrong.

    Returns:
        How many bytes were read.
    """
    num_bytes = 0
    for name, record in files.items():
        file = path / name
        try:
            handle = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            faults.append(Fault(str(file), f"cannot be read: {error.strerror}"))
            continue
        try:
            size = os.fstat(handle).st_size
            if size != record.bytes:
                faults.append(Fault(str(file), f"has {size} bytes instead of {record.bytes}"))
            are_same = pool.map(_Comparing(handle, record), range(len(record.blocks)))
            changed = [number for number, is_same in enumerate(are_same) if not is_same]
            num_bytes += min(size, record.bytes)
        except OSError as error:
            faults.append(Fault(str(file), f"cannot be read: {error.strerror}"))
            continue
        finally:
            os.close(handle)
        if changed and size == record.bytes:
            begin = changed[0] * BLOCK_BYTES
            end = min(begin + BLOCK_BYTES, record.bytes)
            others = f", and those of {len(changed) - 1} more blocks" if len(changed) > 1 else ""
            faults.append(
                Fault(
                    str(file),
                    f"was changed since it was written: its bytes {begin} to {end} have another "
                    f"hash{others}",
                )
            )
    return num_bytes


@dataclass(frozen=True)
class _Comparing:
    """Compares a block of an open file with what was written."""

    handle: int
    record: FileRecord

    def __call__(self, number: int) -> bool:
        data = os.pread(self.handle, BLOCK_BYTES, number * BLOCK_BYTES)
        return self.record.is_block(number, data)


def _check_archives(path: Path, metadata: Metadata, faults: list[Fault]) -> int:
    """Compare the checksums in files of others, archive by archive.

    Returns:
        How many bytes were read.
    """
    num_bytes = 0
    for index, place in metadata.storage_data.items():
        if getattr(place, "transform_descriptors", None):
            continue  # compressed by whoever wrote it
        file = path / place.relative_path
        try:
            fault = fault_of_archive(file, place.offset, place.length)
            num_bytes += place.length
        except OSError as error:
            fault = f"cannot be read: {error.strerror}"
        if fault is not None:
            faults.append(Fault(str(file), f"{fault}, where {index.fqn} is"))
    return num_bytes


# -- what they say


def _faults_of_tensors(path: Path, metadata: Metadata, sizes: Mapping[str, int]) -> Iterator[Fault]:
    """Tensors that are not whole, and parts that lie in no file.

    Args:
        sizes: of the files that there are, by name.
    """
    for name, about in metadata.state_dict_metadata.items():
        if not isinstance(about, TensorStorageMetadata):
            continue
        fault = fault_of_chunks(about)
        if fault:
            yield Fault(str(path), f"lacks a part of {name}: {fault}")
        for chunk in about.chunks:
            place = metadata.storage_data.get(MetadataIndex(name, chunk.offsets))
            if place is None:
                yield Fault(str(path), f"has no place for {name}'s part at {list(chunk.offsets)}")
                continue
            least = chunk.sizes.numel() * about.properties.dtype.itemsize
            is_plain = not getattr(place, "transform_descriptors", None)
            file = str(path / place.relative_path)
            if place.relative_path not in sizes:
                yield Fault(file, f"is not there: {name} is in it")
            elif place.offset + place.length > sizes[place.relative_path]:
                yield Fault(file, f"ends before a part of {name}")
            elif place.length < least and is_plain:
                yield Fault(file, f"has {place.length} bytes of {name}, where {least} should be")


def _faults_of_values(path: Path, manifest: Manifest) -> Iterator[Fault]:
    file = path / VALUES
    if VALUES not in manifest.files:
        yield Fault(str(file), "is not in the checkpoint's manifest")
        return
    try:
        content = json.loads(file.read_bytes())
        for name, value in content.items():
            of_ranks = value["ranks"] if "ranks" in value else [value["all"]]
            if "ranks" in value and len(of_ranks) != manifest.world_size:
                yield Fault(
                    str(file), f"has {name} of {len(of_ranks)} of {manifest.world_size} ranks"
                )
            for each in of_ranks:
                decode(each)
    except OSError:
        return  # which was said of the file
    except (ValueError, KeyError, TypeError, AttributeError, CheckpointError) as error:
        yield Fault(str(file), f"cannot be decoded: {error}")

"""Reading a checkpoint's tensors: of ours each byte is checked and none unpickled.

A tensor in a file of torch.distributed.checkpoint is a zip archive, as `torch.save` writes it: a
pickle that says what it is, and its bytes, uncompressed, as the entry ``data/0``. What it is, the
checkpoint's metadata say too, and ours are dense: the bytes are read past the pickle.

    .metadata       read by an unpickler that makes nothing but metadata
    __0_0.distcp    h.0.attn.weight, rows 0 to 15   ──►  the rows that this rank has of it now

Checkpoints of others (FSDP2's, of `dcp.save`) have no manifest: theirs are read by torch's own
restricted unpickler (`torch.load(weights_only=True)`), behind a look at the archives' own
checksums.
"""

from __future__ import annotations

import contextlib
import os
import struct
import zipfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from fxzero._compat import read_metadata
from fxzero.checkpoint.blocks import CheckedFile, Part
from fxzero.checkpoint.manifest import METADATA, Manifest
from fxzero.errors import CheckpointError

_THREADS = 2
_EXPECTED_BYTES = 1 << 30
"""Of a file, what is read ahead: what a disk gives while it is found out what is wanted."""
_AT_ONCE_BYTES = 1 << 20
"""Linux reads no more for one request."""
_OF_OWN = "ranks."
"""What is before the names of tensors that each rank has for itself: ``ranks.1.model.…``."""
_HEAD_BYTES = 4096
"""Of an archive, in which the entries before a tensor's bytes are: some hundred bytes."""
_ENTRY = b"PK\x03\x04"
_ENTRY_BYTES = 30
"""Of the header of an archive's entry; its last four are the lengths of what follows."""


class CheckedReader(FileSystemReader):
    """Reads what was written, or says what is wrong.

    Args:
        path: of the checkpoint.
        manifest: what it consists of; None for one that others have written.
    """

    def __init__(self, path: Path, manifest: Manifest | None) -> None:
        super().__init__(path)
        self.folder = path
        self.manifest = manifest
        self.num_bytes = 0
        """Of tensors, read so far."""

    def expect(self, name: str) -> None:
        """Let the system begin to read a file that will be wanted; one that is not there, or that
        it cannot begin with, is met when it is read."""
        Thread(target=_begin_to_read, args=(self.folder / name,), daemon=True).start()

    def read_file(self, name: str) -> bytes:
        """A whole file, checked.

        Raises:
            CheckpointError: it is not there, or not what was written.
        """
        path = self.folder / name
        if self.manifest is None:
            try:
                return path.read_bytes()
            except OSError as error:
                raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        record = self._record(name)
        with ThreadPoolExecutor(_THREADS) as pool, CheckedFile(path, record, pool) as file:
            data = bytearray(record.bytes)
            file.readinto(memoryview(data))
        return bytes(data)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Which tensors there are, and where.

        Raises:
            CheckpointError: they are not whole, or something else.
        """
        data = self.read_file(METADATA)
        try:
            metadata: Metadata = read_metadata(data)
        except Exception as error:  # an unpickler raises whatever it meets
            raise CheckpointError(
                f"{self.folder / METADATA} is no metadata of torch.distributed.checkpoint ({error})"
            ) from error
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the parts of tensors that this rank wants.

        Raises:
            CheckpointError: a file is not there, or not what was written.
        """
        if self.manifest is None:
            self._read_others(plan, planner)
        else:
            by_file: dict[str, list[ReadItem]] = {}
            for item in plan.items:
                place = self.storage_data[item.storage_index]
                by_file.setdefault(place.relative_path, []).append(item)
            with ThreadPoolExecutor(_THREADS) as pool:
                for name, items in by_file.items():
                    record = self._record(name)
                    places = [self.storage_data[item.storage_index] for item in items]
                    until = min(max(p.offset + p.length for p in places), record.bytes)
                    with CheckedFile(self.folder / name, record, pool, until) as file:
                        self._read_items(file, items, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _record(self, name: str) -> Any:
        assert self.manifest is not None
        if name not in self.manifest.files:
            raise CheckpointError(f"{self.folder / name} is not in the checkpoint's manifest")
        return self.manifest.files[name]

    def _read_items(
        self, file: CheckedFile, items: Iterable[ReadItem], planner: LoadPlanner
    ) -> None:
        places = self.storage_data
        by_place: dict[MetadataIndex, list[ReadItem]] = {}
        for item in items:
            by_place.setdefault(item.storage_index, []).append(item)
        for index in sorted(by_place, key=lambda index: places[index].offset):
            place = places[index]
            part = Part(file, place.offset, place.length)
            stored = self._stored(index)
            dtype, sizes = stored
            for item in by_place[index]:
                target = planner.resolve_tensor(item)
                whole = item.lengths == torch.Size(sizes)
                if whole and target.dtype is dtype and target.is_contiguous() and target.is_cpu:
                    _read_tensor(part, target, file.path)
                else:
                    tensor = torch.empty(sizes, dtype=dtype)
                    _read_tensor(part, tensor, file.path)
                    for dim, (start, length) in enumerate(
                        zip(item.storage_offsets, item.lengths, strict=True)
                    ):
                        tensor = tensor.narrow(dim, start, length)
                    target.copy_(tensor)
                self.num_bytes += target.nbytes
                planner.commit_tensor(item, target)

    def _stored(self, index: MetadataIndex) -> tuple[torch.dtype, torch.Size]:
        """The dtype and the sizes of a part that was written."""
        about = self.tensors[index.fqn]
        (chunk,) = (c for c in about.chunks if index.offset in (None, c.offsets))
        return about.properties.dtype, chunk.sizes

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Know what there is."""
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        self.tensors: Mapping[str, TensorStorageMetadata] = {
            name: about
            for name, about in metadata.state_dict_metadata.items()
            if isinstance(about, TensorStorageMetadata)
        }

    def _read_others(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        """What `dcp.save` has written."""
        places = {item.storage_index: self.storage_data[item.storage_index] for item in plan.items}
        try:
            for place in places.values():
                with open(self.folder / place.relative_path, "rb", buffering=0) as file:
                    _check_archive(Part(file, place.offset, place.length), Path(file.name))
            super().read_data(plan, planner)
        except CheckpointError:
            raise
        except Exception as error:  # whatever its archives and torch's unpickler meet
            raise CheckpointError(f"{self.folder} cannot be read: {error}") from error


def _begin_to_read(path: Path) -> None:
    if not hasattr(os, "posix_fadvise"):
        return
    with contextlib.suppress(OSError), open(path, "rb", buffering=0) as file:
        end = min(os.fstat(file.fileno()).st_size, _EXPECTED_BYTES)
        for begin in range(0, end, _AT_ONCE_BYTES):
            os.posix_fadvise(file.fileno(), begin, _AT_ONCE_BYTES, os.POSIX_FADV_WILLNEED)


def _check_archive(part: Part, path: Path) -> None:
    """Compare an archive's entries with the checksums that are beside them: torch does not."""
    try:
        with zipfile.ZipFile(part) as archive:
            wrong = archive.testzip()
    except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise CheckpointError(f"{path} holds no tensor where one should be ({error})") from error
    if wrong is not None:
        raise CheckpointError(
            f"{path} was changed since it was written: {wrong} has another checksum"
        )


def _read_tensor(part: Part, target: Tensor, path: Path) -> None:
    """Read a tensor's bytes past the pickle that is beside them."""
    if not target.numel():
        return
    begin = _begin_of_bytes(part)
    if begin is None or begin + target.nbytes > part.num_bytes:
        raise CheckpointError(
            f"{path} holds no tensor of {target.nbytes} bytes where one should be"
        )
    part.seek(begin)
    into = memoryview(target.view(-1).view(torch.uint8).numpy().data)
    assert part.readinto(into) == target.nbytes


def _begin_of_bytes(part: Part) -> int | None:
    """Where in an archive its entry ``data/0`` has its bytes: behind the entry's header, its name
    and what fills up to the next 64 bytes. (APPNOTE.TXT, 4.3.7)"""
    part.seek(0)
    head = part.read(_HEAD_BYTES)
    found = head.find(_ENTRY)
    while found >= 0:
        begin = found + _ENTRY_BYTES
        name_bytes, extra_bytes = struct.unpack_from("<HH", head, begin - 4)
        if head[begin : begin + name_bytes].endswith(b"/data/0"):
            return begin + name_bytes + extra_bytes
        found = head.find(_ENTRY, found + 1)
    return None


class IntoCopies(DefaultLoadPlanner):
    """Plans by the tensors that a model has, and reads into copies of them: the model stays as it
    is until all of it was read.

    Args:
        copies: this rank's parts, by name.
    """

    def __init__(self, copies: Mapping[str, Tensor]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._copies = copies

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """The copy of a tensor."""
        return self._copies[index.fqn]

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        """Nothing that is pickled is ever asked for."""
        assert read_item.type is not LoadItemType.BYTE_IO, read_item


def names_of_ranks(saved: Mapping[str, Any]) -> dict[str, dict[int, str]]:
    """Tensors that each rank has for itself: by name, their names in files by rank."""
    found: dict[str, dict[int, str]] = {}
    for full in saved:
        if full.startswith(_OF_OWN):
            _, rank, name = full.split(".", 2)
            found.setdefault(name, {})[int(rank)] = full
    return found

"""torch.distributed.checkpoint's files, hashed as they are written.

Each rank has one file, `__RANK_0.distcp`, tensor behind tensor, each as `torch.save` writes it, so
that everything that reads such checkpoints reads these. Tensors are dense, which lets ours read
them past the unpickler: see `fxzero.checkpoint.reader`.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from fxzero._compat import storage_info
from fxzero.checkpoint.folder import write_file
from fxzero.checkpoint.manifest import (
    BLOCK_BYTES,
    METADATA,
    FileRecord,
    block_hash,
    hash_blocks,
)
from fxzero.errors import CheckpointError

_SMALL_BYTES = 64 << 10
"""Of a tensor that one rank writes for all: a thousand of them are eight blocks."""


class HashedFile(io.RawIOBase):
    """A file that is written from front to back, and hashed meanwhile.

    An error of the disk is kept until `finish`: it must not pass through whoever writes, torch's
    own serialization among them, which ends the process over it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.error: OSError | None = None
        try:
            self._file = open(path, "wb", buffering=1 << 20)  # noqa: SIM115 - see finish
        except OSError as error:
            raise CheckpointError(f"{path} cannot be written: {error.strerror}") from error
        self._size = 0
        self._blocks: list[str] = []
        self._hash = block_hash()

    def writable(self) -> bool:
        """Yes."""
        return True

    def tell(self) -> int:
        """How many bytes were written."""
        return self._size

    def write(self, data: Any) -> int:
        """Append bytes."""
        view = memoryview(data).cast("B")
        if self.error is None:
            try:
                self._file.write(view)
            except OSError as error:
                self.error = error
            self._digest(view)
        return len(view)

    def _digest(self, view: memoryview) -> None:
        while len(view):
            room = BLOCK_BYTES - self._size % BLOCK_BYTES
            part = view[:room]
            self._hash.update(part)
            self._size += len(part)
            if len(part) == room:
                self._end_block()
            view = view[room:]

    def _end_block(self) -> None:
        self._blocks.append(self._hash.hexdigest())
        self._hash = block_hash()

    def finish(self) -> FileRecord:
        """Bring it to the disk.

        Raises:
            CheckpointError: the disk is full, or fails.
        """
        try:
            if self.error is None:
                self._file.flush()
                os.fsync(self._file.fileno())
        except OSError as error:
            self.error = error
        try:
            self._file.close()
        except OSError as error:  # what is still in its buffer
            self.error = self.error or error
        if self.error is not None:
            raise CheckpointError(
                f"{self.path} cannot be written after {self._size} bytes: {self.error.strerror}"
            ) from self.error
        if self._size % BLOCK_BYTES:
            self._end_block()
        return FileRecord(self._size, tuple(self._blocks))


class CopiesPlanner(DefaultSavePlanner):
    """Plans by the tensors that a model has, and writes copies of them.

    Args:
        copies: this rank's parts, by flat names.
    """

    def __init__(self, copies: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._copies = copies

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The copy of a tensor."""
        return (
            self._copies[index.fqn] if index.fqn in self._copies else super().lookup_object(index)
        )

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Who writes what: of what several ranks have, each the part that balances their files; but
        one of them what is small, as every rank will read it, a block of each file that has any."""
        first: dict[MetadataIndex, int] = {}
        for rank, plan in enumerate(all_plans):
            for item in filter(_is_small, plan.items):
                first.setdefault(item.index, rank)
        plans = [
            replace(plan, items=[i for i in plan.items if first.get(i.index, rank) == rank])
            for rank, plan in enumerate(all_plans)
        ]
        found: tuple[list[SavePlan], Metadata] = super().create_global_plan(plans)
        return found


class HashingWriter(FileSystemWriter):
    """Writes a checkpoint's files, and knows their hashes.

    Args:
        path: an empty folder.
        shared: further names of tensors, and under which they are written.
    """

    def __init__(self, path: Path, shared: Mapping[str, str]) -> None:
        super().__init__(path)
        self.folder = path
        self.records: dict[str, FileRecord] = {}
        """Of the files that this rank has written, by name."""
        self._shared = shared

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The folder is there, and empty."""
        return plan

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's parts of tensors to its file, behind the tensors that it writes for all
        ranks: each of them reads those, and by blocks.

        Raises:
            CheckpointError: the disk is full, or fails.
        """
        results = []
        if plan.items:
            name = f"{plan.storage_data.prefix}0.distcp"
            file = HashedFile(self.folder / name)
            for item in sorted(plan.items, key=_is_part):
                data = planner.resolve_data(item)
                begin = file.tell()
                if item.type is WriteItemType.BYTE_IO:
                    assert isinstance(data, io.BytesIO)
                    file.write(data.getbuffer())
                else:
                    assert isinstance(data, Tensor)
                    torch.save(_dense(data), file)  # type: ignore[arg-type]
                length = file.tell() - begin
                place = storage_info(name, begin, length)
                results.append(WriteResult(item.index, length, place))
                if file.error is not None:
                    break
            self.records[name] = file.finish()
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write which file holds what. Names that share a tensor share its place."""
        metadata.storage_data = {r.index: r.storage_data for each in results for r in each}
        places = list(metadata.storage_data.items())
        for name, first in self._shared.items():
            if first not in metadata.state_dict_metadata:
                continue
            metadata.state_dict_metadata[name] = metadata.state_dict_metadata[first]
            root = metadata.planner_data[first][0]
            metadata.planner_data[name] = (root, name.removeprefix(f"{root}."))
            for index, place in places:
                if index.fqn == first:
                    other = MetadataIndex(name, index.offset, index.index)
                    metadata.storage_data[other] = place
        metadata.storage_meta = StorageMeta(save_id=self.save_id)  # the path would be of this host
        data = pickle.dumps(metadata)
        write_file(self.folder / METADATA, data)
        self.records[METADATA] = hash_blocks(data)


def _is_part(item: WriteItem) -> bool:
    """Whether a tensor is in several parts, of which this is one."""
    about = item.tensor_data
    return about is not None and about.chunk.sizes != about.size


def _is_small(item: WriteItem) -> bool:
    """Whether it is no more to write than to see who writes least."""
    size = item.tensor_storage_size()
    return size is not None and size <= _SMALL_BYTES and not _is_part(item)


def _dense(tensor: Tensor) -> Tensor:
    """A tensor in the host's memory, in the order of its dims, that looks at no more than it is.
    Its bytes are its values: what torch conjugates or negates when it is read is done now."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return plain if plain.untyped_storage().nbytes() == plain.nbytes else plain.clone()

"""Reading a checkpoint's tensors: of ours each byte is checked and none unpickled.

    .metadata       read by an unpickler that makes nothing but metadata
    __0_0.distcp    h.0.attn.weight, rows 0 to 15   ──►  the rows that this rank has of it now

What a tensor is the metadata say, and ours are dense: its bytes go from the file right into memory.

Checkpoints of others (FSDP2's, of `dcp.save`) have no manifest: theirs are read by torch's own
restricted unpickler (`torch.load(weights_only=True)`), behind a look at the archives' own
checksums.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor
from torch.futures import Future

from fxzero._compat import read_metadata, without_torch_function
from fxzero.checkpoint.archives import fault_of_archive
from fxzero.checkpoint.blocks import NUM_THREADS, CheckedFile
from fxzero.checkpoint.manifest import METADATA, Manifest
from fxzero.checkpoint.together import Archive, Together
from fxzero.errors import CheckpointError

_OF_OWN = "ranks."
"""What is before the names of tensors that each rank has for itself: ``ranks.1.model.…``."""


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
        self.own: str | None = None
        """The file that this rank has written, where no other rank reads more than a little of it;
        None where others do, or who wrote what is not known."""
        self.num_bytes = 0
        """Of tensors, read so far."""

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
        with ThreadPoolExecutor(NUM_THREADS) as pool, CheckedFile(path, record, pool) as file:
            data = bytearray(record.bytes)
            file.fill([(0, memoryview(data))])
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
            with ThreadPoolExecutor(NUM_THREADS) as pool:
                for name, items in by_file.items():
                    record, is_alone = self._record(name), name == self.own
                    with CheckedFile(self.folder / name, record, pool, is_alone=is_alone) as file:
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
        together = Together(file)
        found: list[tuple[ReadItem, Tensor]] = []
        for index in sorted(by_place, key=lambda index: places[index].offset):
            place = places[index]
            archive = Archive(place.offset, place.length, *self._stored(index))
            for item in by_place[index]:
                target = planner.resolve_tensor(item)
                together.add(archive, item, target)
                found.append((item, target))
        together.read()
        for item, target in found:
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
                path = self.folder / place.relative_path
                fault = fault_of_archive(path, place.offset, place.length)
                if fault:
                    raise CheckpointError(f"{path} {fault}")
            super().read_data(plan, planner)
        except CheckpointError:
            raise
        except Exception as error:  # whatever its archives and torch's unpickler meet
            raise CheckpointError(f"{self.folder} cannot be read: {error}") from error


class IntoCopies(DefaultLoadPlanner):
    """Plans by the tensors that a model has, and reads into copies of them: the model stays as it
    is until all of it was read.

    Args:
        copies: this rank's parts, by name.
    """

    def __init__(self, copies: Mapping[str, Tensor]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._copies = copies

    def create_local_plan(self) -> LoadPlan:
        """Plan as torch's own planner does, which computes for every tensor anew how it lies over
        the ranks, and with which of all ranks' parts its own overlaps. Most lie as some other does,
        and most parts are one of those that were written."""
        layouts: dict[object, list[ChunkStorageMetadata]] = {}
        items: list[ReadItem] = []
        assert self.metadata is not None
        with without_torch_function():
            for name, tensor in self.state_dict.items():
                about = self.metadata.state_dict_metadata[name]
                assert isinstance(about, TensorStorageMetadata), name
                assert about.size == tensor.shape, (name, about.size, tensor.shape)
                is_sharded = isinstance(tensor, DTensor)
                over = (tensor.device_mesh, tensor.placements) if is_sharded else None
                key = over, tensor.shape
                if key not in layouts:
                    layouts[key] = _parts_here(tensor)
                items += _read_items(name, about, layouts[key])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """The copy of a tensor."""
        return self._copies[index.fqn]

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        """Nothing that is pickled is ever asked for."""
        assert read_item.type is not LoadItemType.BYTE_IO, read_item


def _parts_here(tensor: Tensor) -> list[ChunkStorageMetadata]:
    """What this rank has of a tensor: nothing of one that is on a mesh without it."""
    if not isinstance(tensor, DTensor):
        return [ChunkStorageMetadata(torch.Size([0] * tensor.dim()), tensor.shape)]
    if tensor.device_mesh.get_coordinate() is None:
        return []
    parts: list[ChunkStorageMetadata] = tensor.__create_chunk_list__()
    return parts


def _read_items(
    name: str, about: TensorStorageMetadata, parts: list[ChunkStorageMetadata]
) -> list[ReadItem]:
    """What to read for some parts of a tensor."""
    if len(parts) != 1 or parts[0] not in about.chunks:
        return create_read_items_for_chunk_list(name, about, parts)
    (part,) = parts
    number = about.chunks.index(part)
    none = torch.Size([0] * len(part.sizes))
    return [
        ReadItem(
            type=LoadItemType.TENSOR,
            dest_index=MetadataIndex(name, part.offsets, 0),
            dest_offsets=none,
            storage_index=MetadataIndex(name, part.offsets, number),
            storage_offsets=none,
            lengths=part.sizes,
        )
    ]


def names_of_ranks(saved: Mapping[str, Any]) -> dict[str, dict[int, str]]:
    """Tensors that each rank has for itself: by name, their names in files by rank."""
    found: dict[str, dict[int, str]] = {}
    for full in saved:
        if full.startswith(_OF_OWN):
            _, rank, name = full.split(".", 2)
            found.setdefault(name, {})[int(rank)] = full
    return found

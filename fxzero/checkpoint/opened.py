"""A checkpoint as it lies on disk, without a model: what it has, and its tensors a few at a time.

    found = Opened(find(Path("checkpoints")))        the newest that is whole
    for names in found.batches(found.tensors):
        for name, tensor in found.read(names).items():
            ...

Of ours each byte is checked on its way; see `fxzero.checkpoint.reader`.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from fxzero.checkpoint.coverage import fault_of_chunks
from fxzero.checkpoint.folder import is_of_others, is_ours, published, read_manifest
from fxzero.checkpoint.manifest import METADATA, VALUES, Manifest
from fxzero.checkpoint.reader import CheckedReader, IntoCopies
from fxzero.errors import CheckpointError, ConfigError, FxZeroWarning

AT_ONCE_BYTES = 64 << 20
"""Of tensors that are read together, if they are small."""


class Opened:
    """One checkpoint, of ours or of `torch.distributed.checkpoint.save`.

    Args:
        path: of the checkpoint.

    Raises:
        CheckpointError: a file of it is not there, or what says which tensors there are was
            changed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest: Manifest | None = read_manifest(path) if is_ours(path) else None
        self.reader = CheckedReader(path, self.manifest)
        self.metadata: Metadata = self.reader.read_metadata()
        self.reader.set_up_storage_reader(self.metadata, is_coordinator=True)
        self.tensors: Mapping[str, TensorStorageMetadata] = self.reader.tensors
        """What there is, in the order of the model's state dict."""

    def num_bytes(self, name: str) -> int:
        """Of one tensor, as it was saved."""
        about = self.tensors[name]
        return about.size.numel() * about.properties.dtype.itemsize

    def shared(self) -> dict[str, str]:
        """Further names of tensors that have several, and the first of each: they share a place in
        a file. What others save has every tensor once for each name."""
        first: dict[Any, str] = {}
        found = {}
        for name, about in self.tensors.items():
            indices = [MetadataIndex(name, chunk.offsets) for chunk in about.chunks]
            places = [self.reader.storage_data.get(index) for index in indices]
            key = tuple((p.relative_path, p.offset) for p in places if p is not None)
            known = first.setdefault(key, name) if key else name
            if known != name:
                found[name] = known
        return found

    def batches(self, names: Iterable[str]) -> Iterator[list[str]]:
        """Names, by so many as are read at once: one large tensor, or several small ones."""
        batch: list[str] = []
        batch_bytes = 0
        for name in names:
            num_bytes = self.num_bytes(name)
            if batch and batch_bytes + num_bytes > AT_ONCE_BYTES:
                yield batch
                batch, batch_bytes = [], 0
            batch.append(name)
            batch_bytes += num_bytes
        if batch:
            yield batch

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Whole tensors, in the host's memory.

        Raises:
            CheckpointError: a part of one is missing or was changed.
        """
        copies = {}
        for name in names:
            about = self.tensors[name]
            fault = fault_of_chunks(about)
            if fault:
                raise CheckpointError(f"{self.path}: {name} is not whole: {fault}")
            copies[name] = torch.empty(about.size, dtype=about.properties.dtype)
        planner = IntoCopies(copies)
        planner.set_up_planner(dict(copies), self.metadata, is_coordinator=True)
        plan = self.reader.prepare_local_plan(planner.create_local_plan())
        for item in plan.items:
            if item.storage_index not in self.reader.storage_data:
                raise CheckpointError(f"{self.path}: no file holds {item.storage_index.fqn}")
        self.reader.read_data(plan, planner)
        return copies

    def values(self) -> dict[str, Any] | None:
        """What is no tensor, by part, as `fxzero.checkpoint.saving` has written it; None in a
        checkpoint of others, who pickle it.

        Raises:
            CheckpointError: it was changed.
        """
        if self.manifest is None:
            return None
        content = json.loads(self.reader.read_file(VALUES))
        if not isinstance(content, dict):
            raise CheckpointError(f"{self.path / VALUES} holds no values")
        return content


def is_checkpoint(path: Path) -> bool:
    """Whether a folder is a checkpoint, and not a folder of several."""
    return is_ours(path) or is_of_others(path)


def find_all(path: Path, step: int | None = None) -> list[Path]:
    """Checkpoints that a path means: itself, or those in it, oldest first.

    Args:
        path: one checkpoint, or a folder of some.
        step: only that one of the folder's.

    Raises:
        ConfigError: there is none.
    """
    if not path.is_dir():
        what = "a file" if path.exists() else "not there"
        raise ConfigError(f"{path} is {what}. Name a folder of checkpoints, or one of them.")
    if is_checkpoint(path):
        if step is not None:
            raise ConfigError(f"{path} is one checkpoint: name its folder to choose step {step}")
        return [path]
    found = published(path)
    if not found:
        hint = (
            "It looks like one of DeepSpeed's: fxzero export --deepspeed converts those."
            if (path / "latest").is_file() or any(path.glob("*_optim_states.pt"))
            else f"A checkpoint is a folder step-… in it, or has a file {METADATA}."
        )
        raise ConfigError(f"{path} has no checkpoint. {hint}")
    wanted = [item.path for item in found if step in (None, item.step)]
    if not wanted:
        steps = ", ".join(str(item.step) for item in found)
        raise ConfigError(f"{path} has no checkpoint {step}. It has {steps}.")
    return wanted


def find(path: Path) -> Path:
    """One checkpoint: a path's own, or the newest in it whose files are all there. Newer ones that
    are passed over are warned of.

    Raises:
        ConfigError: there is none.
        CheckpointError: there is none that is whole.
    """
    if path.is_dir() and is_checkpoint(path):
        return path
    faults = []
    for candidate in reversed(find_all(path)):
        try:
            read_manifest(candidate)
        except CheckpointError as error:
            faults.append(str(error))
            continue
        for fault in faults:
            warnings.warn(f"a newer checkpoint is not whole: {fault}", FxZeroWarning, stacklevel=2)
        return candidate
    raise CheckpointError(f"{path} has no checkpoint that is whole:\n  " + "\n  ".join(faults))

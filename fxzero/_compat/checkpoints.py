"""What torch.distributed.checkpoint writes down of where tensors are."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch

_NAMES = {
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size",),
    "collections": ("OrderedDict",),
    "pathlib": ("PosixPath", "WindowsPath", "PurePosixPath"),
    "pathlib._local": ("PosixPath", "WindowsPath", "PurePosixPath"),
}
"""All that its metadata consist of: classes that hold data, and functions that look one up."""


def storage_info(file: str, offset: int, num_bytes: int) -> Any:
    """Where in which file a part of a tensor is. (torch 2.11 to 2.13)"""
    from torch.distributed.checkpoint import filesystem

    return vars(filesystem)["_StorageInfo"](file, offset, num_bytes)


class _MetadataUnpickler(pickle.Unpickler):
    """Makes nothing but what metadata consist of."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _NAMES.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a checkpoint's metadata")


def read_metadata(data: bytes) -> Any:
    """The metadata in a file of torch.distributed.checkpoint's, which is a pickle.

    Raises:
        Exception: it is something else. No code of its choice was run.
    """
    from torch.distributed.checkpoint.metadata import Metadata

    metadata = _MetadataUnpickler(io.BytesIO(data)).load()
    if not isinstance(metadata, Metadata):
        raise pickle.UnpicklingError(f"a {type(metadata).__name__} instead of metadata")
    return metadata

"""What torch.distributed.checkpoint writes down of where tensors are."""

from __future__ import annotations

import io
import pickle
from enum import Enum
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

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self.used: dict[int, tuple[Any, dict[str, Any]]] = {}
        """What was looked up, each with its attributes as they were: a pickle can set some."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _NAMES.get(module, ()):
            found = super().find_class(module, name)
            self.used.setdefault(id(found), (found, dict(vars(found))))
            return found
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if (module, name) == ("builtins", "getattr"):
            return _member
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a checkpoint's metadata")

    def undo_changes(self) -> bool:
        """Let all that was looked up be as it was; whether it was not."""
        changed = False
        for found, before in self.used.values():
            for name in set(vars(found)) - set(before):
                delattr(found, name)
                changed = True
            for name, value in before.items():
                if vars(found)[name] is not value:
                    setattr(found, name, value)
                    changed = True
        return changed


def _member(owner: Any, name: str) -> Enum:
    """A member of an enumeration, which Python 3.11.0 to 3.11.3 pickle as an attribute of it.

    Raises:
        pickle.UnpicklingError: anything else's attribute.
    """
    if isinstance(owner, type) and issubclass(owner, Enum) and name in owner.__members__:
        return owner.__members__[name]
    raise pickle.UnpicklingError(f"{name} of {owner!r} is no part of a checkpoint's metadata")


def read_metadata(data: bytes) -> Any:
    """The metadata in a file of torch.distributed.checkpoint's, which is a pickle.

    Raises:
        Exception: it is something else. No code of its choice was run.
    """
    from torch.distributed.checkpoint.metadata import Metadata

    unpickler = _MetadataUnpickler(data)
    try:
        metadata = unpickler.load()
    finally:
        changed = unpickler.undo_changes()
    if changed or not isinstance(metadata, Metadata):
        what = "changes to classes" if changed else type(metadata).__name__
        raise pickle.UnpicklingError(f"{what} instead of metadata")
    return metadata

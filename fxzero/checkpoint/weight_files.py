"""Files of weights in the safetensors format, written tensor by tensor.

    8 bytes     length of the header, little-endian
    header      {"__metadata__": {"format": "pt"}, NAME: {"dtype": "BF16", "shape": [2, 3],
                "data_offsets": [0, 12]}, …}, filled up with spaces to a multiple of 8
    the rest    the tensors' bytes, without gaps

(huggingface.co/docs/safetensors, "Format".) The safetensors library writes a file of tensors that
are all in memory. Here the header comes first, of what is known before anything is read, and one
tensor is held at a time. Several files have an index, as transformers reads them:

    model-00001-of-00002.safetensors
    model-00002-of-00002.safetensors
    model.safetensors.index.json    {"metadata": {"total_size": …}, "weight_map": {NAME: FILE, …}}
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fxzero.checkpoint.folder import sync_folder
from fxzero.errors import CheckpointError, ConfigError

SUFFIX = ".safetensors"
_ASIDE = ".writing-"
_SLICE_ELEMENTS = 1 << 20
"""Converted and written at once."""
_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}

Reader = Callable[[Sequence[str]], Iterator[tuple[str, Tensor]]]
"""Gives tensors, in the order in which they are asked for."""


@dataclass(frozen=True)
class Weight:
    """A tensor as it will be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Of its values."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class WeightFile:
    """One file, and what it will hold."""

    path: Path
    weights: tuple[Weight, ...]

    @property
    def num_bytes(self) -> int:
        """Of its tensors' values."""
        return sum(weight.num_bytes for weight in self.weights)

    @property
    def aside(self) -> Path:
        """Where it is written."""
        return self.path.with_name(_ASIDE + self.path.name)


@dataclass(frozen=True)
class WeightFiles:
    """All files of a model."""

    files: tuple[WeightFile, ...]
    index: Path | None
    """Which file holds what, where there are several."""

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return sum(file.num_bytes for file in self.files)


def plan(weights: Sequence[Weight], out: Path, shard_bytes: int) -> WeightFiles:
    """Which file will hold what, in the order of the weights.

    Args:
        weights: what to write.
        out: a file ``….safetensors``, or a folder for ``model.safetensors``.
        shard_bytes: of values in a file, unless one tensor has more.

    Raises:
        ConfigError: something of that name is there.
        CheckpointError: the format has no such dtype.
    """
    for weight in weights:
        if weight.dtype not in _NAMES:
            raise CheckpointError(
                f"{weight.name} is {str(weight.dtype).removeprefix('torch.')}, which a safetensors "
                "file cannot hold"
                + (": convert it, by --dtype." if weight.dtype.is_floating_point else ".")
            )
    folder, stem = _target(out)
    shards: list[list[Weight]] = [[]]
    held = 0
    for weight in weights:
        if shards[-1] and held + weight.num_bytes > shard_bytes:
            shards.append([])
            held = 0
        shards[-1].append(weight)
        held += weight.num_bytes
    # Wide dtypes come first, so that every tensor lies at a multiple of its elements' size.
    ordered = [tuple(sorted(shard, key=lambda w: -w.dtype.itemsize)) for shard in shards]
    if len(ordered) == 1:
        return WeightFiles((WeightFile(folder / f"{stem}{SUFFIX}", ordered[0]),), None)
    names = [f"{stem}-{i:05d}-of-{len(ordered):05d}{SUFFIX}" for i in range(1, len(ordered) + 1)]
    files = tuple(WeightFile(folder / n, s) for n, s in zip(names, ordered, strict=True))
    return WeightFiles(files, folder / f"{stem}{SUFFIX}.index.json")


def _target(out: Path) -> tuple[Path, str]:
    """A folder, and what names in it begin with.

    Raises:
        ConfigError: there are weights of that name, some of which a reader could take for these.
    """
    is_file = out.suffix == SUFFIX and not out.is_dir()
    folder, stem = (out.parent, out.stem) if is_file else (out, "model")
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file. Name a folder, or a file {stem}{SUFFIX}.")
    old = [
        *folder.glob(f"{_escaped(stem)}{SUFFIX}*"),
        *folder.glob(f"{_escaped(stem)}-*-of-*{SUFFIX}"),
    ]
    if old:
        raise ConfigError(
            f"{sorted(old)[0]} is there already: a reader could take it for a part of these "
            "weights. Delete it, or name another."
        )
    return folder, stem


def _escaped(stem: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in stem)


def write(files: WeightFiles, read: Reader, shared: Mapping[str, str]) -> dict[str, int]:
    """Write all files aside, then let them appear, the index last.

    Args:
        files: see `plan`.
        read: gives the tensors. Those that are of another dtype are converted.
        shared: further names of tensors, which are noted as the safetensors library's
            ``save_model`` does, and not written again.

    Returns:
        Tensors with values that have become infinite, and how many.

    Raises:
        CheckpointError: a file cannot be written, or a tensor cannot be read. Nothing is left.
    """
    folder = files.files[0].path.parent
    overflows: dict[str, int] = {}
    asides = [file.aside for file in files.files]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _check_space(folder, files.num_bytes)
        for file in files.files:
            _write_file(file, read, shared, overflows)
        if files.index is not None:
            asides.append(files.index.with_name(_ASIDE + files.index.name))
            _write_synced(asides[-1], [_index(files, shared)])
        for path in asides:
            path.rename(path.with_name(path.name.removeprefix(_ASIDE)))
        sync_folder(folder)
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or folder} cannot be written: {error.strerror or error}"
        ) from error
    finally:
        for path in asides:
            with contextlib.suppress(OSError):
                path.unlink()
    return overflows


def _check_space(folder: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        raise CheckpointError(
            f"{folder} has room for {free:,} bytes, and the weights are {num_bytes:,}. Free some "
            "space, or write them elsewhere."
        )


def _write_file(
    file: WeightFile, read: Reader, shared: Mapping[str, str], overflows: dict[str, int]
) -> None:
    def content() -> Iterator[bytes | memoryview]:
        yield _header(file, shared)
        tensors = read([weight.name for weight in file.weights])
        for weight, (name, tensor) in zip(file.weights, tensors, strict=True):
            assert weight.name == name, (weight, name)
            assert tuple(tensor.shape) == weight.shape, (weight, tensor.shape)
            for part, overflow in _parts(tensor, weight.dtype):
                if overflow:
                    overflows[name] = overflows.get(name, 0) + overflow
                yield part

    _write_synced(file.aside, content())


def _write_synced(path: Path, content: Iterator[bytes | memoryview] | Sequence[bytes]) -> None:
    with open(path, "wb") as file:
        for part in content:
            try:
                file.write(part)
            except OSError as error:
                error.filename = error.filename or path
                raise
        file.flush()
        os.fsync(file.fileno())


def _header(file: WeightFile, shared: Mapping[str, str]) -> bytes:
    here = {weight.name for weight in file.weights}
    notes = {name: first for name, first in shared.items() if first in here}
    content: dict[str, object] = {"__metadata__": {**notes, "format": "pt"}}
    begin = 0
    for weight in file.weights:
        end = begin + weight.num_bytes
        content[weight.name] = {
            "dtype": _NAMES[weight.dtype],
            "shape": list(weight.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _index(files: WeightFiles, shared: Mapping[str, str]) -> bytes:
    where = {w.name: file.path.name for file in files.files for w in file.weights}
    notes = {name: first for name, first in shared.items() if first in where}
    content = {"metadata": {**notes, "total_size": files.num_bytes}, "weight_map": where}
    return json.dumps(content, indent=2).encode() + b"\n"


def _parts(tensor: Tensor, dtype: torch.dtype) -> Iterator[tuple[memoryview, int]]:
    """A tensor's bytes, a few at a time, and how many values have become infinite in each."""
    if not tensor.numel():
        return
    may_overflow = (
        dtype.is_floating_point
        and tensor.is_floating_point()
        and torch.finfo(dtype).max < torch.finfo(tensor.dtype).max
    )
    for part in tensor.detach().reshape(-1).split(_SLICE_ELEMENTS):
        converted = part.to(dtype)
        overflow = int((converted.isinf() & ~part.isinf()).sum()) if may_overflow else 0
        yield memoryview(converted.contiguous().view(torch.uint8).numpy()), overflow

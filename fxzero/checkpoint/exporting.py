"""Weights for those who do not train: one safetensors file, or several with an index.

    step-0000000100      model.h.0.attn.weight   rows 0 to 15 on rank 0, 16 to 31 on rank 1
                         optimizer.state.…       left out, and counted
    model.safetensors    h.0.attn.weight         all rows, as transformers loads them

Read tensor by tensor, checked against the hashes, and written as it is read: the process holds one
large tensor, or 64 MiB of small ones, and never the model.
"""

from __future__ import annotations

import os
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fxzero.checkpoint import weight_files
from fxzero.checkpoint.by_name import plain_name
from fxzero.checkpoint.opened import Opened, find
from fxzero.checkpoint.reader import names_of_ranks
from fxzero.checkpoint.weight_files import Weight
from fxzero.errors import ConfigError, FxZeroWarning, nearest

SHARD_BYTES = 5 * 10**9
_MOST_SAID = 4


@dataclass(frozen=True)
class Exported:
    """What was written."""

    source: Path
    """The checkpoint."""
    files: tuple[Path, ...]
    index: Path | None
    """Which file holds what, where there are several."""
    num_tensors: int
    tensor_bytes: int
    """In the files."""
    dtypes: Mapping[str, int]
    """How many tensors are of which."""
    shared: Mapping[str, str]
    """Further names of tensors, which are not written again, and the name that was."""
    left_out: Mapping[str, int]
    """How many tensors and values are not the model's, by part."""
    overflows: Mapping[str, int]
    """Tensors with values that the dtype cannot hold, which are infinite now, and how many."""
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """As docs/export.md says."""
        return {
            "source": str(self.source),
            "files": [str(path) for path in self.files],
            "index": None if self.index is None else str(self.index),
            "num_tensors": self.num_tensors,
            "tensor_bytes": self.tensor_bytes,
            "dtypes": dict(self.dtypes),
            "shared": dict(self.shared),
            "left_out": dict(self.left_out),
            "overflows": dict(self.overflows),
            "seconds": self.seconds,
        }


def export(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    prefix: str | None = None,
) -> Exported:
    """Write a checkpoint's weights as safetensors, which transformers and others load.

        fxzero.checkpoint.export("checkpoints", "model.safetensors", dtype=torch.bfloat16)

    In one process; nothing is unpickled, and of our checkpoints every byte is checked. Tensors that
    have several names are written once, under the first; the others are noted in the file as the
    safetensors library's ``save_model`` does, and transformers ties them again.

    Args:
        path: a folder of checkpoints, of which the newest whole one is taken; or one checkpoint, of
            ours or of `torch.distributed.checkpoint.save`.
        out: a file ``….safetensors``, or a folder for ``model.safetensors``.
        dtype: of floating-point tensors; None leaves each as it was saved. The others stay.
        shard_bytes: at most in a file, unless one tensor has more. Where the weights are more,
            files are called ``model-00001-of-00003.safetensors`` and so on, beside an index.
        prefix: what is before the model's names in the checkpoint, and is taken off. None finds it:
            ``"model."`` in ours.

    Raises:
        ConfigError: there is no checkpoint, or no tensor under the prefix, or something stands
            where files would be written.
        CheckpointError: the checkpoint is not whole, or a file cannot be written. Nothing is left.
    """
    began = time.perf_counter()
    if type(shard_bytes) is not int or shard_bytes < 1:
        raise ConfigError(f"shard_bytes={shard_bytes!r} must be a whole number, 1 or more")
    found = Opened(find(Path(path)))
    prefix = _prefix(found) if prefix is None else prefix + "." * (prefix[-1:] not in ("", "."))
    stored = _names(found, prefix)
    places = {full: name for name, full in stored.items()}
    shared = {
        places[name]: places[first]
        for name, first in found.shared().items()
        if name in places and first in places
    }
    weights = [
        _weight(name, found.tensors[full].size, found.tensors[full].properties.dtype, dtype)
        for name, full in stored.items()
        if name not in shared
    ]

    def read(names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        for batch in found.batches([stored[name] for name in names]):
            tensors = found.read(batch)
            for full in batch:
                yield places[full], tensors.pop(full)

    files = weight_files.plan(weights, Path(out), shard_bytes)
    overflows = weight_files.write(files, read, shared)
    return exported(found.path, files, shared, _left_out(found, places), overflows, began)


def exported(
    source: Path,
    files: weight_files.WeightFiles,
    shared: Mapping[str, str],
    left_out: Mapping[str, int],
    overflows: Mapping[str, int],
    began: float,
) -> Exported:
    """What to tell of files that were written; warns of what became infinite in them."""
    weights = [weight for file in files.files for weight in file.weights]
    if overflows:
        some = ", ".join(list(overflows)[:_MOST_SAID])
        warnings.warn(
            f"{sum(overflows.values())} values of {len(overflows)} tensors ({some}) are too large "
            "for this dtype and are infinite now. Export in bfloat16 or float32.",
            FxZeroWarning,
            stacklevel=3,
        )
    return Exported(
        source=source,
        files=tuple(file.path for file in files.files),
        index=files.index,
        num_tensors=len(weights),
        tensor_bytes=files.num_bytes,
        dtypes=Counter(str(weight.dtype).removeprefix("torch.") for weight in weights),
        shared=shared,
        left_out=left_out,
        overflows=overflows,
        seconds=time.perf_counter() - began,
    )


def _weight(
    name: str, shape: Sequence[int], stored: torch.dtype, wanted: torch.dtype | None
) -> Weight:
    converts = wanted is not None and stored.is_floating_point
    return Weight(name, tuple(shape), wanted if converts and wanted is not None else stored)


def _prefix(found: Opened) -> str:
    """What is before the model's names.

    Raises:
        ConfigError: it is not clear.
    """
    if found.manifest is not None:
        return "model."
    # What `dcp.save` was given was nested, and it says how: a model's own names have dots too.
    paths = found.metadata.planner_data or {}
    parents = Counter(
        ".".join(map(str, path[:-1])) for name, path in paths.items() if name in found.tensors
    )
    models = [parent for parent in parents if parent.rpartition(".")[2] == "model"]
    candidates = list(parents) if len(parents) == 1 else models
    if len(candidates) != 1:
        some = ", ".join(f"{p or '(nothing)'} of {n} tensors" for p, n in parents.most_common(5))
        raise ConfigError(
            f"{found.path} does not say which of its tensors are the model's: before their names "
            f"stands {some or 'something that it does not say'}. Choose by --prefix."
        )
    return f"{candidates[0]}." if candidates[0] else ""


def _names(found: Opened, prefix: str) -> dict[str, str]:
    """The model's tensors: by their names, those in files.

    Raises:
        ConfigError: there is none under this prefix.
    """
    of_ranks = names_of_ranks(found.metadata.state_dict_metadata)
    firsts = {ranks[min(ranks)]: name for name, ranks in of_ranks.items()}
    names: dict[str, str] = {}
    for full in found.tensors:
        name = firsts.get(full, full)
        is_one = full in firsts or not full.startswith("ranks.") or found.manifest is None
        if is_one and name.startswith(prefix) and len(name) > len(prefix):
            names[plain_name(name.removeprefix(prefix))] = full
    if not names:
        prefixes = {name.rpartition(".")[0] for name in found.tensors} | {
            name.partition(".")[0] for name in found.tensors
        }
        raise ConfigError(
            f"{found.path} has no tensor whose name begins with {prefix!r}: "
            f"{nearest(prefix.removesuffix('.'), prefixes)}"
        )
    several = [name for name in of_ranks if name in {firsts.get(full) for full in names.values()}]
    if several:
        warnings.warn(
            f"each rank had its own {', '.join(several[:_MOST_SAID])} ({len(several)} tensors): "
            "those of the first rank were taken",
            FxZeroWarning,
            stacklevel=3,
        )
    return names


def _left_out(found: Opened, taken: Mapping[str, str]) -> dict[str, int]:
    """How many things of the checkpoint are not exported, by what their names begin with."""
    left = Counter(
        name.partition(".")[0] for name in found.metadata.state_dict_metadata if name not in taken
    )
    values = found.values()
    if values is not None:
        left["values"] = len(values)
    return dict(left)

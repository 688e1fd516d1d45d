"""Weights of DeepSpeed's ZeRO checkpoints, by DeepSpeed's own conversion.

    weights = fxzero.checkpoint.deepspeed_weights("ds_checkpoints")      fp32, by name
    model.load_state_dict(weights)

Weights alone: no optimizer state, schedule or generator. DeepSpeed's files are pickles, and reading
them runs what they name: convert checkpoints whose origin is known.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fxzero.checkpoint import weight_files
from fxzero.checkpoint.exporting import SHARD_BYTES, Exported, exported
from fxzero.checkpoint.weight_files import Weight
from fxzero.errors import CheckpointError, ConfigError


def deepspeed_weights(path: str | os.PathLike[str], tag: str | None = None) -> dict[str, Tensor]:
    """The fp32 weights of a checkpoint that DeepSpeed has saved: the whole model, in memory.

    Args:
        path: the folder that `save_checkpoint` was given.
        tag: the folder of one checkpoint in it; None takes what ``latest`` names.

    Raises:
        ConfigError: DeepSpeed is not installed, or there is no such checkpoint.
        CheckpointError: DeepSpeed cannot convert it.
    """
    lazy = _lazy_weights(Path(path), tag)
    whole = {id(tensor): tensor.contiguous() for tensor in lazy.values()}  # tied ones stay one
    return {name: whole[id(tensor)] for name, tensor in lazy.items()}


def export_deepspeed(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    tag: str | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Exported:
    """Write them as `fxzero.checkpoint.export` writes others'. DeepSpeed reads all of its files
    into memory first.

    Args:
        path: see `deepspeed_weights`.
        out: see `fxzero.checkpoint.export`.
        tag: see `deepspeed_weights`.
        dtype: of floating-point tensors; None leaves them in fp32.
        shard_bytes: see `fxzero.checkpoint.export`.

    Raises:
        ConfigError: see `deepspeed_weights`, `fxzero.checkpoint.export`.
        CheckpointError: see there.
    """
    began = time.perf_counter()
    lazy = _lazy_weights(Path(path), tag)
    first: dict[int, str] = {}
    shared = {}
    weights = []
    for name, tensor in lazy.items():
        known = first.setdefault(id(tensor), name)
        if known != name:
            shared[name] = known
            continue
        is_float = tensor.dtype.is_floating_point
        wanted = dtype if dtype is not None and is_float else tensor.dtype
        weights.append(Weight(name, tuple(tensor.shape), wanted))

    def read(names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        for name in names:
            yield name, lazy[name].contiguous()

    files = weight_files.plan(weights, Path(out), shard_bytes)
    overflows = weight_files.write(files, read, shared)
    return exported(Path(path), files, shared, {}, overflows, began)


def _lazy_weights(path: Path, tag: str | None) -> Mapping[str, Any]:
    """Tensors, or what `contiguous()` makes tensors of."""
    if not path.is_dir():
        raise ConfigError(f"{path} is no folder. Name the one that save_checkpoint was given.")
    if tag is None and not (path / "latest").is_file():
        raise ConfigError(
            f"{path} has no file 'latest', by which DeepSpeed finds its newest checkpoint. Name "
            "the folder that save_checkpoint was given, with global_step… in it."
        )
    try:
        zero_to_fp32 = importlib.import_module("deepspeed.utils.zero_to_fp32")
    except ImportError as error:
        raise ConfigError(
            f"DeepSpeed's checkpoints are converted by DeepSpeed itself ({error}): pip install "
            "'deepspeed>=0.19.8', or run the script zero_to_fp32.py that it has left in the "
            "checkpoint where it is installed."
        ) from error
    convert = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint
    try:
        with contextlib.redirect_stdout(sys.stderr):  # where it reports on itself
            found: Mapping[str, Any] = convert(str(path), tag=tag, lazy_mode=True)
    except Exception as error:  # whatever its unpickler meets
        raise CheckpointError(
            f"DeepSpeed cannot convert {path}: {type(error).__name__}: {error}"
        ) from error
    return found

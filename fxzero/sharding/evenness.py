"""Parameters that ranks cannot share evenly, and what that costs.

    experts (8, 28672, 4096) over 64 ranks    eight ranks hold a row each, the others none
                                              a gather carries 64 rows, 56 of them padding

Dim 0 is cut, as in FSDP2, so that a parameter is shared by no more ranks than it has rows.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable

from fxzero.errors import FxZeroWarning
from fxzero.sharding.params import ParamSpec

MOST_SHARE = 0.25
"""Of padding in what is gathered of a model, that is worth no words."""
LEAST_BYTES = 64 << 20
"""Of padding, that is worth words."""


def warn_of_uneven_shards(specs: Iterable[ParamSpec]) -> None:
    """Say it if ranks that have no rows of large parameters leave them to the others."""
    shared = ((spec, spec.shard_group) for spec in specs)
    sized = [(spec, group.size) for spec, group in shared if group is not None]
    sharded = [spec for spec, _ in sized]
    full_bytes = sum(spec.num_elements * spec.dtype.itemsize for spec in sharded)
    short = [(spec, ranks) for spec, ranks in sized if spec.shape[0] < ranks]
    padding_bytes = sum(_padding_bytes(spec) for spec, _ in short)
    if padding_bytes < max(MOST_SHARE * full_bytes, LEAST_BYTES):
        return
    worst, ranks = max(short, key=lambda found: _padding_bytes(found[0]))
    held_bytes = sum(spec.chunk_rows * _row_bytes(spec) for spec in sharded)
    warnings.warn(
        f"dim 0 of a parameter is what ranks share, and some have fewer rows than the {ranks} "
        f"ranks ({len(short)}, as {worst.name} {worst.shape}). Ranks that have rows of all hold "
        f"{held_bytes / 2**30:.1f} GiB of parameters, where an even share is "
        f"{full_bytes / ranks / 2**30:.1f}, and gathers carry {padding_bytes / 2**30:.1f} GiB of "
        f"padding. Make parameters of it that have more rows (dims 0 and 1 in one, and a view in "
        f"forward), or one of each row, or share among {worst.shape[0]} ranks, by a mesh of "
        "(replicate, shard).",
        FxZeroWarning,
        stacklevel=4,
    )


def _row_bytes(spec: ParamSpec) -> int:
    return math.prod(spec.shape[1:]) * spec.dtype.itemsize


def _padding_bytes(spec: ParamSpec) -> int:
    return (spec.padded_rows - spec.shape[0]) * _row_bytes(spec)

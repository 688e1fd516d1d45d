"""This rank's part of a value that all ranks of a group have."""

from __future__ import annotations

import math

from torch import Tensor

from fxzero._compat import resolve_process_group


def part_length(numel: int, size: int) -> int:
    """Elements in each rank's part."""
    return math.ceil(numel / size)


def own_part(value: Tensor, size: int, group: str) -> Tensor:
    """A copy of this rank's part: dim 0 of the parts of all ranks, one behind the other, is the
    value's memory, and zeros where it does not go up.

    Args:
        value: contiguous.
        size: how many ranks have it.
        group: their process group's name.
    """
    rank = resolve_process_group(group).rank()
    length = part_length(value.numel(), size)
    found = value.view(-1)[rank * length : (rank + 1) * length]
    if found.numel() == length:
        return found.clone()
    part = value.new_zeros(length)
    part[: found.numel()] = found
    return part


own_part.cuts_part = True  # type: ignore[attr-defined]  # see graph.belongings

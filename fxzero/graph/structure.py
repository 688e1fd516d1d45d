"""When two runs of nodes are alike: same operators, same constants, alike inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from fxzero._compat import is_symbolic


class StructureKey(NamedTuple):
    """Equal for runs of equal structure."""

    nodes: tuple[object, ...]
    outputs: tuple[int, ...]
    num_threads: int
    environment: int | None
    """The shape environment's identity if sizes are symbolic: symbols mean something only
    within one."""


def structure_key(
    inputs: Sequence[fx.Node], run: Sequence[fx.Node], outputs: Sequence[fx.Node], shape_env: Any
) -> StructureKey:
    """Describe a run of nodes: what it reads, does, and gives to others."""
    index = {node: _Reference(position) for position, node in enumerate((*inputs, *run))}
    described = [_describe(node.meta["val"]) for node in inputs]
    parts = [description for description, _ in described]
    for node in run:
        arguments = fx.map_arg((node.args, node.kwargs), index.__getitem__)  # type: ignore[arg-type]  # any object with a repr
        parts.append((node.target, repr(arguments)))
    return StructureKey(
        tuple(parts),
        tuple(index[node].position for node in outputs),
        torch.get_num_threads(),
        id(shape_env) if any(symbolic for _, symbolic in described) else None,
    )


def _describe(value: Any) -> tuple[object, bool]:
    """What a compilation depends on in an input, and whether that is symbolic."""
    if isinstance(value, Tensor):
        symbolic = any(is_symbolic(s) for s in (*value.shape, *value.stride()))
        shape = (str(tuple(value.shape)), str(tuple(value.stride())))
        offset = value.storage_offset()
        # Code is given an address. Where vectors must lie on certain ones, on CUDA, Inductor looks
        # at each when it runs, and copies what does not.
        if is_symbolic(offset):
            return (*shape, str(offset), value.dtype, value.device), True
        return (*shape, value.dtype, value.device), symbolic
    return str(value), is_symbolic(value)


class _Reference:
    """A node in a key: its position."""

    def __init__(self, position: int) -> None:
        self.position = position

    def __repr__(self) -> str:
        return f"%{self.position}"

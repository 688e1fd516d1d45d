"""The graphs of all ranks in one process, on random whole numbers: see
`fxzero.inspect.bisect.lockstep`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fxzero.graph import StepGraph
from fxzero.inspect.bisect.lockstep import Lockstep


def run(graphs: Sequence[StepGraph], inputs: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    """What each rank's graph returns; `inputs` by rank, in the order of the placeholders."""
    return Lockstep(graphs).run(inputs)


def random_inputs(graphs: Sequence[StepGraph], seed: int = 0) -> list[list[Any]]:
    """Small whole numbers: shards of the same parameters, and data of each rank's own.

    Sums and products of small whole numbers are exact in float64, in any order.
    """
    generator = torch.Generator().manual_seed(seed)
    fulls: dict[str, Tensor] = {}
    inputs: list[list[Any]] = []
    for graph in graphs:
        values: list[Any] = []
        for node in graph.graph.find_nodes(op="placeholder"):
            fake = node.meta["val"]
            if not isinstance(fake, Tensor):
                values.append(None)  # a mesh
                continue
            key = graph.inputs.get(node)
            if key is None:
                values.append(_integers(fake.shape, fake.dtype, generator))
                continue
            spec = graph.specs[key]
            if spec.name not in fulls:
                fulls[spec.name] = _integers(spec.shape, spec.dtype, generator)
            full = fulls[spec.name]
            values.append(full.clone() if spec.shard_group is None else full[spec.local_rows])
        inputs.append(values)
    return inputs


def _integers(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    return torch.randint(-2, 3, tuple(shape), generator=generator).to(dtype)

"""Whose bytes travel: each bucket shared out to the modules whose parameters it carries.

A bucket of ``qkv.weight`` and ``qkv.bias`` counts for module ``qkv``; one of several modules counts
for each by the size of its parameters, so that the sums are the buckets'.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fxzero.graph.stamps import Role
from fxzero.inspect.analysis import TransferRow
from fxzero.inspect.detail import NodeRow


@dataclass(frozen=True)
class ModuleTraffic:
    """What one module moves in a step by one kind of transfer."""

    module: str
    """Of what moves no parameter, the layer."""
    operator: str
    lane: str
    tensors: int
    num_bytes: int
    """Of the full tensors."""
    sent_bytes: int
    """By each rank, to others."""


def module_traffic(
    transfers: Sequence[TransferRow], nodes: Sequence[NodeRow]
) -> list[ModuleTraffic]:
    """Share out transfers, in the order in which modules first travel."""
    sizes = parameter_sizes(nodes)
    found: dict[tuple[str, str, str], list[float]] = {}
    for row in transfers:
        for module, tensors, share in _shares(row, sizes):
            sums = found.setdefault((module, row.operator, row.lane), [0, 0.0, 0.0])
            sums[0] += tensors * row.runs
            sums[1] += share * row.num_bytes * row.runs
            sums[2] += share * row.sent_bytes
    return [
        ModuleTraffic(*key, int(tensors), round(num_bytes), round(sent))
        for key, (tensors, num_bytes, sent) in found.items()
    ]


def parameter_sizes(nodes: Sequence[NodeRow]) -> dict[str, int]:
    """Bytes of what a graph gets of each parameter: shards are to each other as the whole ones."""
    found: dict[str, int] = {}
    for node in nodes:
        if node.role == Role.INPUT.value and len(node.params) == 1:
            name = node.params[0]
            found[name] = max(node.num_bytes, found.get(name, 0))
    return found


def _shares(row: TransferRow, sizes: Mapping[str, int]) -> list[tuple[str, int, float]]:
    """By module, how many tensors, and which share of the bucket's bytes."""
    if not row.params:
        return [(row.layer, 1, 1.0)]
    known = all(sizes.get(name) for name in row.params)
    weights = {name: sizes[name] if known else 1 for name in row.params}
    whole = sum(weights.values())
    found: dict[str, list[float]] = {}
    for name, weight in weights.items():
        sums = found.setdefault(name.rpartition(".")[0], [0, 0.0])
        sums[0] += 1
        sums[1] += weight / whole
    return [(module, int(tensors), share) for module, (tensors, share) in found.items()]

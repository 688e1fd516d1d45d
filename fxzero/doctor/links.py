"""What carries bytes between ranks, as the α–β model has it: a `LinkSpec` inside a node, and one
between nodes.

    one node     intra from a collective of all ranks
    rank a node  inter likewise
    both         intra from the node's ranks, and inter from what a collective of all takes beyond
                 that, as `AnalyticCosts` adds the two up

Figures are the mean of a gather and a reduce-scatter, which steps have most of.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from statistics import median

import torch
import torch.distributed as dist

from fxzero.cost.cluster import LinkSpec
from fxzero.cost.links import CollectiveFigures, time_collective, time_further_tensor
from fxzero.transfer import TransferKind

KINDS = (TransferKind.ALL_GATHER, TransferKind.REDUCE_SCATTER)
ROUNDS = 3
"""How often each is measured; the middle one counts: a step does not have the best of them."""
LEAST = 1e-15
"""Seconds a byte: a link that takes no time at all has not been seen."""


@dataclass(frozen=True)
class Links:
    """Those that were measured."""

    intra: LinkSpec | None
    inter: LinkSpec | None


def measure_links(device: torch.device, per_node: int, num_nodes: int) -> Links:
    """Measure the links between all ranks, which all of them call.

    Args:
        per_node: ranks of each node; they are numbered node by node, as torchrun does.
        num_nodes: how many there are.
    """
    if per_node * num_nodes == 1:
        return Links(None, None)
    whole, whole_us = _figures(device, None)
    if num_nodes == 1:
        return Links(link_of(whole, per_node, whole_us), None)
    if per_node == 1:
        return Links(None, link_of(whole, num_nodes, whole_us))
    own = None
    for node in range(num_nodes):
        ranks = list(range(node * per_node, (node + 1) * per_node))
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            own = group
    inside, inside_us = _figures(device, own)
    dist.barrier()
    between = link_between(whole, inside, num_nodes, max(whole_us - inside_us, 0.0))
    return Links(link_of(inside, per_node, inside_us), between)


def link_of(figures: CollectiveFigures, size: int, tensor_us: float = 0.0) -> LinkSpec:
    """A link by which `AnalyticCosts` has a ring of some ranks take what was measured."""
    share = (size - 1) / size
    return LinkSpec(
        bytes_per_s=1.0 / max(figures.us_per_byte * 1e-6 / share, LEAST),
        latency_us=figures.latency_us / (size - 1),
        host_s_per_byte=figures.host_us_per_byte * 1e-6 / share,
        host_us=figures.host_us,
        tensor_us=tensor_us,
    )


def link_between(
    whole: CollectiveFigures,
    inside: CollectiveFigures,
    num_nodes: int,
    tensor_us: float = 0.0,
) -> LinkSpec:
    """The link between nodes, from collectives of all ranks and of a node's."""
    beyond = CollectiveFigures(
        max(whole.latency_us - inside.latency_us, 0.0),
        max(whole.us_per_byte - inside.us_per_byte, 0.0),
        max(whole.host_us - inside.host_us, 0.0),
        max(whole.host_us_per_byte - inside.host_us_per_byte, 0.0),
    )
    return link_of(beyond, num_nodes, tensor_us)


def _figures(
    device: torch.device, group: dist.ProcessGroup | None
) -> tuple[CollectiveFigures, float]:
    """Of the mean collective; and what each further tensor of it takes."""
    middle, further_us = [], []
    for kind in KINDS:
        rounds = [astuple(time_collective(kind, device.type, group)) for _ in range(ROUNDS)]
        middle.append([median(found) for found in zip(*rounds, strict=True)])
        times = [time_further_tensor(kind, device.type, group) for _ in range(ROUNDS)]
        further_us.append(median(times))
    means = [sum(found) / len(KINDS) for found in zip(*middle, strict=True)]
    return CollectiveFigures(*means), sum(further_us) / len(KINDS)

"""Costs from figures of a machine: a roofline for compute, α–β for collectives.

compute     max(FLOPs / (peak · efficiency(FLOPs)), bytes / bandwidth) for each operator that
            no other can be fused into, and the bytes that enter and leave each fused chain
            (Williams et al. 2009, "Roofline"); on CPUs also the exp, tanh and erf within it
gather      (g−1)·α + (g−1)/g · S/B inside a node of g ranks, then (n−1)·α' + (n−1)/n · S/B'
            between n nodes, S the full bytes: the ring of Thakur et al. 2005, section 4.1,
            once in each level; and what each further tensor of a bucket takes. Of ranks that are
            k apart g/k are in a node, and k groups, g at most, are on its way out: S·k/B'
all-reduce  a reduce-scatter and a gather: twice that
copy        α + S/B of the rank's way to its host
host        an update's bytes over the bandwidth of the host's memory, which is that of a CPU's own
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from fxzero._compat import hint, hinted
from fxzero.cost.attention import flops_on_cpu, is_cpu_attention, share_on_cpu
from fxzero.cost.cluster import ClusterSpec, HostSpec
from fxzero.cost.model import TransferCost
from fxzero.graph.aliases import is_view
from fxzero.graph.operators import num_bytes, tensor_bytes, uses_generator
from fxzero.graph.pieces import Piece, Pieces, is_call
from fxzero.graph.stamps import Role, stamp_of
from fxzero.regions.cutout import cut_out, runs
from fxzero.transfer import Pool, Transfer, TransferKind

DTYPE_NAMES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
}
"""As a cluster's `peak_flops` names them."""


class ProductKind(StrEnum):
    """What reaches its own share of the peak."""

    MATRIX = "matrix"
    CONVOLUTION = "convolution"
    ATTENTION = "attention"


class Product(NamedTuple):
    """An operator with a FLOP formula."""

    flops: float
    num_bytes: float
    """That it reads and writes."""
    dtype: str
    kind: ProductKind = ProductKind.MATRIX
    share_on_cpu: float = 1.0
    """Of the FLOPs, what a CPU computes."""


@dataclass(frozen=True)
class Work:
    """What a run of nodes has to do."""

    products: tuple[Product, ...]
    streamed_bytes: float
    """What all other operators read and write, fused."""
    num_kernels: int
    num_random: int = 0
    """Random numbers."""
    num_transcendental: int = 0
    """Values of exp, tanh, erf and their like."""
    updated_bytes: float = 0.0
    """What optimizers read and write."""

    def __add__(self, other: Work) -> Work:
        return Work(
            self.products + other.products,
            self.streamed_bytes + other.streamed_bytes,
            self.num_kernels + other.num_kernels,
            self.num_random + other.num_random,
            self.num_transcendental + other.num_transcendental,
            self.updated_bytes + other.updated_bytes,
        )


def flops_of(node: fx.Node) -> float:
    """FLOPs of an operator by torch's own formulas; 0 if there is none."""
    if is_cpu_attention(node):
        return flops_on_cpu(node)
    packet = getattr(node.target, "overloadpacket", None)
    formula = flop_registry.get(packet) if packet is not None else None
    if formula is None:
        return 0.0
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: hinted_value(n.meta["val"]))
    try:
        return float(formula(*args, **kwargs, out_val=hinted_value(node.meta["val"])))
    except (TypeError, AttributeError):  # arguments the formula does not take
        return 0.0


def hinted_value(value: Any) -> Any:
    """A value of sizes that are numbers: a formula computes with them, and compares them."""
    if isinstance(value, (list, tuple)):
        return type(value)(hinted_value(part) for part in value)
    if isinstance(value, torch.Tensor):
        return hinted(value)
    return hint(value) if isinstance(value, torch.SymInt) else value


def value_bytes(node: fx.Node) -> int:
    """Bytes of a node's tensors, several if it returns several."""
    value = node.meta.get("val")
    values = value if isinstance(value, (list, tuple)) else (value,)
    return sum(map(tensor_bytes, values))


def work_of(nodes: Sequence[fx.Node]) -> Work:
    """Sum up what nodes do when their pointwise operators and reductions are fused.

    A fused chain reads what comes from outside of it and writes what others read of it.
    """
    if any(map(is_call, nodes)):
        return _work_of_outline(nodes)
    inside = set(nodes)
    products: list[Product] = []
    streamed = updated = 0.0
    kernels = num_random = num_transcendental = 0
    chain_of: dict[fx.Node, bool] = {}
    for node in nodes:
        if node.op != "call_function" or is_view(node) or node.target is operator.getitem:
            continue
        if (known := node.meta.get("fxzero_work")) is not None:
            products += known.products
            streamed += known.streamed_bytes
            kernels += known.num_kernels
            num_random += known.num_random
            num_transcendental += known.num_transcendental
            updated += known.updated_bytes
            continue
        flops = flops_of(node)
        written = value_bytes(node)
        if flops:
            read = sum(num_bytes(n) for n in node.all_input_nodes)
            share = share_on_cpu(node) if is_cpu_attention(node) else 1.0
            moved, dtype = read + written, _dtype_of(node)
            products.append(Product(flops, moved, dtype, _kind_of(node), share))
            chain_of[node] = False
            continue
        if stamp_of(node).role is Role.UPDATE:
            updated += _update_bytes(node)
            kernels += 1
            continue
        if uses_generator(node):
            num_random += _numbers_in(node)
        if getattr(node.target, "overloadpacket", None) in _TRANSCENDENTAL:
            num_transcendental += _numbers_in(node)
        chain_of[node] = True
        read = 0
        new = True
        for source in node.all_input_nodes:
            while is_view(source) and source in inside:
                source = source.all_input_nodes[0]
            if chain_of.get(source):
                new = False
            else:
                read += num_bytes(source)
        leaves = any(not chain_of.get(user, _streams(user, inside)) for user in node.users)
        streamed += read + (written if leaves else 0)
        kernels += new
    return Work(
        tuple(products), streamed, kernels + len(products), num_random, num_transcendental, updated
    )


def _numbers_in(node: fx.Node) -> int:
    """Elements of a node's tensor, of the first one if there are several."""
    value = node.meta.get("val")
    first = value[0] if isinstance(value, (list, tuple)) else value
    return hint(first.numel()) if isinstance(first, torch.Tensor) else 0


def work_of_piece(piece: Piece) -> Work:
    """What a piece has to do."""
    if "work" not in piece.facts:
        piece.facts["work"] = work_of(piece.nodes)
    known: Work = piece.facts["work"]
    return known


def _work_of_outline(nodes: Sequence[fx.Node]) -> Work:
    """What nodes do some of which call pieces: what is called fuses with what stands beside it."""
    joined = [run for run in runs(nodes) if any(map(is_call, run))]
    apart = {node for run in joined for node in run}
    total = work_of([node for node in nodes if node not in apart])
    for run in joined:
        total += work_of_piece(cut_out(Pieces(), run, "work").piece)
    return total


def _kind_of(node: fx.Node) -> ProductKind:
    """Which of the shares of the peak an operator reaches."""
    packet = getattr(node.target, "overloadpacket", None)
    if packet in _CONVOLUTIONS:
        return ProductKind.CONVOLUTION
    if "attention" in getattr(packet, "__name__", ""):
        return ProductKind.ATTENTION
    return ProductKind.MATRIX


_aten = torch.ops.aten
_CONVOLUTIONS = {
    _aten.convolution,
    _aten._convolution,
    _aten.convolution_backward,
    _aten.convolution_overrideable,
    _aten.convolution_backward_overrideable,
    _aten.cudnn_convolution,
}
_TRANSCENDENTAL = {
    *(_aten.exp, _aten.exp2, _aten.expm1, _aten.log, _aten.log2, _aten.log10, _aten.log1p),
    *(_aten.erf, _aten.erfc, _aten.erfinv, _aten.lgamma, _aten.digamma),
    *(_aten.tanh, _aten.sigmoid, _aten.sinh, _aten.cosh, _aten.asinh, _aten.acosh, _aten.atanh),
    *(_aten.sin, _aten.cos, _aten.tan, _aten.asin, _aten.acos, _aten.atan, _aten.atan2),
    # Whole, where nothing decomposes them: lower_regions.backend=eager.
    *(_aten._softmax, _aten._log_softmax, _aten._safe_softmax, _aten.softplus),
    *(_aten.gelu, _aten.gelu_backward, _aten.silu, _aten.silu_backward),
}
"""What a CPU computes by polynomials, one for each number that the operator returns."""


def _dtype_of(node: fx.Node) -> str:
    """The name of the dtype that an operator multiplies in: its first operand's. What it returns
    may be wider: a loss of logits that no one sees is summed up in float32."""
    values = [source.meta.get("val") for source in node.all_input_nodes]
    found = (DTYPE_NAMES.get(v.dtype) for v in values if isinstance(v, torch.Tensor))
    return next((name for name in found if name), "fp32")


def _streams(node: fx.Node, inside: set[fx.Node]) -> bool:
    """Whether a later node will be fused with the ones that it reads."""
    if node not in inside:
        return False
    if is_view(node) or node.target is operator.getitem:
        return all(_streams(user, inside) for user in node.users)
    return not flops_of(node)


def _update_bytes(node: fx.Node) -> float:
    """Bytes that an optimizer reads and writes: every tensor it gets, all but gradients twice."""
    tensors = sum(num_bytes(n) for n in node.all_input_nodes)
    return 2.0 * tensors


@dataclass(frozen=True)
class AnalyticCosts:
    """A roofline on a device, α–β on its links."""

    cluster: ClusterSpec

    @property
    def name(self) -> str:
        """See `CostModel`."""
        return f"analytic, {self.cluster.name}"

    def compute_us(self, nodes: Sequence[fx.Node]) -> float:
        """See `CostModel`."""
        return self.work_us(work_of(nodes))

    def operator_us(self, node: fx.Node) -> float:
        """See `CostModel`."""
        return self.compute_us([node])

    def stream_us(self, num_bytes: int) -> float:
        """See `CostModel`."""
        return self.work_us(Work((), num_bytes, 0))

    def work_us(self, work: Work) -> float:
        """Microseconds that some work takes."""
        device = self.cluster.device
        bandwidth = device.memory_bytes_per_s * device.memory_efficiency
        seconds = work.streamed_bytes / bandwidth
        if work.updated_bytes:
            seconds += work.updated_bytes / self._update_bytes_per_s
        shares = {
            ProductKind.MATRIX: device.flops_efficiency,
            ProductKind.CONVOLUTION: device.flops_efficiency * device.convolution_efficiency,
            ProductKind.ATTENTION: device.flops_efficiency * device.attention_efficiency,
        }
        fastest = max(device.peak_flops.values())
        for flops, moved, dtype, kind, share in work.products:
            if device.type == "cpu":
                flops *= share
            peak = device.peak_flops.get(dtype, device.peak_flops["fp32"])
            # What a product's begin and end take is a time, whatever it multiplies.
            lost = device.half_peak_flops * peak / fastest
            seconds += max((flops + lost) / (peak * shares[kind]), moved / bandwidth)
        if device.random_per_s:
            seconds += work.num_random / device.random_per_s
        if device.transcendental_per_s:
            seconds += work.num_transcendental / device.transcendental_per_s
        return seconds * 1e6 + work.num_kernels * device.launch_us

    @property
    def _update_bytes_per_s(self) -> float:
        """Of an optimizer on the device: where that is a CPU, its memory is the host's."""
        device = self.cluster.device
        has_host = self.cluster.host != HostSpec()  # else its figures are nobody's
        if device.type == "cpu" and has_host:
            return self.cluster.host.memory_bytes_per_s
        return device.memory_bytes_per_s * device.memory_efficiency

    def update_us(self, update: fx.Node) -> float:
        """See `CostModel`: what it reads and writes, by the bandwidth of the host's memory."""
        return _update_bytes(update) / self.cluster.host.memory_bytes_per_s * 1e6

    def _copy_us(self, copy: Transfer) -> float:
        """α–β of a rank's own way to the host, or to the disk. What goes all the way from the disk
        to the device is on both ways at once, piece by piece: the slower one counts."""
        host, disk = self.cluster.host, self.cluster.disk
        latency_us, rates = 0.0, []
        if Pool.DEVICE in (copy.source, copy.target):
            latency_us += host.latency_us
            is_up = copy.target is Pool.DEVICE
            rates.append(host.up_bytes_per_s if is_up else host.down_bytes_per_s)
        if Pool.DISK in (copy.source, copy.target):
            latency_us += disk.latency_us
            is_read = copy.source is Pool.DISK
            rates.append(disk.read_bytes_per_s if is_read else disk.write_bytes_per_s)
        if copy.bytes_per_s:
            rates.append(copy.bytes_per_s)
        return latency_us + copy.full_bytes / min(rates) * 1e6

    def transfer(self, transfer: Transfer) -> TransferCost:
        """See `CostModel`. The world's ranks fill nodes one after the other: those of a group that
        are `stride` apart share a node with fewer of their own, and its link with the groups
        beside theirs, which run the same step at the same time."""
        if transfer.kind is TransferKind.COPY:
            return TransferCost(self._copy_us(transfer))
        devices = self.cluster.devices_per_node
        beside = min(transfer.stride, devices)
        if transfer.kind in (TransferKind.SEND, TransferKind.RECEIVE):
            # A pipeline is a mesh's outermost axis: its neighbours are on other nodes.
            leaves = self.cluster.num_nodes > 1 or transfer.stride >= devices
            link, sharing = (self.cluster.inter, beside) if leaves else (self.cluster.intra, 1)
            us = link.latency_us + sharing * transfer.full_bytes / link.bytes_per_s * 1e6
            return TransferCost(us, link.host_us + transfer.full_bytes * link.host_s_per_byte * 1e6)
        size = transfer.size
        if size <= 1:
            return TransferCost(0.0)
        per_node = min(max(devices // transfer.stride, 1), size)
        nodes = -(-size // per_node)
        rounds = 2 if transfer.kind is TransferKind.ALL_REDUCE else 1
        wire_s = host_s = 0.0
        inside, between = (per_node, self.cluster.intra, 1), (nodes, self.cluster.inter, beside)
        for ranks, link, sharing in (inside, between):
            if ranks == 1:
                continue
            moved = transfer.full_bytes * (ranks - 1) / ranks
            further_s = (transfer.num_tensors - 1) * link.tensor_us * 1e-6
            wire_s += (ranks - 1) * link.latency_us * 1e-6 + further_s
            wire_s += sharing * moved / link.bytes_per_s
            host_s += moved * link.host_s_per_byte + link.host_us * 1e-6 + further_s
        return TransferCost(rounds * wire_s * 1e6, rounds * host_s * 1e6)

"""The roofline and α–β, against closed forms."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from fxzero.cost import AnalyticCosts, ClusterSpec, DeviceSpec, LinkSpec, load_cluster
from fxzero.cost.analytic import Product, ProductKind, Work, flops_of, work_of
from fxzero.cost.attention import computed_share
from fxzero.cost.cluster import HostSpec, guess_cluster, known_clusters
from fxzero.errors import ConfigError
from fxzero.inspect.pipeline import micro_step_of
from fxzero.transfer import Transfer, TransferKind
from tests.tracing import of, scheduled, trace

DEVICE = DeviceSpec("d", {"fp32": 1e9}, memory_bytes_per_s=1e9, memory_bytes=1e9)
INTRA = LinkSpec(bytes_per_s=1e9, latency_us=2.0, host_s_per_byte=1e-9, host_us=1.0)
INTER = LinkSpec(bytes_per_s=1e8, latency_us=10.0)


def costs(num_nodes: int = 1, per_node: int = 4) -> AnalyticCosts:
    return AnalyticCosts(ClusterSpec("c", DEVICE, INTRA, INTER, per_node, num_nodes))


def test_a_ring_inside_a_node() -> None:
    """(g - 1) messages of a g-th: (g-1)·α + (g-1)/g · S/B."""
    found = costs().transfer(Transfer(TransferKind.ALL_GATHER, 4_000_000, 4))
    assert found.wire_us == pytest.approx(3 * 2 + 3_000_000 / 1e9 * 1e6)
    assert found.host_us == pytest.approx(1 + 3_000_000 * 1e-9 * 1e6)


def test_a_level_for_nodes_and_one_inside() -> None:
    """Two nodes of four: the slow link carries half, the fast one three quarters."""
    found = costs(num_nodes=2).transfer(Transfer(TransferKind.REDUCE_SCATTER, 8_000_000, 8))
    inside = 3 * 2 + 6_000_000 / 1e9 * 1e6
    between = 1 * 10 + 4_000_000 / 1e8 * 1e6
    assert found.wire_us == pytest.approx(inside + between)


def test_an_all_reduce_is_two() -> None:
    """A reduce-scatter, and an all-gather."""
    once = costs().transfer(Transfer(TransferKind.ALL_GATHER, 1 << 20, 4))
    twice = costs().transfer(Transfer(TransferKind.ALL_REDUCE, 1 << 20, 4))
    assert twice.wire_us == 2 * once.wire_us
    assert twice.host_us == 2 * once.host_us


def test_ranks_that_are_apart_share_the_way_out_of_their_node() -> None:
    """Four ranks, each four from the next one, are on nodes of their own, and on each node four
    groups send at once; two from the next one two are in a node."""
    full = 4_000_000
    record = Transfer(TransferKind.ALL_GATHER, full, 4, stride=4)
    assert costs().transfer(record).wire_us == pytest.approx(3 * 10 + 4 * 3_000_000 / 1e8 * 1e6)
    inside = 1 * 2 + full / 2 / 1e9 * 1e6
    between = 1 * 10 + 2 * full / 2 / 1e8 * 1e6
    found = costs().transfer(replace(record, stride=2))
    assert found.wire_us == pytest.approx(inside + between)


def test_a_message_to_a_neighbour_that_is_apart() -> None:
    """Within a node by its own link; from one node to the next all of a node's ranks send."""
    for stride, us in ((1, 2 + 1e6 / 1e3), (4, 10 + 4 * 1e6 / 1e2), (8, 10 + 4 * 1e6 / 1e2)):
        record = Transfer(TransferKind.SEND, 1_000_000, 2, stride=stride)
        assert costs().transfer(record).wire_us == pytest.approx(us)


def test_alone_nothing_is_moved() -> None:
    """A group of one."""
    assert costs().transfer(Transfer(TransferKind.ALL_GATHER, 1 << 20, 1)).wire_us == 0


def test_a_matrix_product_is_bound_by_flops_or_by_bytes() -> None:
    """2·m·k·n FLOPs, and each matrix once."""
    graph = trace(of(lambda: nn.Linear(64, 32, bias=False), 16, 64), zero=0, world_size=1)
    (product,) = (
        n
        for n in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
        if list(n.meta["val"].shape) == [16, 32]
    )
    assert flops_of(product) == 2 * 16 * 64 * 32
    work = work_of([product])
    ((flops, moved, dtype, *_),) = work.products
    assert (flops, moved, dtype) == (2 * 16 * 64 * 32, 4 * (16 * 64 + 64 * 32 + 16 * 32), "fp32")
    assert costs().compute_us([product]) == pytest.approx(flops / 1e9 * 1e6)


def test_products_have_the_dtype_of_their_operands() -> None:
    """A cross-entropy that makes its logits by itself multiplies in bfloat16, and returns a loss in
    float32."""

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(64, 4096, bias=False, dtype=torch.bfloat16)

        def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(self.head(x).float(), targets)

    def build() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
        x = torch.zeros(256, 64, dtype=torch.bfloat16)
        return Head(), (x, torch.zeros(256, dtype=torch.int64))

    options = {"lower_kernels": {"min_logits_bytes": 0}, "lower_regions": {"backend": "eager"}}
    graph = micro_step_of(build, micro_batches=1, zero=0, world_size=1, options=options).graph
    (loss,) = graph.graph.find_nodes(
        op="call_function", target=torch.ops.fxzero.linear_cross_entropy.default
    )
    assert loss.meta["val"][0].dtype is torch.float32
    products = work_of([n for n in graph.graph.nodes if n.op == "call_function"]).products
    assert sum(product.flops for product in products) >= 2 * 2 * 256 * 64 * 4096
    assert {product.dtype for product in products} == {"bf16"}


def test_a_fused_chain_reads_and_writes_once() -> None:
    """relu(x) * 2 + 1 moves two tensors, not six."""

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x) * 2 + 1 + self.w

    graph = scheduled(of(Chain, 128, 128), "stamp", zero=0, world_size=1, training=False)
    nodes = [n for n in graph.graph.nodes if n.op == "call_function"]
    assert work_of(nodes).streamed_bytes == pytest.approx(2 * 4 * 128 * 128, abs=16)


def test_what_a_cpu_computes_by_polynomials_takes_longer_than_to_stream_it() -> None:
    """exp and tanh of 128 x 128 numbers, fused: each value counts, and their sum does not."""

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.exp(x) + torch.tanh(x) * self.w

    graph = scheduled(of(Chain, 128, 128), "stamp", zero=0, world_size=1, training=False)
    work = work_of([n for n in graph.graph.nodes if n.op == "call_function"])
    assert work.num_transcendental == 2 * 128 * 128
    slow = replace(DEVICE, transcendental_per_s=1e6)
    by_a_cpu = AnalyticCosts(ClusterSpec("c", slow, INTRA, INTER)).work_us(work)
    assert by_a_cpu - costs().work_us(work) == pytest.approx(2 * 128 * 128)


def test_operators_reach_their_own_shares_of_the_peak() -> None:
    """A convolution and its gradient half of a product's speed, attention a quarter."""
    device = replace(
        DEVICE,
        flops_efficiency=0.5,
        convolution_efficiency=0.5,
        attention_efficiency=0.25,
        half_peak_flops=1e6,
    )
    found = AnalyticCosts(ClusterSpec("c", device, INTRA, INTER))
    us = {
        kind: found.work_us(Work((Product(1e6, 0.0, "fp32", kind),), 0.0, 0))
        for kind in ProductKind
    }
    assert us[ProductKind.MATRIX] == pytest.approx(4e3)
    assert us[ProductKind.CONVOLUTION] == pytest.approx(8e3)
    assert us[ProductKind.ATTENTION] == pytest.approx(16e3)


def test_a_small_product_takes_as_long_in_every_dtype() -> None:
    """Its begin and end are a time: in fp32 it was as many FLOPs as in bf16, fifteen times it."""
    device = replace(DEVICE, peak_flops={"fp32": 1e9, "bf16": 1.5e10}, half_peak_flops=1.5e6)
    found = AnalyticCosts(ClusterSpec("c", device, INTRA, INTER))

    def us(flops: float, dtype: str) -> float:
        return found.work_us(Work((Product(flops, 0.0, dtype),), 0.0, 0))

    for dtype, peak in device.peak_flops.items():
        assert us(1.0, dtype) == pytest.approx(100.0, rel=1e-4)
        assert us(1.5e6, dtype) == pytest.approx(100.0 + 1.5e12 / peak, rel=1e-6)


def test_which_operators_are_convolutions_and_attention() -> None:
    """By their names in a step's graph, forward and backward."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(8, 8, 3, padding=1)
            self.head = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = self.conv(x).transpose(1, 2).contiguous().unsqueeze(1)
            return self.head(nn.functional.scaled_dot_product_attention(rows, rows, rows))

    graph = scheduled(of(Net, 2, 8, 16), "stamp", zero=0, world_size=1)
    work = work_of([n for n in graph.graph.nodes if n.op == "call_function"])
    kinds = [product.kind for product in work.products]
    assert kinds.count(ProductKind.CONVOLUTION) == 2
    assert kinds.count(ProductKind.ATTENTION) == 2
    assert ProductKind.MATRIX in kinds


@pytest.mark.parametrize(("length", "share"), [(64, 1.0), (512, 1.0), (1024, 0.75), (2048, 0.625)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_cpu_leaves_out_blocks_of_keys_that_a_causal_mask_hides(
    length: int, share: float, is_causal: bool
) -> None:
    """Of 512 keys each, forward and backward; FLOPs are counted whole, as others count them."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(8, 24)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(x).split(8, dim=-1)
            return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)

    graph = scheduled(of(Net, 2, 1, length, 8), "stamp", zero=0, world_size=1)
    work = work_of([n for n in graph.graph.nodes if n.op == "call_function"])
    found = [one for one in work.products if one.kind is ProductKind.ATTENTION]
    assert [one.share_on_cpu for one in found] == [share if is_causal else 1.0] * 2
    assert [one.flops for one in found] == [n * 2 * 2.0 * length * length * 8 for n in (2, 5)]
    of_attention = Work(tuple(found), 0.0, 0)
    us = {
        kind: AnalyticCosts(
            ClusterSpec("c", replace(DEVICE, type=kind, memory_bytes_per_s=1e18), INTRA, INTER)
        ).work_us(of_attention)
        for kind in ("cpu", "cuda")
    }
    assert us["cpu"] / us["cuda"] == pytest.approx(found[0].share_on_cpu)


@pytest.mark.parametrize(
    ("queries", "keys", "share"),
    [(512, 2048, 0.25), (64, 2048, 0.25), (2048, 512, 1.0), (2048, 1024, 0.875)],
)
def test_keys_behind_the_last_query_are_not_computed(queries: int, keys: int, share: float) -> None:
    """And queries behind the last key see all of them. The first and the third were timed, too."""
    assert computed_share(queries, keys, is_causal=True) == share
    assert computed_share(queries, keys, is_causal=False) == 1.0


def test_a_cpu_updates_as_its_host_does() -> None:
    """What an optimizer reads and writes has the host's rate there, and the device's on a GPU."""
    work = Work((), 0.0, 0, updated_bytes=1e6)
    host = HostSpec(memory_bytes_per_s=4e9)
    for kind, us in (("cpu", 250.0), ("cuda", 1000.0)):
        cluster = ClusterSpec("c", replace(DEVICE, type=kind), INTRA, INTER, host=host)
        assert AnalyticCosts(cluster).work_us(work) == pytest.approx(us)
    unsaid = ClusterSpec("c", replace(DEVICE, type="cpu"), INTRA, INTER)
    assert AnalyticCosts(unsaid).work_us(work) == pytest.approx(1000.0)  # of the device's memory


@pytest.mark.parametrize("name", known_clusters())
def test_every_spec_is_complete(name: str) -> None:
    """Positive figures, each with a source."""
    spec = load_cluster(name)
    assert spec.name == name
    assert spec.sources
    assert AnalyticCosts(spec).transfer(Transfer(TransferKind.ALL_GATHER, 1 << 20, 64)).wire_us > 0


def test_mistakes_in_a_spec(tmp_path: Path) -> None:
    """An unknown name, key or number says what is known."""
    with pytest.raises(ConfigError, match="did you mean 'dgx_a100'"):
        load_cluster("dgx_a10")
    with pytest.raises(ConfigError, match="there is no such file"):
        load_cluster(str(tmp_path / "none.yaml"))
    path = tmp_path / "mine.yaml"
    path.write_text("devize: {}\n")
    with pytest.raises(ConfigError, match="no key 'devize': did you mean 'device'"):
        load_cluster(str(path))
    path.write_text("device: {name: x, peak_flops: {fp32: 1}, memory_bytes_per_s: fast}\n")
    with pytest.raises(ConfigError, match=r"memory_bytes_per_s='fast' must be a number"):
        load_cluster(str(path))
    path.write_text("device: {name: x}\n")
    with pytest.raises(ConfigError, match="missing"):
        load_cluster(str(path))


def test_the_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    """One host of CPU ranks, or several joined by Ethernet."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert guess_cluster("cpu", 2).name == "laptop"
    several = guess_cluster("cpu", 6)
    assert (several.name, several.num_nodes, several.devices_per_node) == ("pair_1gbit", 3, 2)

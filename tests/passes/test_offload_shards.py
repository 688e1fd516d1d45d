"""Copies of shards before their gathers, copies of gradients behind their reduces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from fxzero.cost.throttle import Throttle
from fxzero.errors import VerificationError
from fxzero.graph import Lane, Phase, Role, StepGraph
from fxzero.graph.stamps import set_stamp, stamp_of
from fxzero.graph.verify import verify
from fxzero.passes import Context, Fact
from fxzero.runtime import copies
from fxzero.schedule.simulate import simulate, simulate_memory
from fxzero.sharding.params import GradSync
from fxzero.transfer import PCIE_DOWN, PCIE_UP, Pool
from tests.tracing import JOINT, Chain, chain, find, of, params_of, run, sides, trace, up_to

BF16 = torch.bfloat16
SETUPS = pytest.mark.parametrize(
    ("zero", "world_size"), [(0, 1), (0, 8), (1, 8), (2, 8), (3, 8)], ids=lambda n: str(n)
)


def offloaded(last: str = "join_copies", *, fuses: bool = False, **setup: Any) -> StepGraph:
    """A chain of three layers whose shards are on the host."""
    graph = trace(chain(3), **{"offload": True, **setup})
    run(graph, up_to(last), Context(fuses=fuses))
    return graph


def sources(node: fx.Node) -> list[fx.Node]:
    """Everything that a value is made of."""
    found = [node]
    for one in found:
        found += [source for source in one.all_input_nodes if source not in found]
    return found


@SETUPS
def test_the_device_reads_copies_alone(zero: int, world_size: int) -> None:
    """Whatever computes or communicates; the copies go up in each phase that gathers or reads."""
    graph = offloaded(zero=zero, world_size=world_size)
    homes = [node for node in graph.inputs if stamp_of(node).pool is Pool.HOST]
    assert len(homes) == 3
    readers = {user for node in homes for user in node.users if user.op != "output"}
    assert {stamp_of(reader).lane for reader in readers} == {Lane.H2D}
    ups = graph.transfers(name="h2d")
    phases = {copy.stamp.phase for copy in ups}
    kept = zero in (1, 2) or (zero == 3 and len(find_gathers(graph)) == 3)
    assert phases == ({Phase.FORWARD} if kept else {Phase.FORWARD, Phase.BACKWARD})
    for copy in ups:
        record = copy.record
        assert (record.source, record.target) == (Pool.HOST, Pool.DEVICE)
        assert record.resource == PCIE_UP
        assert record.full_bytes == record.num_tensors * 8 * 8 * 4 // (world_size if zero else 1)


def find_gathers(graph: StepGraph) -> list[fx.Node]:
    """What launches gathers."""
    return [transfer.launch for transfer in graph.transfers(name="gather")]


@SETUPS
def test_gradients_leave_by_copies(zero: int, world_size: int) -> None:
    """Of each parameter its own, reduced before, and waited for before the loop gets it."""
    graph = offloaded(zero=zero, world_size=world_size)
    downs = graph.transfers(name="d2h")
    for position, key in graph.gradients.items():
        gradient = graph.output_values[position]
        assert isinstance(gradient, fx.Node)
        assert stamp_of(gradient).pool is Pool.HOST
        assert stamp_of(gradient).params == (key,)
        assert any(gradient in copy.parts for copy in downs)
        if world_size > 1:
            assert any(stamp_of(n).lane is Lane.REDUCE for n in sources(gradient))
    assert {copy.record.resource for copy in downs} == {PCIE_DOWN}
    assert {copy.wait.target for copy in downs} == {copies.join_download}


def test_a_shard_is_cast_before_it_is_copied() -> None:
    """Half of the bytes, and what is gathered is what was cast on the device."""
    graph = offloaded(zero=3, world_size=8, param_dtype=BF16)
    ups = graph.transfers(name="h2d")
    assert {copy.record.dtype for copy in ups} == {BF16}
    assert {copy.record.full_bytes for copy in ups} == {8 * 8 * 2 // 8}
    assert not any(n.target is torch.ops.aten._to_copy.default for g in ups for n in readers_of(g))


def readers_of(copy: Any) -> list[fx.Node]:
    """What reads what a copy brings."""
    return [user for part in copy.parts for user in part.users]


def test_what_becomes_a_region_casts_by_itself() -> None:
    """Inductor does not round between a cast and what reads it: a copy would."""
    graph = offloaded(zero=0, world_size=1, param_dtype=BF16, fuses=True)
    assert {copy.record.dtype for copy in graph.transfers(name="h2d")} == {torch.float32}


@pytest.mark.parametrize("low", [None, BF16])
@SETUPS
def test_another_device(zero: int, world_size: int, low: torch.dtype | None) -> None:
    """Only copies stand between the host's memory and that of a device of its own."""

    def build() -> tuple[nn.Module, tuple[Any, ...]]:
        return Chain(3), (torch.randn(4, 8, device="meta", requires_grad=True),)

    graph = trace(
        build, zero=zero, world_size=world_size, offload=True, device="meta", param_dtype=low
    )
    run(graph, up_to("join_copies"), Context(fuses=False))
    for node in graph.nodes():
        value = node.meta["val"]
        values = value if isinstance(value, (list, tuple)) else [value]
        here = {v.device.type for v in values if isinstance(v, Tensor)}
        assert here <= ({"cpu"} if stamp_of(node).lane is Lane.D2H else {"meta"}), (
            node.format_node()
        )
    for copy in graph.transfers(name="h2d"):
        assert copy.launch.args[2] == torch.device("meta")
        assert copy.record.dtype is (low or torch.float32)
        assert not any(is_move(reader) for reader in readers_of(copy))


def is_move(node: fx.Node) -> bool:
    """Whether a node casts, or copies to a device."""
    return node.target is torch.ops.aten._to_copy.default


def test_what_is_kept_by_no_sync_is_on_the_device() -> None:
    """The loop gets zeros, on the host like any gradient."""
    graph = offloaded(zero=1, world_size=8, sync=GradSync.ACCUMULATE)
    kept = find(graph, torch.ops.fxzero.keep_grad.default)
    assert len(kept) == 3
    assert all(stamp_of(user).lane is Lane.D2H for node in kept for user in node.users)


@SETUPS
def test_each_side_has_its_own_copies(zero: int, world_size: int) -> None:
    """No copy is on its way from forward to backward, which gets the parameters themselves."""
    cut = sides(chain(3), zero=zero, world_size=world_size, offload=True)
    for side in (cut.forward, cut.backward):
        verify(side, {Fact.STAMPED, Fact.BUCKETED, Fact.CUT, Fact.GATHERED}, after="cut")
        for node in side.inputs:
            assert stamp_of(node).pool is Pool.HOST
    assert not any(stamp_of(node).role is Role.LAUNCH for node in cut.saved)


def test_the_device_holds_less() -> None:
    """Shards and their gradients are the host's in what is simulated, by the byte."""
    host, device = (
        simulate_memory(offloaded(zero=3, world_size=8, offload=offload), fuses=False)
        for offload in (True, False)
    )
    assert device.resident_bytes - host.resident_bytes == 3 * 8 * 4
    assert host.peak_bytes < device.peak_bytes
    assert device.host_bytes == 0
    assert host.host_bytes >= 3 * 64


def test_copies_take_time_on_their_lanes() -> None:
    """And one that is held back takes more."""
    found = []
    for rate in ("1GB/s", "1kB/s"):
        graph = trace(chain(3), zero=3, world_size=8, offload=True)
        ctx = Context(fuses=False, throttle=Throttle(h2d=rate, d2h=rate))
        run(graph, up_to("join_copies"), ctx)
        busy = simulate(graph, ctx.costs, fuses=False).busy_us
        found.append((busy["h2d"], busy["d2h"]))
    assert all(slow > 100 * fast > 0 for fast, slow in zip(*found, strict=True))


def test_copies_start_before_they_are_waited_for() -> None:
    """The second layer's shard is on its way while the first one computes."""
    graph = trace(chain(3, width=64), zero=3, world_size=8, offload=True)
    run(graph, up_to("join_copies"), Context(fuses=False))
    ups = [copy for copy in graph.transfers(name="h2d") if copy.stamp.phase is Phase.FORWARD]
    waits = [copy.wait for copy in sorted(ups, key=lambda copy: copy.wait)]
    assert all(copy.launch < waits[0] for copy in ups[:2])
    downs = graph.transfers(name="d2h")
    assert downs[0].wait > downs[1].launch
    assert downs[0].wait < downs[2].launch, "two are on their way, and no more"


def without_wait(graph: StepGraph) -> None:
    """Let a gradient leave while it is still on its way."""
    copy = graph.transfers(name="d2h")[-1]
    graph.output.prepend(copy.launch)


def reads_the_host(graph: StepGraph) -> None:
    """Gather the host's shard, and not its copy."""
    copy = graph.transfers(name="h2d")[0]
    readers_of(copy)[0].replace_input_with(copy.parts[0], copy.tensors[0])


def says_fewer_bytes(graph: StepGraph) -> None:
    """Let a record say something else than what is copied."""
    launch = graph.transfers(name="h2d")[0].launch
    stamp = stamp_of(launch)
    assert stamp.transfer is not None
    set_stamp(launch, stamp.but(transfer=replace(stamp.transfer, full_bytes=1)))


def swaps_gradients(graph: StepGraph) -> None:
    """Return one parameter's gradient for another one's."""
    values = list(graph.output_values)
    first, second, *_ = graph.gradients
    values[first], values[second] = values[second], values[first]
    graph.set_output_values(values)


@pytest.mark.parametrize(
    ("spoil", "rule"),
    [
        (without_wait, "before it exists"),
        (reads_the_host, "in the host's memory"),
        (says_fewer_bytes, "its record says"),
        (swaps_gradients, "which is that of"),
    ],
)
def test_verify_finds(spoil: Callable[[StepGraph], None], rule: str) -> None:
    """Mistakes that no number need show."""
    graph = offloaded(zero=3, world_size=8)
    facts = {fact for one in JOINT for fact in one.provides}
    verify(graph, facts, after="nothing")
    spoil(graph)
    with pytest.raises(VerificationError, match=rule):
        verify(graph, facts, after="a mistake")


def test_a_frozen_parameter_has_no_gradient_to_copy() -> None:
    """It goes up like the others."""

    def build() -> tuple[nn.Module, tuple[Any, ...]]:
        model = Chain(3)
        model.layers[1].weight.requires_grad_(False)
        return model, (torch.randn(4, 8, requires_grad=True),)

    graph = trace(build, zero=3, world_size=8, offload=True)
    run(graph, up_to("join_copies"), Context(fuses=False))
    downs = params_of([t.launch for t in graph.transfers(name="d2h")])
    assert sorted(sum(downs, ())) == ["layers.0.weight", "layers.2.weight"]
    ups = params_of([t.launch for t in graph.transfers(name="h2d", phase=Phase.FORWARD)])
    assert sorted(sum(ups, ())) == [f"layers.{i}.weight" for i in range(3)]


def test_without_offload_there_is_nothing_to_do() -> None:
    """No node differs."""
    graph = trace(of(Chain, 4, 8), zero=3, world_size=8)
    (*_, record) = run(graph, up_to("offload_shards"))
    assert str(record.notes) == "nothing to do"
    assert record.before == record.after

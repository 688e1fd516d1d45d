# ruff: noqa: E501
"""Places of what transfers bring, in one block of memory."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given, settings
from hypothesis import strategies as st

from fxzero._compat import set_args
from fxzero.compiler.config import Config
from fxzero.compiler.pipelines import loop_passes, step_passes
from fxzero.graph import Role, StepGraph
from fxzero.graph.node_text import node_line
from fxzero.graph.slabs import places_in, result_bytes, slab_of
from fxzero.graph.stamps import stamp_of
from fxzero.graph.steady import find_loop
from fxzero.graph.verify import verify
from fxzero.inspect.capture import fake_ranks
from fxzero.passes import Context, Notes, Slab
from fxzero.passes.lower_transfers import lower_transfer
from fxzero.passes.slab import Item, lay_out, pack
from fxzero.runtime import collectives
from fxzero.runtime.slab import vacate
from fxzero.schedule.simulate import simulate_memory
from tests import simulated_ranks
from tests.passes.test_bucket import blocks
from tests.passes.test_lower_transfers import odd
from tests.stepping import chain_of, step_graph
from tests.tiers import in_two_tiers
from tests.tracing import Build, chain, find, of_role, scheduled, texts, words

FACTS = {"stamped", "gathered", "cut", "lowered"}


def slabbed(graph: StepGraph, world_size: int = 8) -> Notes:
    """Lower a graph as for gloo, and lay out what it brings."""
    with fake_ranks(world_size):
        for transfer in graph.transfers():
            lower_transfer(transfer)
        notes = Slab().run(graph, Context(fuses=False))
    verify(graph, FACTS, after="slab")
    return notes


@texts
def test_before_and_after() -> None:
    """Gathers that never meet have one place; so has nothing that leaves the graph."""
    graph = scheduled(chain(3, relu=False), "prefetch", world_size=8)
    slabbed(graph)
    roles = {Role.SLAB, Role.LAUNCH, Role.RELEASE}
    lines = [node_line(n) for n in graph.nodes() if stamp_of(n).role in roles]
    assert_expected_inline(
        words("\n".join(lines)),
        """\
slab: u8[256] = slab(256, cpu)  # forward gather slab
gather_layers_0: (f32[8, 8]) = gather([primals_2], 8, 0, slab, 0)  # forward gather launch layers.0 gather.forward.0
gather_layers_2: (f32[8, 8]) = gather([primals_3], 8, 0)  # forward gather launch layers.1 gather.forward.1
release_default_place: () = vacate([layers_0_weight])  # forward gather release layers.0 gather.forward.0
gather_layers_4: (f32[8, 8]) = gather([primals_4], 8, 0, slab, 0)  # forward gather launch layers.2 gather.forward.2
release_default_2: None = fxzero.release([layers_1_weight])  # forward gather release layers.1 gather.forward.1
release_default_4_place: () = vacate([layers_2_weight])  # forward gather release layers.2 gather.forward.2
gather_layers_5: (f32[8, 8]) = gather([primals_4], 8, 0, slab, 0)  # backward gather launch layers.2 gather.backward.3
gather_layers_3: (f32[8, 8]) = gather([primals_3], 8, 0)  # backward gather launch layers.1 gather.backward.4
release_default_5_place: () = vacate([layers_2_weight_1])  # backward gather release layers.2 gather.backward.3
reduce_layers_2: (f32[1, 8]) = exchange([t_6], 8, 0, [True])  # backward reduce launch layers.2 reduce.backward.0
gather_layers_1: (f32[8, 8]) = gather([primals_2], 8, 0, slab, 0)  # backward gather launch layers.0 gather.backward.5
release_default_3: None = fxzero.release([layers_1_weight_1])  # backward gather release layers.1 gather.backward.4
reduce_layers_1: (f32[1, 8]) = exchange([t_10], 8, 0, [True])  # backward reduce launch layers.1 reduce.backward.1
release_default_1_place: () = vacate([layers_0_weight_1])  # backward gather release layers.0 gather.backward.5
reduce_layers_0: (f32[1, 8]) = exchange([t_14], 8, 0, [True])  # backward reduce launch layers.0 reduce.backward.2""",
    )


@pytest.mark.parametrize(
    ("world_size", "build"),
    in_two_tiers([*product([2, 4], [odd, blocks, chain(4), chain(5, relu=False)])]),
)
def test_the_meaning_stays(world_size: int, build: Build) -> None:
    """On all ranks in lockstep, in real places, each of which is NaN from where it is left."""
    graphs = [
        scheduled(build, "prefetch", world_size=world_size, rank=rank) for rank in range(world_size)
    ]
    for graph in graphs:
        graph.module.double()
    inputs = simulated_ranks.random_inputs(graphs)
    expected = simulated_ranks.run(graphs, inputs)
    rewritten = [graph.clone() for graph in graphs]
    for graph in rewritten:
        slabbed(graph, world_size)
    assert any(map(slab_of, of_role(rewritten[0], Role.LAUNCH)))
    for ours, theirs in zip(simulated_ranks.run(rewritten, inputs), expected, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert a is b if b is None else torch.equal(a, b)


@pytest.mark.parametrize(
    ("depth", "zero", "world_size"), in_two_tiers([*product([3, 9], [1, 2, 3], [2, 3, 8])])
)
def test_a_whole_step_holds_no_more(depth: int, zero: int, world_size: int) -> None:
    """What is received of gradients has its place too, and the simulated peak stays."""
    graph = step_graph(chain_of(depth, width=48), zero=zero, world_size=world_size)
    with fake_ranks(world_size):
        for transfer in graph.transfers():
            lower_transfer(transfer)
    before = simulate_memory(graph, fuses=False)
    with fake_ranks(world_size):
        notes = Slab().run(graph, Context(fuses=False))
    verify(graph, FACTS, after="slab")
    after = simulate_memory(graph, fuses=False)
    assert after.peak_bytes <= before.peak_bytes
    receives = [n for n in find(graph, collectives.exchange) if slab_of(n) is not None]
    assert notes["placed"]
    assert receives or zero == 3


def test_micro_steps_that_stand_for_several_are_laid_out_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loop's body is called with the same places in every run."""
    monkeypatch.setattr(
        "fxzero.passes.slab.lay_out", lambda items, held: lay_out(items, [*held, 1 << 30])
    )
    graph = step_graph(chain_of(3, rows=16, width=48), world_size=2, micro_batches=8)
    assert graph.steady_runs > 1
    with fake_ranks(2):
        for transfer in graph.transfers():
            lower_transfer(transfer)
        Slab().run(graph, Context(fuses=False))
    verify(graph, FACTS, after="slab")
    loop = find_loop(graph)
    earlier = loop.before[-len(loop.body) :]
    placed = [(a, b) for a, b in zip(earlier, loop.body, strict=True) if slab_of(b) is not None]
    assert placed
    assert all(a.args[-1] == b.args[-1] for a, b in placed)


def test_what_leaves_the_graph_is_allocated() -> None:
    """Gradients of the ordinary loop are the caller's."""
    graph = scheduled(chain(3), "prefetch", world_size=4)
    slabbed(graph, 4)
    assert find(graph, collectives.exchange)
    assert all(slab_of(node) is None for node in find(graph, collectives.exchange))
    assert find(graph, vacate)


def test_what_is_sent_from_its_place_is_not_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient may be a gathered weight, which nobody else reads."""
    monkeypatch.setattr(
        "fxzero.passes.slab.lay_out", lambda items, held: lay_out(items, [*held, 1 << 30])
    )
    graph = step_graph(chain_of(3), world_size=4)
    with fake_ranks(4):
        for transfer in graph.transfers():
            lower_transfer(transfer)
        launch = find(graph, collectives.exchange)[-1]
        weights = [
            part for t in graph.transfers(name="gather") for part in t.parts if part < launch
        ]
        set_args(launch, ([weights[-1]], *launch.args[1:3], [True]))
        Slab().run(graph, Context(fuses=False))
    assert slab_of(launch) is not None
    assert launch.args[3] == [False]
    assert [node.args[3] for node in find(graph, collectives.exchange)[:-1]] == [[True], [True]]


def test_nothing_to_place() -> None:
    """At stage 0 nothing is gathered or scattered."""
    graph = scheduled(chain(3), "prefetch", zero=0, world_size=4)
    assert slabbed(graph, 4)["placed"] == 0
    assert not of_role(graph, Role.SLAB)


def test_nobody_asked_for_it() -> None:
    """By default there is no such pass."""
    for passes in (loop_passes, step_passes):
        assert not any(isinstance(one, Slab) for one in passes(Config()).lowering)
        asked = Config.from_options({"slab": {"enabled": True}})
        assert isinstance(passes(asked).lowering[-1], Slab)


SPANS = st.tuples(st.integers(0, 19), st.integers(0, 8)).map(lambda s: (s[0], min(s[0] + s[1], 19)))
ITEMS = st.lists(
    st.builds(
        lambda units, spare, spans: Item(64 * units, 64 * units - spare, tuple(spans)),
        st.integers(1, 9),
        st.integers(0, 60),
        st.lists(SPANS, min_size=1, max_size=2),
    ),
    max_size=25,
)


def times(item: Item) -> set[int]:
    """When it is there."""
    return {t for first, last in item.spans for t in range(first, last + 1)}


@settings(max_examples=300, deadline=None)
@given(ITEMS, st.integers(0, 2000))
def test_places_are_apart(items: list[Item], capacity: int) -> None:
    placed = pack(items, capacity)
    for item, at in placed.items():
        assert at >= 0
        assert at + item.num_bytes <= capacity
        assert at % 64 == 0
        for other, there in placed.items():
            if other is not item and times(other) & times(item):
                assert at + item.num_bytes <= there or there + other.num_bytes <= at


@settings(max_examples=300, deadline=None)
@given(ITEMS, st.lists(st.integers(0, 3000), min_size=20, max_size=20))
def test_a_slab_does_not_lift_the_peak(items: list[Item], beside: list[int]) -> None:
    """Whatever else is held: the slab stands from its first item to the end of its last."""

    def held(some: list[Item], t: int) -> int:
        return sum(i.held_bytes for i in some for a, b in i.spans if a <= t <= b)

    before = [beside[t] + held(items, t) for t in range(20)]
    placed, size = lay_out(items, before)
    if not placed:
        return
    begin = min(a for item in placed for a, _ in item.spans)
    end = max(b for item in placed for _, b in item.spans)
    left = [item for item in items if item not in placed]
    for t in range(begin, end + 1):
        assert beside[t] + held(left, t) + size <= max(before)


def test_all_have_a_place_where_there_is_room() -> None:
    """Three that are there two at a time need two places."""
    items = [Item(64, 64, ((t, t + 1),)) for t in (0, 1, 2)]
    placed, size = lay_out(items, [64, 128, 128, 64, 500])
    assert len(placed) == 3
    assert size == 128


def test_what_has_no_place_leaves_the_others_less_room() -> None:
    """At its fullest the slab would hold three, where the peak allows two beside what else is
    there."""
    items = [Item(128, 128, ((0, 4),)), Item(64, 64, ((0, 0),)), Item(64, 64, ((0, 0),))]
    placed, size = lay_out(items, [256, 128, 256, 128, 128])
    assert list(placed) == [items[0]]
    assert size == 128


def test_places_are_told_by_their_launch() -> None:
    """What a slab's reader finds out is what the pass has given."""
    graph = step_graph(chain_of(4), world_size=4)
    with fake_ranks(4):
        for transfer in graph.transfers():
            lower_transfer(transfer)
        Slab().run(graph, Context(fuses=False))
    (memory,) = of_role(graph, Role.SLAB)
    found = places_in(memory)
    launches = [node for node in of_role(graph, Role.LAUNCH) if slab_of(node) is memory]
    receives = [node for node in launches if node.target is collectives.exchange]
    assert len(found) == len(launches) + len(receives)
    assert sum(place.end - place.begin for place in found) == sum(
        result_bytes(node) * (3 if node in receives else 1) for node in launches
    )
    assert all(place.launch < place.until for place in found)

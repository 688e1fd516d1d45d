"""Schedules by cost: what they keep, what they hold, and that they still mean the same."""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxzero.cost import FixedCosts
from fxzero.errors import PassError
from fxzero.graph import Lane, Phase, Role, StepGraph
from fxzero.graph.operators import num_bytes
from fxzero.graph.stamps import stamp_of
from fxzero.graph.steady import find_loop
from fxzero.graph.verify import verify
from fxzero.passes import Bucket, Context, Fact, Notes, Prefetch, prefetch
from fxzero.passes.prefetch import choose, default_budget
from fxzero.schedule.followers import readers
from fxzero.schedule.inventory import Inventory
from fxzero.schedule.keep import keepable
from fxzero.schedule.problem import problem_of
from fxzero.schedule.simulate import simulate_memory
from tests.passes import pipelined
from tests.stepping import chain_of, step_graph
from tests.tiers import exhaustive
from tests.tracing import chain, run, trace, up_to

DEPTH, WIDTH = 5, 16
LAYER_BYTES = WIDTH * WIDTH * 4
deep = chain(DEPTH, WIDTH)


def by_mm(layer_us: float, wire_us: float) -> FixedCosts:
    """The same for every matrix product and for every transfer."""
    return FixedCosts(
        lambda nodes: layer_us * sum("mm" in str(n.target) for n in nodes), latency_us=wire_us
    )


def scheduled(costs: FixedCosts, build: Any = deep, **fields: Any) -> tuple[StepGraph, Notes]:
    """A joint graph after prefetch by cost."""
    graph = trace(build)
    run(graph, up_to("bucket", Bucket(min_bytes=0)))
    notes = Prefetch(**fields).run(graph, Context(costs=costs))
    verify(graph, set(Fact) - {Fact.CUT}, after="prefetch")
    return graph, notes


def gathers(graph: StepGraph, phase: Phase) -> list[str]:
    return [t.stamp.layer for t in graph.transfers(phase=phase, name="gather")]


def test_a_slow_link_keeps_the_last_layers() -> None:
    """Those cost the least memory: backward begins with what forward ended with."""
    graph, notes = scheduled(by_mm(10, 40))
    kept = int(str(notes["kept"]))
    assert kept > 0
    again = gathers(graph, Phase.BACKWARD)
    assert again == [f"layers.{i}" for i in reversed(range(DEPTH - kept))][: len(again)]
    assert gathers(graph, Phase.FORWARD) == [f"layers.{i}" for i in range(DEPTH)]


def test_no_time_to_win_keeps_nothing() -> None:
    """Compute hides everything: memory is saved instead."""
    _, notes = scheduled(by_mm(1000, 1))
    assert notes["kept"] == 0


def test_other_choices_are_tried_where_they_may_be_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where compute hides everything: the first is as fast as any then."""
    tried: list[object] = []
    original = prefetch.best_order

    def count(*arguments: Any) -> Any:
        tried.append(arguments)
        return original(*arguments)

    monkeypatch.setattr(prefetch, "best_order", count)
    for wire_us, several in ((1, False), (400, True)):
        tried.clear()
        scheduled(by_mm(1000, wire_us))
        assert (len(tried) > 1) == several


def test_keep_can_be_switched_off() -> None:
    """Stage 3 to the letter."""
    graph, notes = scheduled(by_mm(10, 40), keep=False)
    assert notes["kept"] == 0
    assert gathers(graph, Phase.BACKWARD) == [f"layers.{i}" for i in reversed(range(DEPTH))]


def test_a_large_budget_keeps_all() -> None:
    """Stage 2 in all but name, where memory is no matter."""
    _, notes = scheduled(by_mm(10, 40), budget_bytes=100 * LAYER_BYTES)
    assert int(str(notes["kept"])) >= DEPTH - 1


def test_kept_parameters_are_released_after_backward_in_a_step() -> None:
    """And no longer after forward."""
    options = {
        "lower_regions": {"backend": "eager"},
        "bucket": {"min_bytes": 0},
        "prefetch": {"budget_bytes": 100 * LAYER_BYTES},
        "cost": {"cluster": "pair_1gbit"},
    }
    graph = step_graph(chain_of(DEPTH, WIDTH), options=options)
    assert gathers(graph, Phase.BACKWARD) == []
    released = {stamp_of(n).phase for n in graph.nodes(role=Role.RELEASE)}
    assert released >= {Phase.BACKWARD}
    order = list(graph.nodes())
    for release in graph.nodes(role=Role.RELEASE):
        later = order[order.index(release) :]
        for source in release.all_input_nodes:
            assert not [u for u in source.users if u in later and u is not release]


def by_micro_step(micro_batches: int, **prefetch: Any) -> StepGraph:
    """A step of several micro-batches over a slow link, a bucket a layer."""
    options = {
        "lower_regions": {"backend": "eager"},
        "bucket": {"min_bytes": 0},
        "prefetch": prefetch,
        "cost": {"cluster": "pair_1gbit"},
    }
    return step_graph(chain_of(6, WIDTH, rows=16), micro_batches=micro_batches, options=options)


@pytest.mark.parametrize("micro_batches", [2, 8])
def test_one_gather_for_all_micro_steps(micro_batches: int) -> None:
    """Where memory is no matter; one after the other they still are what a step repeats."""
    graph = by_micro_step(micro_batches, budget_bytes=1 << 20)
    gathers = graph.transfers(name="gather")
    assert [transfer.stamp.micro_step for transfer in gathers] == [0] * 6
    if micro_batches > 2:
        assert find_loop(graph).kept


@pytest.mark.parametrize("micro_batches", [2, *exhaustive(8)])
def test_a_budget_says_how_much_is_kept(micro_batches: int) -> None:
    """The ends first: the last layer from forward to backward, the first one that backward reads
    from a micro-step to the next."""
    counts = []
    for layers in (3, 5, 100):
        graph = by_micro_step(micro_batches, budget_bytes=layers * LAYER_BYTES)
        counts.append(len(graph.transfers(name="gather")))
        held = simulate_memory(graph, fuses=False).transfers_bytes
        assert held <= layers * LAYER_BYTES
        forward = graph.transfers(name="gather", phase=Phase.FORWARD)
        assert "layers.1" not in {t.stamp.layer for t in forward if t.stamp.micro_step}
        assert "layers.5" not in gathers(graph, Phase.BACKWARD)
    assert sorted(counts, reverse=True) == counts
    assert len({*counts}) == 3
    assert counts[0] < len(by_micro_step(micro_batches, keep=False).transfers(name="gather"))


def test_one_copy_instead_of_several() -> None:
    """Where a stage is one bucket, the one that is kept holds less than those on their way."""
    held, count = {}, {}
    for keep in (True, False):
        options = {"cost": {"cluster": "dgx_h100"}, "prefetch": {"keep": keep}}
        graph = pipelined.scheduled(0, zero=3, shards=2, micro_batches=6, options=options)
        held[keep] = simulate_memory(graph, fuses=False).transfers_bytes
        count[keep] = len(graph.transfers(name="gather"))
    assert held[True] < held[False]
    assert count == {True: 1, False: 12}


def test_one_copy_where_compute_hides_every_gather() -> None:
    """Nothing could be faster than the first order, and one that keeps all holds less."""
    graph = pipelined.scheduled(
        0, zero=3, shards=2, micro_batches=6, options={"prefetch": {"keep": False}}
    )
    inventory = Inventory(graph, by_mm(1000, 1), cut=False, fuses=False)
    candidates = keepable(graph, inventory.transfers)
    budget_bytes = default_budget(problem_of(inventory).graph)
    chosen = choose(inventory, candidates, budget_bytes)
    without = choose(inventory, [], budget_bytes)
    assert len(chosen.kept) == len(candidates) > 0
    assert chosen.found.replay.peak_bytes < without.found.replay.peak_bytes
    assert chosen.found.replay.makespan_us <= 1.03 * without.found.replay.makespan_us


@settings(max_examples=25, deadline=None)
@given(
    layer_us=st.sampled_from([1.0, 10.0, 100.0]),
    wire_us=st.sampled_from([1.0, 10.0, 100.0]),
    budget=st.integers(1, 12),
    cap=st.sampled_from([LAYER_BYTES, 4 * LAYER_BYTES]),
)
def test_never_over_the_budget(layer_us: float, wire_us: float, budget: int, cap: int) -> None:
    """Replayed from the scheduled graph itself; or an error that says what is needed."""
    graph = trace(deep)
    run(graph, up_to("bucket", Bucket(cap, 0)))
    costs = by_mm(layer_us, wire_us)
    budget_bytes = budget * LAYER_BYTES
    try:
        Prefetch(budget_bytes=budget_bytes).run(graph, Context(costs=costs))
    except PassError:
        assert budget <= 2  # one layer gathered, and its gradient
        return
    verify(graph, set(Fact) - {Fact.CUT}, after="prefetch")
    assert held_peak(graph) <= budget_bytes


def held_peak(graph: StepGraph) -> int:
    """Gathered parameters from launch to last reader, gradients from their making to their wait."""
    order = {node: i for i, node in enumerate(graph.graph.nodes)}
    change: dict[int, int] = defaultdict(int)
    for transfer in graph.transfers():
        if transfer.stamp.lane is Lane.GATHER:
            for wait in transfer.parts:
                change[order[transfer.launch]] += num_bytes(wait)
                last = max(order[r] for r in readers(wait) if stamp_of(r).role is Role.COMPUTE)
                change[last + 1] -= num_bytes(wait)
        else:
            for sent, wait in zip(transfer.tensors, transfer.parts, strict=True):
                change[order[sent]] += num_bytes(sent)
                change[order[wait]] -= num_bytes(sent)
    return max(itertools.accumulate(change[i] for i in sorted(change)))


def test_the_error_names_what_is_needed() -> None:
    """A budget below one layer."""
    with pytest.raises(PassError, match=r"budget_bytes=10: no order holds so little.*holds \d+"):
        scheduled(by_mm(1, 1), budget_bytes=10)


def test_a_budget_beside_a_distance_has_no_effect() -> None:
    """And says so."""
    context = Context(costs=by_mm(1, 1))
    graph = trace(deep)
    run(graph, up_to("bucket"))
    Prefetch(distance=1, budget_bytes=1 << 30).run(graph, context)
    assert "budget_bytes=1073741824 has no effect" in context.warnings[0]


def test_a_reduce_distance_alone_has_no_effect() -> None:
    """And says so."""
    context = Context(costs=by_mm(1, 1))
    graph = trace(deep)
    run(graph, up_to("bucket"))
    Prefetch(reduce_distance=3).run(graph, context)
    assert "reduce_distance=3 has no effect without prefetch.distance" in context.warnings[0]


def test_backward_starts_nothing_in_forward_where_they_run_apart() -> None:
    """The ordinary loop: forward's graph ends with the loss."""
    graph, _ = scheduled(by_mm(10, 10), keep=False)
    phases = [stamp_of(n).phase for n in graph.nodes() if stamp_of(n).phase is not Phase.OPTIMIZER]
    assert phases == sorted(phases, key=lambda phase: phase is Phase.BACKWARD)


def test_a_whole_step_gathers_for_backward_while_forward_runs() -> None:
    """One graph: the link does not stop at the loss."""
    options = {
        "lower_regions": {"backend": "eager"},
        "bucket": {"min_bytes": 0},
        "prefetch": {"keep": False, "budget_bytes": 6 * LAYER_BYTES},
        "cost": {"cluster": "pair_1gbit"},
        "gather_ahead": {"enabled": False},
    }
    graph = step_graph(chain_of(DEPTH, WIDTH), options=options)
    order = list(graph.nodes())
    launches = [t.launch for t in graph.transfers(phase=Phase.BACKWARD, name="gather")]
    forward = [n for n in order if stamp_of(n).phase is Phase.FORWARD and "mm" in str(n.target)]
    assert order.index(launches[0]) < order.index(forward[-1])

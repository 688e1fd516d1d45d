"""One micro-step that stands for many: what it takes for that, and that figures count all."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import fx

from fxzero.cost.model import FixedCosts
from fxzero.graph import Lane, Role, StepGraph
from fxzero.graph.stamps import stamp_of
from fxzero.graph.steady import STEADY, UNROLLED, NotSteadyError, begins, find_loop
from fxzero.inspect import Analysis
from fxzero.inspect.capture import Capture
from fxzero.passes.prefetch import default_budget
from fxzero.runtime.account import collectives_digest
from fxzero.runtime.executor import traffic_of
from fxzero.schedule.inventory import Inventory
from fxzero.schedule.problem import problem_of
from fxzero.schedule.simulate import simulate, simulate_memory
from tests.pairwise import pairwise
from tests.stepping import EAGER, chain_of, compiled_step, holding, step_graph

COSTS = FixedCosts(5.0, latency_us=3.0)
DEFAULT: dict[str, object] = {"lower_regions": {"backend": "eager"}}
OPTIONS = {"distance 1": EAGER, "by cost": DEFAULT}


def unrolled(micro_batches: int, zero: int, options: dict[str, object]) -> StepGraph:
    """The schedule of a step with all micro-steps in its graph."""
    with holding(100):
        return steady(micro_batches, zero, options)


def steady(micro_batches: int, zero: int, options: dict[str, object] = EAGER) -> StepGraph:
    """The same with five."""
    return step_graph(chain_of(rows=16), zero=zero, micro_batches=micro_batches, options=options)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_figures_are_those_of_all_micro_steps(zero: int) -> None:
    """Time, waiting, memory and traffic, by a schedule that repeats of itself."""
    mine, theirs = steady(8, zero), unrolled(8, zero, EAGER)
    assert len({stamp_of(n).micro_step for n in mine.nodes()}) == UNROLLED
    assert len({stamp_of(n).micro_step for n in theirs.nodes()}) == 8
    a, b = (simulate(graph, COSTS, fuses=False) for graph in (mine, theirs))
    assert a.makespan_us == pytest.approx(b.makespan_us, rel=1e-9)
    assert a.exposed_us == pytest.approx(b.exposed_us, rel=1e-9)
    assert a.busy_us == pytest.approx(b.busy_us, rel=1e-9)
    held = [simulate_memory(graph, fuses=False).peak_bytes for graph in (mine, theirs)]
    not_in_the_graph = 4 * (mine.steady_runs - 1)  # losses
    assert held[1] - held[0] in (0, not_in_the_graph)
    assert traffic_of(mine) == traffic_of(theirs)


@pytest.mark.parametrize(
    ("zero", "micro_batches", "options"),
    pairwise((0, 1, 2, 3), (8, 16), tuple(OPTIONS), always=[(3, 16, "by cost")]),
)
def test_what_a_step_hands_on(zero: int, micro_batches: int, options: str) -> None:
    """The body reads its own values, those of the run before, and what never changes."""
    graph = steady(micro_batches, zero, OPTIONS[options])
    assert graph.steady_runs == micro_batches - UNROLLED + 1
    loop = find_loop(graph)
    body = set(loop.body)
    known = {*loop.carried, *loop.kept, *body}
    for node in loop.body:
        for source in node.all_input_nodes:
            is_rows = source.op == "call_function" and stamp_of(source).role is Role.ROWS
            assert source in known or source.op in ("placeholder", "get_attr") or is_rows
    assert body.issuperset(loop.carried.values())
    assert len(loop.collected) == 1


def test_traffic_of_many_micro_batches() -> None:
    """(k + 1)P at stage 2, 3kP at stage 3, but for the first layer's second gather."""
    for zero, factor in ((2, 65), (3, 3 * 64)):
        compilation = compiled_step(chain_of(rows=64), zero=zero, micro_batches=64)
        params = sum(spec.num_elements for spec in compilation.specs.values())
        plan = Analysis.of(Capture((compilation,), params, 8, zero))
        not_read = 64 * 8**2 if zero == 3 else 0
        assert plan.wire_elements() == factor * params - not_read


def test_steps_of_other_lengths_are_other_steps() -> None:
    """Though their graphs have the same collectives."""
    assert collectives_digest(steady(8, 3)) != collectives_digest(steady(16, 3))


def test_the_plan_bounds_all_micro_steps() -> None:
    """The default budget of a long step is that of one that holds all."""
    budgets = set()
    for graph in (steady(8, 3), steady(16, 3), unrolled(8, 3, EAGER)):
        inventory = Inventory(graph, COSTS, cut=False, fuses=False)
        budgets.add(default_budget(problem_of(inventory).graph))
    assert len(budgets) == 1


def _swap(graph: StepGraph, lane: Lane) -> None:
    """Exchange two neighbours of the steady micro-step that do not need each other."""
    nodes = [n for n in graph.nodes(role=Role.LAUNCH) if stamp_of(n).lane is lane]
    node = next(n for n in nodes if stamp_of(n).micro_step == STEADY and not begins(n.next, STEADY))
    node.next.append(node)


def _drop_release(graph: StepGraph) -> None:
    node = next(n for n in graph.nodes(role=Role.RELEASE) if stamp_of(n).micro_step == STEADY)
    graph.graph.erase_node(node)


def _other_number(graph: StepGraph) -> None:
    def has_number(node: fx.Node) -> bool:
        return any(isinstance(a, (int, float)) for a in node.args)

    nodes = graph.nodes(role=Role.COMPUTE)
    node = next(n for n in nodes if stamp_of(n).micro_step == STEADY and has_number(n))
    node.args = tuple(a + 1 if isinstance(a, (int, float)) else a for a in node.args)


def _read_an_older_value(graph: StepGraph) -> None:
    first = next(n for n in graph.nodes() if begins(n, 1))
    node = next(n for n in graph.nodes() if begins(n, STEADY))
    node.replace_all_uses_with(first)


def _read_late(graph: StepGraph) -> None:
    """Let the update read what only one run has made."""
    node = next(n for n in graph.nodes() if begins(n, STEADY))
    values = list(graph.output_values)
    graph.set_output_values([*values, node])


@pytest.mark.parametrize("change", [_drop_release, _other_number, _read_an_older_value, _read_late])
def test_refused(change: Callable[[StepGraph], None]) -> None:
    """A micro-step that differs from the one before stands for nobody."""
    graph = steady(8, 3)
    find_loop(graph)
    change(graph)
    with pytest.raises(NotSteadyError):
        find_loop(graph)


def test_another_order_is_refused() -> None:
    """The stretch must do the same in the same order."""
    graph = steady(8, 3)
    _swap(graph, Lane.GATHER)
    with pytest.raises(NotSteadyError):
        find_loop(graph)

"""Orders of tasks: valid, within the budget, and as good as they can be where that is known."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxzero.graph import Lane
from fxzero.schedule import Hold, Task, TaskGraph, best_order, exact_order, fixed_order, replay
from fxzero.schedule.search import EXACT_TASKS, SLACK, list_order
from fxzero.transfer import Pool
from tests.work import calls, growth

GATHER, REDUCE, COMPUTE = Lane.GATHER, Lane.REDUCE, Lane.COMPUTE


def within(budget: int | None) -> dict[Pool, int]:
    """Budgets of a device, or none."""
    return {} if budget is None else {Pool.DEVICE: budget}


@st.composite
def task_graphs(draw: st.DrawFn, max_size: int = 20, min_size: int = 1) -> TaskGraph:
    """Random DAGs: any lane, any needs among earlier tasks, bytes that end with any later ones."""
    count = draw(st.integers(min_size, max_size))
    needs = [
        tuple(sorted(draw(st.sets(st.integers(0, i - 1), max_size=3)))) if i else ()
        for i in range(count)
    ]
    tasks = []
    for i in range(count):
        lane = draw(st.sampled_from([COMPUTE, COMPUTE, GATHER, REDUCE]))
        readers = [j for j in range(i + 1, count) if i in needs[j]]
        held = draw(st.integers(0, 8)) if readers and draw(st.booleans()) else 0
        tasks.append(
            Task(
                f"{lane.value} {i}",
                lane,
                us=float(draw(st.integers(1, 20))),
                host_us=float(draw(st.integers(0, 3))) if lane is not COMPUTE else 0.0,
                after=needs[i],
                holds=(Hold(held, tuple(readers)),) if held else (),
            )
        )
    least = replay(TaskGraph(tuple(tasks)), range(count)).peak_bytes
    budget = draw(st.none() | st.integers(least, 3 * least + 1))
    return TaskGraph(tuple(tasks), within(budget))


def assert_valid(graph: TaskGraph, order: Sequence[int]) -> None:
    """Every task once, after what it needs: then every node sees the values that it always saw."""
    assert sorted(order) == list(range(len(graph)))
    position = {task: i for i, task in enumerate(order)}
    for i, task in enumerate(graph.tasks):
        assert all(position[before] < position[i] for before in task.after)


@settings(max_examples=200, deadline=None)
@given(task_graphs())
def test_orders_are_valid_and_within_the_budget(graph: TaskGraph) -> None:
    """Whatever the graph, what is found can be run and holds what it may."""
    found = best_order(graph)
    if found is None:  # no order of the kinds that are tried fits
        assert graph.budget_bytes is not None
        return
    assert_valid(graph, found.order)
    assert found.replay == replay(graph, found.order)
    if graph.budget_bytes is not None:
        assert found.replay.peak_bytes <= graph.budget_bytes


@settings(max_examples=200, deadline=None)
@given(task_graphs(), st.integers(0, 3), st.integers(0, 3))
def test_never_slower_than_a_fixed_distance(graph: TaskGraph, ahead: int, late: int) -> None:
    """The schedule that it replaces, where that one fits the budget."""
    fixed = fixed_order(graph, ahead, late)
    assert_valid(graph, fixed)
    one = replay(graph, fixed_order(graph, 1, 1))
    found = best_order(graph)
    if graph.budget_bytes is None or one.peak_bytes <= graph.budget_bytes:
        assert found is not None
        assert found.replay.makespan_us <= one.makespan_us


@settings(max_examples=100, deadline=None)
@given(task_graphs(max_size=6))
def test_equals_brute_force(graph: TaskGraph) -> None:
    """No order of a few tasks is faster, and of the fastest none holds less."""
    best: tuple[float, int] | None = None
    for order in itertools.permutations(range(len(graph))):
        position = {task: i for i, task in enumerate(order)}
        if any(position[b] > position[i] for i, t in enumerate(graph.tasks) for b in t.after):
            continue
        result = replay(graph, order)
        if graph.budget_bytes is not None and result.peak_bytes > graph.budget_bytes:
            continue
        figure = (result.makespan_us, result.peak_bytes)
        best = figure if best is None else min(best, figure)
    found = best_order(graph)
    assert best == (None if found is None else (found.replay.makespan_us, found.replay.peak_bytes))


@settings(max_examples=15, deadline=None)
@given(task_graphs(max_size=EXACT_TASKS, min_size=EXACT_TASKS))
def test_eight_tasks_are_solved_exactly(graph: TaskGraph) -> None:
    """Up to the size that the search claims; every list order is at best as fast."""
    exact = exact_order(graph)
    found = best_order(graph)
    assert (exact is None) == (found is None)
    if exact is None or found is None:
        return
    assert found.replay.makespan_us == replay(graph, exact).makespan_us
    for joins_first, window in itertools.product((True, False), (0, 8, 64)):
        order = list_order(graph, window, joins_first=joins_first)
        if order is not None:
            assert found.replay.makespan_us <= replay(graph, order).makespan_us


def layers(count: int, wire_us: float, compute_us: float, budget: int | None = None) -> TaskGraph:
    """Forward of equal layers: a gather of ten bytes each, held while the layer computes."""
    tasks: list[Task] = []
    for i in range(count):
        unit = 2 * i + 1
        tasks.append(Task(f"gather {i}", GATHER, wire_us, holds=(Hold(10, (unit,)),)))
        before = (unit - 2,) if i else ()
        tasks.append(Task(f"unit {i}", COMPUTE, compute_us, after=(*before, unit - 1)))
    return TaskGraph(tuple(tasks), within(budget))


def test_hidden_transfers_cost_their_first_one() -> None:
    """Compute is longer than a gather: all but the first are hidden, one ahead is enough."""
    found = best_order(layers(10, wire_us=5, compute_us=8))
    assert found is not None
    assert found.replay.makespan_us == 5 + 10 * 8
    assert found.replay.exposed_us == 5
    assert found.replay.peak_bytes == 20


def test_a_link_that_is_the_bound_is_never_idle() -> None:
    """Gathers are longer than compute: the step is the link's time and one layer."""
    found = best_order(layers(10, wire_us=8, compute_us=5))
    assert found is not None
    assert found.replay.makespan_us == pytest.approx(10 * 8 + 5, rel=SLACK)


def test_transfers_that_cost_compute_are_not_run_ahead() -> None:
    """A host that moves the bytes itself gains nothing, so nothing more is held."""
    graph = layers(10, wire_us=5, compute_us=8)
    tasks = tuple(
        Task(t.name, t.lane, 0.0 if t.is_transfer else t.us, 5.0, t.after, t.holds)
        for t in graph.tasks
    )
    found = best_order(TaskGraph(tasks))
    assert found is not None
    assert found.replay.peak_bytes == 10


def test_a_budget_that_nothing_fits() -> None:
    """A layer alone holds ten bytes."""
    assert best_order(layers(10, 5, 8, budget=9)) is None
    found = best_order(layers(10, 5, 8, budget=10))
    assert found is not None
    assert found.replay.peak_bytes == 10


def test_joins_free_memory_for_what_follows() -> None:
    """Backward under a budget: a gradient's reduce is joined before the next one is made."""
    tasks: list[Task] = []
    units: list[int] = []
    for i in range(6):
        unit = len(tasks)
        after = (units[-1],) if units else ()
        tasks.append(Task(f"unit {i}", COMPUTE, 8, after=after, holds=(Hold(10, (unit + 2,)),)))
        tasks.append(Task(f"reduce {i}", REDUCE, 5, after=(unit,)))
        tasks.append(Task(f"join {i}", COMPUTE, 1, after=(unit + 1,)))
        units.append(unit)
    for budget in (10, 20):
        found = best_order(TaskGraph(tuple(tasks), within(budget)))
        assert found is not None
        assert found.replay.peak_bytes == budget
    rich = best_order(TaskGraph(tuple(tasks), within(1000)))
    assert rich is not None
    assert rich.replay.makespan_us == 6 * 8 + 6  # joined last, so that no reduce is waited for
    assert best_order(TaskGraph(tuple(tasks), within(9))) is None


@pytest.mark.exhaustive
def test_growth() -> None:
    """Ten times the layers take about ten times as long to schedule."""
    few, many = layers(50, 5, 8), layers(500, 5, 8)
    assert calls(lambda: best_order(many)) < 15 * calls(lambda: best_order(few))
    assert growth(lambda: best_order(few), lambda: best_order(many), repeats=3) < 25

"""Stages of pipelines, against every way to cut."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence
from dataclasses import replace

import networkx as nx
import numpy as np
import pytest

from fxzero.schedule.stage_cuts import Cuts, Positions, best_cuts, reads_nothing


def ideals_of(graph: nx.DiGraph, most: int) -> list[frozenset[int]] | None:
    """All sets of a graph's nodes that contain what their nodes need, smallest first; None if there
    are more than `most`."""
    found: list[frozenset[int]] = []
    for antichain in nx.antichains(graph):
        if len(found) == most:
            return None
        closed = set(antichain).union(*(nx.ancestors(graph, node) for node in antichain))
        found.append(frozenset(closed))
    return sorted(found, key=lambda ideal: (len(ideal), sorted(ideal)))


def every_way(
    positions: Positions,
    num_stages: int,
    num_micro_steps: int,
    budget_bytes: float = np.inf,
    in_flight: Sequence[int] = (),
    each_reads: bool = False,
) -> float:
    """What the fastest of all ways to cut takes; infinite if there is none."""
    flights = list(in_flight) or [1] * num_stages
    last = len(positions.us) - 1
    best = float("inf")
    for chosen in itertools.combinations(range(1, last), num_stages - 1):
        ends = [0, *chosen, last]
        pairs = list(itertools.pairwise(ends))
        if not all(positions.nested[a, b] for a, b in pairs):
            continue
        held = [
            positions.state_bytes[b]
            - positions.state_bytes[a]
            + flight * (positions.saved_bytes[b] - positions.saved_bytes[a])
            for (a, b), flight in zip(pairs, flights, strict=True)
        ]
        if max(held) > budget_bytes:
            continue
        reads = positions.num_reads
        if each_reads and reads is not None and any(reads[a] == reads[b] for a, b in pairs):
            continue
        parts = [positions.us[b] - positions.us[a] for a, b in pairs]
        sent = [positions.cut_us[c] for c in chosen]
        us = sum(parts) + sum(sent) + (num_micro_steps - 1) * max([*parts, *sent])
        best = min(best, us)
    return best


def is_best(positions: Positions, num_stages: int, num_micro_steps: int, **bounds: object) -> bool:
    """Whether the programme finds what all ways to cut come to."""
    found = best_cuts(positions, num_stages, num_micro_steps, **bounds)  # type: ignore[arg-type]
    wanted = every_way(positions, num_stages, num_micro_steps, **bounds)  # type: ignore[arg-type]
    if found is None:
        return wanted == float("inf")
    return found.us == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("length", range(1, 13))
def test_chains(length: int) -> None:
    """Every number of stages, with little and with much to send."""
    rng = random.Random(length)
    for num_stages in range(1, length + 1):
        for scale in (0.0, 0.1, 3.0):
            us = [rng.choice([1.0, rng.random()]) for _ in range(length)]
            cut_us = [scale * rng.random() for _ in range(length - 1)]
            positions = Positions.of_chain(us, cut_us)
            assert is_best(positions, num_stages, rng.choice([1, 2, 8, 64]))


def random_graph(rng: random.Random) -> nx.DiGraph:
    """Up to ten nodes, each with a time and what it makes."""
    graph = nx.DiGraph()
    count = rng.randint(2, 10)
    for node in range(count):
        graph.add_node(node, us=rng.random(), sent=rng.random(), held=rng.random())
        for before in range(node):
            if rng.random() < 0.35:
                graph.add_edge(before, node)
    return graph


def positions_of(graph: nx.DiGraph) -> Positions:
    """All of a small graph's ideals: what is made on one side and read on the other travels."""
    ideals = ideals_of(graph, 4096)
    assert ideals is not None
    nodes = graph.nodes
    cut_us = [
        sum(nodes[n]["sent"] for n in ideal if any(s not in ideal for s in graph.successors(n)))
        for ideal in ideals
    ]
    us, held = ([sum(nodes[n][k] for n in ideal) for ideal in ideals] for k in ("us", "held"))
    nested = np.array([[a < b for b in ideals] for a in ideals])
    return Positions(np.array(us), np.array(cut_us), np.array(held), np.array(us), nested)


def test_two_hundred_graphs() -> None:
    """Of up to ten nodes, whatever their order, with budgets and without."""
    rng = random.Random(0)
    looked_at = 0
    while looked_at < 200:
        positions = positions_of(random_graph(rng))
        if len(positions.us) > 60:
            continue  # thirty thousand ways and more
        looked_at += 1
        num_stages = rng.randint(1, 4)
        bounds: dict[str, object] = {}
        if rng.random() < 0.5:
            bounds["budget_bytes"] = rng.uniform(0.5, 6.0)
            bounds["in_flight"] = [num_stages - s for s in range(num_stages)]
        assert is_best(positions, num_stages, rng.choice([1, 2, 16]), **bounds)


def test_a_budget_moves_work_to_stages_with_less_in_flight() -> None:
    """The first of four stages keeps four micro-steps, the last one."""
    positions = Positions.of_chain([1.0] * 20, [0.0] * 19, saved_bytes=[1.0] * 20)
    even = best_cuts(positions, 4, 8)
    assert even is not None
    assert even.positions == (5, 10, 15)
    found = best_cuts(positions, 4, 8, budget_bytes=14, in_flight=[4, 3, 2, 1])
    assert found is not None
    assert np.diff([0, *found.positions, 20]).tolist() <= [3, 4, 7, 14]
    assert best_cuts(positions, 4, 8, budget_bytes=9, in_flight=[4, 3, 2, 1]) is None


def test_every_stage_reads_a_parameter() -> None:
    """The fastest of the ways in which each does; those without a bound may leave one without."""
    rng = random.Random(7)
    left_out = 0
    for _ in range(60):
        count = rng.randint(4, 10)
        us = [rng.choice([0.1, 1.0, 4.0]) for _ in range(count)]
        chain = Positions.of_chain(us, [rng.choice([0.0, 0.5, 2.0]) for _ in us[1:]])
        reads = np.concatenate([[0.0], np.cumsum([rng.random() < 0.5 for _ in us])])
        positions = replace(chain, num_reads=reads)
        num_stages = rng.randint(2, 4)
        free = best_cuts(positions, num_stages, 8)
        left_out += free is not None and reads_nothing(positions, free)
        assert is_best(positions, num_stages, 8, each_reads=True)
        found = best_cuts(positions, num_stages, 8, each_reads=True)
        assert found is None or not reads_nothing(positions, found)
    assert left_out > 10


def test_more_stages_than_there_are_cuts() -> None:
    """There are none."""
    assert best_cuts(Positions.of_chain([1.0, 1.0], [0.0]), 3, 4) is None


def test_one_stage() -> None:
    """All of it, and nothing is sent."""
    assert best_cuts(Positions.of_chain([1.0, 2.0], [5.0]), 1, 4) == Cuts((), 12.0, 3.0)


def test_many_ideals_are_too_many() -> None:
    """Ten nodes without an edge have a thousand."""
    graph = nx.empty_graph(10, create_using=nx.DiGraph)
    assert ideals_of(graph, 1023) is None
    found = ideals_of(graph, 1024)
    assert found is not None
    assert len(found) == 1024
    assert found[0] == frozenset()


def test_long_chains_take_little_time() -> None:
    """96 layers of eight operators into eight stages: under five seconds."""
    rng = random.Random(1)
    us = [rng.random() for _ in range(96 * 8)]
    cut_us = [rng.choice([0.01, 0.5, 2.0]) * rng.random() for _ in us[1:]]
    begin = time.process_time()
    found = best_cuts(Positions.of_chain(us, cut_us), 8, 64)
    assert found is not None
    assert time.process_time() - begin < 5

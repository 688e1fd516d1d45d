"""Minimum cuts, against networkx's."""

from __future__ import annotations

import random

import networkx as nx
import pytest

from fxzero.schedule.minimum_cut import SINK, SOURCE, Edge, MinimumCut


def random_edges(rng: random.Random, num_nodes: int) -> tuple[list[Edge], list[Edge]]:
    """Edges between any two nodes, a fifth of which cannot be cut."""
    edges: tuple[list[Edge], list[Edge]] = ([], [])
    for _ in range(rng.randint(num_nodes, 4 * num_nodes)):
        a, b = rng.sample(range(num_nodes), 2)
        edges[rng.random() < 0.2].append((a, b))
    return edges


def networkx_cut(
    edges: list[Edge], uncuttable: list[Edge], capacities: list[int]
) -> set[int] | None:
    """The fewest nodes behind a minimum cut; None if there is none."""
    network = nx.DiGraph()
    network.add_nodes_from([SOURCE, SINK])
    for (a, b), capacity in zip(edges, capacities, strict=True):
        before = network.get_edge_data(a, b, {"capacity": 0})["capacity"]
        network.add_edge(a, b, capacity=before + capacity)
    network.remove_edges_from(uncuttable)
    network.add_edges_from(uncuttable)  # without a capacity
    try:
        _, (_, late) = nx.minimum_cut(
            network, SOURCE, SINK, flow_func=nx.algorithms.flow.boykov_kolmogorov
        )
    except nx.NetworkXUnbounded:
        return None
    return set(late)


@pytest.mark.parametrize("seed", range(40))
def test_the_cut_is_that_of_networkx(seed: int) -> None:
    """On the same edges for several capacities, 0 among them."""
    rng = random.Random(seed)
    num_nodes = rng.randint(2, 30)
    edges, uncuttable = random_edges(rng, num_nodes)
    cut = MinimumCut(num_nodes, edges, uncuttable)
    for largest in (3, 10**12):
        capacities = [rng.randint(0, largest) for _ in edges]
        expected = networkx_cut(edges, uncuttable, capacities)
        assert cut.is_possible == (expected is not None)
        if expected is not None:
            assert cut.before_sink(capacities) == expected


def test_of_two_cuts_the_one_nearer_to_the_sink() -> None:
    """Both edges of a chain carry as much."""
    cut = MinimumCut(3, [(SOURCE, 2), (2, SINK)], [])
    assert cut.before_sink([5, 5]) == {SINK}
    assert cut.before_sink([4, 5]) == {SINK, 2}

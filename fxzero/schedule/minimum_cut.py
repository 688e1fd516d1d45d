"""A minimum cut, for one price after another on the same edges.

    source ─4─► a ─1─► b ─∞─► sink        cut: a → b; only b is on the sink's side

By shortest augmenting paths (Dinic 1970), on what is left once nodes are joined that no cut parts:
what the source leads to, and what leads to the sink, by edges that cannot be cut. Of several
minimum cuts it is the one with the fewest nodes on the sink's side, which is the same whatever the
flow was. networkx, which builds its network of dictionaries for every price, takes some ten times
as long, and that was most of the time of a compilation under a memory budget.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

SOURCE, SINK = 0, 1

Edge = tuple[int, int]
"""From one node to another one."""


class MinimumCut:
    """Nodes from 0 to `num_nodes` - 1, of which 0 is the source and 1 the sink.

    Args:
        edges: those with a capacity.
        uncuttable: those without a bound.
    """

    def __init__(self, num_nodes: int, edges: Sequence[Edge], uncuttable: Sequence[Edge]) -> None:
        self.is_possible = True
        """Whether every way from the source to the sink can be cut."""
        behind = _reached(SOURCE, uncuttable)
        self._before = _reached(SINK, [(b, a) for a, b in uncuttable])
        if behind & self._before:
            self.is_possible = False
            return
        joined = list(range(num_nodes))
        for node in behind:
            joined[node] = SOURCE
        for node in self._before:
            joined[node] = SINK
        leading = _reached(SINK, [(joined[b], joined[a]) for a, b in (*edges, *uncuttable)])
        self._leads_to: list[list[int]] = [[] for _ in range(num_nodes)]
        """By node, its edges: each is followed by its reverse."""
        self._ends: list[int] = []
        """By edge, the node that it leads to."""
        self._cuttable = self._add(edges, joined, leading)
        """Positions of the edges with a capacity that matter."""
        self._add(uncuttable, joined, leading)

    def _add(self, edges: Sequence[Edge], joined: list[int], leading: set[int]) -> list[int]:
        taken = []
        for position, (a, b) in enumerate(edges):
            start, end = joined[a], joined[b]
            if start in (end, SINK) or end == SOURCE or end not in leading:
                continue
            if (start, end) == (SOURCE, SINK):
                continue  # in every cut
            taken.append(position)
            number = len(self._ends)
            self._leads_to[start].append(number)
            self._leads_to[end].append(number + 1)
            self._ends += (end, start)
        return taken

    def before_sink(self, capacities: Sequence[int]) -> set[int]:
        """The nodes on the sink's side, which are as few as can be.

        Args:
            capacities: by the position of an edge with a capacity, 0 or more.
        """
        assert self.is_possible
        left = [0] * len(self._ends)
        unbounded = 1
        for number, position in enumerate(self._cuttable):
            left[2 * number] = capacities[position]
            unbounded += capacities[position]
        for edge in range(2 * len(self._cuttable), len(left), 2):
            left[edge] = unbounded
        while True:
            distance = self._distances(left)
            if distance[SOURCE] < 0:
                far = {node for node, steps in enumerate(distance) if steps >= 0}
                return far | self._before
            self._fill(left, distance)

    def _distances(self, left: list[int]) -> list[int]:
        """Steps from each node to the sink over edges that have something left; -1 if none lead."""
        ends, leads_to = self._ends, self._leads_to
        distance = [-1] * len(leads_to)
        distance[SINK] = 0
        queue = [SINK]
        for node in queue:
            steps = distance[node] + 1
            for edge in leads_to[node]:
                if left[edge ^ 1] and distance[ends[edge]] < 0:
                    distance[ends[edge]] = steps
                    queue.append(ends[edge])
        return distance

    def _fill(self, left: list[int], distance: list[int]) -> None:
        """Send what fits over shortest ways, until each of them is full."""
        ends, leads_to = self._ends, self._leads_to
        tried = [0] * len(leads_to)
        way: list[int] = []
        node = SOURCE
        while True:
            if node == SINK:
                fits = min(left[edge] for edge in way)
                for edge in way:
                    left[edge] -= fits
                    left[edge ^ 1] += fits
                full = next(i for i, edge in enumerate(way) if not left[edge])
                node = ends[way[full] ^ 1]
                del way[full:]
            edges, steps = leads_to[node], distance[node] - 1
            for i in range(tried[node], len(edges)):
                if left[edges[i]] and distance[ends[edges[i]]] == steps:
                    tried[node] = i
                    way.append(edges[i])
                    node = ends[edges[i]]
                    break
            else:
                if node == SOURCE:
                    return
                tried[node] = len(edges)
                node = ends[way.pop() ^ 1]
                tried[node] += 1


def _reached(start: int, edges: Iterable[Edge]) -> set[int]:
    """A node and all that its edges lead to."""
    following: dict[int, list[int]] = {}
    for a, b in edges:
        following.setdefault(a, []).append(b)
    found = {start}
    queue = [start]
    for node in queue:
        for end in following.get(node, ()):
            if end not in found:
                found.add(end)
                queue.append(end)
    return found

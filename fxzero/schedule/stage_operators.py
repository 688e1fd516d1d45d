"""The operators of a micro-step's forward, each with what comes of it in backward.

Backward's nodes are known by their forward's: autograd has numbered both alike. What depends on no
parameter (masks, positions, rotary tables) is no operator of a stage: it is computed where it is
read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import fx

from fxzero.cost.model import CostModel
from fxzero.graph import Phase, Role, StepGraph
from fxzero.graph.aliases import is_view, root
from fxzero.graph.assign_stages import number_of
from fxzero.graph.operators import is_random, num_bytes
from fxzero.graph.stamps import stamp_of


@dataclass
class Operator:
    """A node of forward that a stage computes, with what has come of it in backward."""

    node: fx.Node
    forward_us: float = 0.0
    backward: list[tuple[float, int]] = field(default_factory=list)
    """By node of it: what it takes, and the place of the first operator whose backward waits for
    it."""
    params: set[str] = field(default_factory=set)
    """Keys of the parameters that it reads."""


class Operators:
    """The operators of a joint graph's forward, in its order."""

    def __init__(self, graph: StepGraph, costs: CostModel) -> None:
        self.graph = graph
        self.costs = costs
        forward = list(graph.nodes(phase=Phase.FORWARD, role=Role.COMPUTE))
        self.free = _free_of_parameters(graph, forward)
        used = _used_in_forward(graph, forward)
        self.own = [Operator(n) for n in forward if n in used and n not in self.free]
        self.place = {op.node: i for i, op in enumerate(self.own)}
        for node in forward:  # what backward alone reads stands where what it is made of does
            if node not in used and node not in self.free:
                sources = [self.place[s] for s in node.all_input_nodes if s in self.place]
                self.place[node] = max(sources, default=0)
        self._find_params()
        self._find_times()

    def _find_params(self) -> None:
        for op in self.own:
            for source in op.node.all_input_nodes:
                if source in self.graph.inputs:
                    op.params.add(self.graph.inputs[source])
                elif source.op == "call_function" and stamp_of(source).role is Role.UNSHARD:
                    op.params.update(stamp_of(source).params)

    def _find_times(self) -> None:
        twins: dict[tuple[str, object], Operator] = {}
        for op in self.own:  # the first of several, which are parts of it
            twins.setdefault(number_of(op.node), op)
        backward = list(self.graph.nodes(phase=Phase.BACKWARD, role=Role.COMPUTE))
        self.twin = {node: twins.get(number_of(node)) for node in backward}
        self._lend(backward)
        us = self._node_us([op.node for op in self.own]) | self._node_us(backward)
        reaches = self._earliest(backward)
        for op in self.own:
            op.forward_us = us[op.node]
        for node in backward:
            twin = self.twin[node]
            if twin is not None:
                twin.backward.append((us[node], reaches[node]))

    def _lend(self, backward: list[fx.Node]) -> None:
        """Let a node without a number go with the first backward node that reads it."""
        for node in reversed(backward):
            if self.twin[node] is None:
                readers = (self.twin.get(user) for user in node.users)
                self.twin[node] = next((twin for twin in readers if twin is not None), None)

    def _node_us(self, nodes: Sequence[fx.Node]) -> dict[fx.Node, float]:
        """What each node takes as part of the run of its layer that it will be fused into."""
        runs: list[list[fx.Node]] = []
        for node in nodes:
            if runs and stamp_of(runs[-1][-1]).layer == stamp_of(node).layer:
                runs[-1].append(node)
            else:
                runs.append([node])
        found: dict[fx.Node, float] = {}
        for run in runs:
            alone = {node: 0.0 if is_view(node) else self.costs.operator_us(node) for node in run}
            together, total = self.costs.compute_us(run), sum(alone.values())
            found |= {node: us * together / total if total else 0.0 for node, us in alone.items()}
        return found

    def _earliest(self, backward: list[fx.Node]) -> dict[fx.Node, int]:
        """By node of backward, the place of the first operator whose backward waits for it."""
        found: dict[fx.Node, int] = {}
        last = len(self.own)
        for node in reversed(backward):
            twin = self.twin[node]
            own = self.place[twin.node] if twin is not None else last
            found[node] = min([own, *(found.get(user, last) for user in node.users)])
        return found

    def last_read(self) -> dict[fx.Node, int]:
        """By value that an operator makes, the place of the last operator that reads it, itself or
        in its backward."""
        found: dict[fx.Node, int] = {}
        for op in self.own:
            for source in op.node.all_input_nodes:
                self._note(found, source, self.place[op.node])
        for node, twin in self.twin.items():
            for source in node.all_input_nodes if twin is not None else ():
                assert twin is not None
                self._note(found, source, self.place[twin.node])
        return found

    def _note(self, found: dict[fx.Node, int], source: fx.Node, place: int) -> None:
        if source in self.place:
            value = root(source)
            if value in self.place:
                found[value] = max(found.get(value, 0), place)

    def saved(self) -> dict[fx.Node, int]:
        """By value that backward reads, its bytes."""
        read = {root(s) for node in self.twin for s in node.all_input_nodes if s in self.place}
        return {value: num_bytes(value) for value in read if value in self.place}


def _used_in_forward(graph: StepGraph, forward: Sequence[fx.Node]) -> set[fx.Node]:
    """What the forward's results need; the rest is kept for backward alone."""
    values = graph.output_values[: graph.num_forward_outputs]
    queue = [value for value in values if isinstance(value, fx.Node)]
    inside = set(forward)
    found: set[fx.Node] = set()
    while queue:
        node = queue.pop()
        if node in inside and node not in found:
            found.add(node)
            queue += node.all_input_nodes
    return found


def _free_of_parameters(graph: StepGraph, forward: Iterable[fx.Node]) -> set[fx.Node]:
    """What can be computed anywhere: from the batch and from numbers alone, and not at random."""
    free: set[fx.Node] = set()
    for node in forward:
        if is_random(node):
            continue
        sources = node.all_input_nodes
        if all(
            source in free
            or source.op == "get_attr"
            or (source.op == "placeholder" and source not in graph.inputs)
            for source in sources
        ):
            free.add(node)
    return free

"""Which stage of a pipeline computes each node of one micro-step.

    forward     as early as what it reads allows, on a stage that holds the parameters that it
                reads, and all parts of one operator together; then later, as far as its readers
                allow, where less crosses the borders that way: a minimum cut of each
    backward    where its forward's node is (autograd has numbered both alike), and never before
                what it reads of backward has come down to it

What depends on no parameter, and on nothing random, is everywhere; so are views, and what marks
parameters: whoever reads them makes them again. A value travels from stage to stage: up in forward,
down in backward.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import networkx as nx
import torch
from torch import fx

from fxzero.errors import CaptureError
from fxzero.graph.aliases import is_view, root
from fxzero.graph.node_text import source_line
from fxzero.graph.operators import is_random, num_bytes
from fxzero.graph.stamps import Phase, Role, stamp_of
from fxzero.graph.step_graph import StepGraph

_FRONT, _BEHIND = "in front", "behind"
"""The two sides of a border."""


@dataclass
class Stages:
    """Where the nodes of a micro-step are computed."""

    of: dict[fx.Node, int] = field(default_factory=dict)
    """By node. What is missing here, is everywhere."""
    up: dict[fx.Node, int] = field(default_factory=dict)
    """By value that travels in forward, the last stage that it goes to."""
    down: dict[fx.Node, int] = field(default_factory=dict)
    """By value that travels in backward, the first stage that it goes to."""
    marks: dict[fx.Node, int] = field(default_factory=dict)
    """By marker of a gradient, the stage that takes it: it holds the parameter."""

    def crossing_up(self, stage: int) -> list[fx.Node]:
        """What a stage gives to the one behind it, in the graph's order."""
        return sorted(v for v, last in self.up.items() if self.of[v] <= stage < last)

    def crossing_down(self, stage: int) -> list[fx.Node]:
        """What a stage gives to the one before it in backward, in the graph's order."""
        return sorted(v for v, first in self.down.items() if first < stage <= self.of[v])


def assign_stages(graph: StepGraph, holders: Mapping[str, Collection[int]]) -> Stages:
    """Find the stage of every node.

    Args:
        graph: one micro-step, stamped, with all of its layers.
        holders: by a parameter's key, the stages that hold it.

    Raises:
        CaptureError: something is read where it cannot be.
    """
    return _Assignment(graph, holders).run()


class _Assignment:
    def __init__(self, graph: StepGraph, holders: Mapping[str, Collection[int]]) -> None:
        self.graph = graph
        self.holders = holders
        self.found = Stages()
        nodes = [n for n in graph.graph.nodes if n.op == "call_function"]
        self.markers = {n for n in nodes if stamp_of(n).role in (Role.UNSHARD, Role.RESHARD)}
        self.sums = _sums_of_gradients(graph)
        self.nodes = [n for n in nodes if n not in self.markers and n not in self.sums]
        self.forward = [n for n in self.nodes if stamp_of(n).phase is Phase.FORWARD]
        self.backward = [n for n in self.nodes if stamp_of(n).phase is not Phase.FORWARD]
        self.everywhere: set[fx.Node] = set()
        """Nodes that every reader's stage makes for itself."""

    def run(self) -> Stages:
        self._find_free()
        self._forward_stages()
        self._move_later()
        self._backward_stages()
        self._mark_gradients()
        self._travel()
        return self.found

    def _find_free(self) -> None:
        """What needs no parameter and draws nothing is everywhere."""
        for node in self.forward:
            sources = node.all_input_nodes
            if is_random(node) or not node.users:
                continue
            if all(s in self.everywhere or self._is_given(s) for s in sources):
                self.everywhere.add(node)

    def _is_given(self, node: fx.Node) -> bool:
        """Whether a node is there on every rank: an input that is no parameter, a constant."""
        return node.op == "get_attr" or (node.op == "placeholder" and node not in self.graph.inputs)

    def _params(self, node: fx.Node) -> set[str]:
        """Keys of the parameters that a node reads, through markers and views of them."""
        found = set()
        for source in node.all_input_nodes:
            owner = root(source)
            if owner in self.graph.inputs:
                found.add(self.graph.inputs[owner])
            elif owner in self.markers and stamp_of(owner).role is Role.UNSHARD:
                found.update(stamp_of(owner).params)
        return found

    def _values(self, node: fx.Node) -> list[fx.Node]:
        """The values, of some stage, that a node reads, through views."""
        owners = dict.fromkeys(root(source) for source in node.all_input_nodes)
        return [owner for owner in owners if owner in self.found.of]

    def _forward_stages(self) -> None:
        stages = self.found.of
        own = [n for n in self.forward if n not in self.everywhere and not self._looks(n)]
        together: dict[tuple[object, ...], int] = {}
        """By operator of the model's, the last stage that a part of it needs."""
        while True:
            needed = dict(together)
            for node in own:
                if node.target is operator.getitem and node.all_input_nodes[0] in stages:
                    stages[node] = stages[node.all_input_nodes[0]]
                    continue
                before = max((stages[value] for value in self._values(node)), default=0)
                number = operator_of(node)
                stages[node] = self._held_from(node, max(before, needed.get(number, 0)))
                if number[1] is not None:
                    together[number] = max(together.get(number, 0), stages[node])
            if together == needed:
                return  # stages only grow, and there is a last one

    def _looks(self, node: fx.Node) -> bool:
        """Whether a node is a view, of a parameter or of what another node has made."""
        return is_view(node) and node not in self.everywhere

    def _held_from(self, node: fx.Node, before: int) -> int:
        """The first stage, from one on, that holds the parameters that a node reads."""
        params = self._params(node)
        if not params:
            return before
        allowed = set.intersection(*(set(self.holders[key]) for key in params))
        later = [stage for stage in allowed if stage >= before]
        if not later:
            names = ", ".join(sorted(self.graph.specs[key].name for key in params))
            line = source_line(node)
            raise CaptureError(
                f"{node.name} ({node.target}){f' at {line}' if line else ''} reads {names}, of "
                f"stage {' and '.join(map(str, sorted(allowed))) or 'none in common'}, and what "
                f"stage {before} has made. Stages follow each other in the order of the forward: "
                "give its module a later stage, others earlier ones (fxzero.shard(stages=…)), or "
                "let example_inputs= find stages, several of which may hold one parameter."
            )
        return min(later)

    def _move_later(self) -> None:
        """Move what may be on either side of a border to where least crosses it."""
        stages = self.found.of
        own = [n for n in self.forward if n in stages]
        reads = self._readers(own)
        latest = self._latest(own, reads)
        together = self._together(own)
        for members in together:
            bound = min(latest[node] for node in members)
            latest.update(dict.fromkeys(members, bound))
        found = dict(stages)
        for border in range(max(latest.values(), default=0)):
            may = [n for n in own if stages[n] <= border < latest[n]]
            for node in self._right_of(border, may, reads, together) if may else ():
                found[node] = border + 1
        if all(self._is_allowed(node, found) for node in own):
            stages.update(found)

    def _latest(
        self, own: list[fx.Node], reads: Mapping[fx.Node, list[fx.Node]]
    ) -> dict[fx.Node, int]:
        """By node, the last stage at which all of its readers still get it."""
        stages = self.found.of
        latest: dict[fx.Node, int] = {}
        results = {root(v) for v in self.graph.output_values if isinstance(v, fx.Node)}
        for node in reversed(own):
            readers = [latest[user] for user in reads.get(node, ())]
            last = min(readers) if readers and node not in results else stages[node]
            params = self._params(node)
            if params:
                held = set.intersection(*(set(self.holders[key]) for key in params))
                last = max(stage for stage in held if stage <= max(last, stages[node]))
            latest[node] = max(last, stages[node])
        return latest

    def _together(self, own: list[fx.Node]) -> list[list[fx.Node]]:
        """Nodes that stay on one stage: parts of one operator, and of one result."""
        groups: dict[object, list[fx.Node]] = {}
        for node in own:
            owner = node
            if node.target is operator.getitem and node.all_input_nodes[0] in self.found.of:
                owner = node.all_input_nodes[0]
            number = operator_of(owner)
            groups.setdefault(number if number[1] is not None else ("", owner), []).append(node)
        return [members for members in groups.values() if len(members) > 1]

    def _right_of(
        self,
        border: int,
        may: list[fx.Node],
        reads: Mapping[fx.Node, list[fx.Node]],
        together: list[list[fx.Node]],
    ) -> set[fx.Node]:
        """Of nodes that may be in front of a border or behind it, those that are to be behind it: a
        minimum cut, of what would cross."""
        stages = self.found.of
        movable = set(may)
        network = nx.DiGraph()

        def side(node: fx.Node) -> object:
            if node in movable:
                return node
            return _FRONT if stages[node] <= border else _BEHIND

        values = {v for node in may for v in (*self._values(node), node)}
        for value in values:
            if side(value) is _BEHIND:
                continue
            crossing = ("crossing", value)
            network.add_edge(side(value), crossing, capacity=_both_ways(value))
            for user in reads.get(value, ()):
                network.add_edge(crossing, side(user))
                if user in movable:
                    network.add_edge(user, side(value))
        for members in together:
            inside = [node for node in members if node in movable]
            for first, second in pairwise(inside):
                network.add_edge(first, second)
                network.add_edge(second, first)
        if _FRONT not in network:  # nothing has to be in front
            return movable
        if _BEHIND not in network:
            return set()
        _, (_, behind) = nx.minimum_cut(network, _FRONT, _BEHIND)
        return {node for node in behind if node in movable}

    def _is_allowed(self, node: fx.Node, found: Mapping[fx.Node, int]) -> bool:
        """Whether a node has what it reads at a stage."""
        if any(found[value] > found[node] for value in self._values(node)):
            return False
        return all(found[node] in self.holders[key] for key in self._params(node))

    def _is_tensor(self, node: fx.Node) -> bool:
        return isinstance(node.meta.get("val"), torch.Tensor)

    def _readers(self, nodes: Iterable[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
        """By value, the nodes with a stage that read it, through views."""
        found: dict[fx.Node, list[fx.Node]] = {}
        for node in nodes:
            if node in self.found.of:
                for value in self._values(node):
                    found.setdefault(value, []).append(node)
        return found

    def _backward_stages(self) -> None:
        stages = self.found.of
        twins: dict[tuple[str, object], int] = {}
        for node in self.forward:
            if node in stages:
                twins.setdefault(number_of(node), stages[node])
        late: list[fx.Node] = []
        for node in self.backward:
            if self._looks(node):
                continue
            source = node.all_input_nodes[0] if node.all_input_nodes else None
            if node.target is operator.getitem and source in stages:
                stages[node] = stages[source]
                continue
            of_backward = [
                stages[v] for v in self._values(node) if stamp_of(v).phase is not Phase.FORWARD
            ]
            limit = min(of_backward, default=None)
            twin = twins.get(number_of(node))
            if twin is not None:
                stages[node] = twin if limit is None else min(limit, twin)
            elif limit is not None:
                stages[node] = limit
            else:
                late.append(node)
        self._lend(late)

    def _lend(self, late: list[fx.Node]) -> None:
        """Let what backward makes of forward's values alone stand where it is read."""
        if not late:
            return
        waiting = set(late)
        reads: dict[fx.Node, list[fx.Node]] = {}
        for node in self.backward:
            for source in node.all_input_nodes:
                owner = root(source)
                if owner in waiting:
                    reads.setdefault(owner, []).append(node)
        for node in reversed(late):
            users = [self.found.of[u] for u in reads.get(node, ()) if u in self.found.of]
            made = [self.found.of[v] for v in self._values(node)]
            if not users and not made:
                self.everywhere.add(node)
            else:
                self.found.of[node] = max(users or made)

    def _mark_gradients(self) -> None:
        """Let a gradient be taken where its parameter is held: what a later stage computes may be
        the gradient of what an earlier one has only added a parameter to.

        Raises:
            CaptureError: it is computed in front of all stages that hold the parameter.
        """
        for marker in self.markers:
            if stamp_of(marker).role is not Role.RESHARD:
                continue
            (key,) = stamp_of(marker).params
            owner = root(marker.all_input_nodes[0])
            made = self.found.of.get(owner, max(self.holders[key]))  # everywhere: at any of them
            held = [stage for stage in self.holders[key] if stage <= made]
            if not held:
                raise CaptureError(
                    f"the gradient of {self.graph.specs[key].name} is computed by stage {made}, in "
                    f"front of stage {' and '.join(map(str, sorted(self.holders[key])))}, which "
                    "holds it. Give its module an earlier stage (fxzero.shard(stages=…))."
                )
            self.found.marks[marker] = max(held)

    def _travel(self) -> None:
        """Find what each value has to cross."""
        stages = self.found.of
        needed: dict[fx.Node, set[int]] = {}
        for node in self.nodes:
            if node not in stages:
                continue
            for value in self._values(node):
                needed.setdefault(value, set()).add(stages[node])
            for key in self._params(node):
                self._check_held(node, key)
        for marker, stage in self.found.marks.items():
            owner = root(marker.all_input_nodes[0])
            if owner in stages:
                needed.setdefault(owner, set()).add(stage)
        for value, readers in needed.items():
            if max(readers) > stages[value]:
                self.found.up[value] = max(readers)
            if min(readers) < stages[value]:
                self.found.down[value] = min(readers)
        for value in (*self.found.up, *self.found.down):
            self._check_sent(value)

    def _check_held(self, node: fx.Node, key: str) -> None:
        """See that a node's stage holds a parameter that it reads.

        Raises:
            CaptureError: it does not.
        """
        stage = self.found.of[node]
        if stage not in self.holders[key]:
            raise CaptureError(
                f"{node.name} ({node.target}) of stage {stage} reads {self.graph.specs[key].name}, "
                f"which stage {' and '.join(map(str, sorted(self.holders[key])))} holds. Give its "
                "module another stage (fxzero.shard(stages=…))."
            )

    def _check_sent(self, value: fx.Node) -> None:
        """See that a value can be sent.

        Raises:
            CaptureError: it is no tensor, as a size that was read from one.
        """
        if not self._is_tensor(value):
            line = source_line(value)
            raise CaptureError(
                f"{value.name} ({value.target}){f' at {line}' if line else ''} is made by stage "
                f"{self.found.of[value]} and read by another one, and is no tensor but "
                f"{type(value.meta.get('val')).__name__}: stages send tensors. Keep what depends "
                "on values within one stage (fxzero.shard(stages=…))."
            )


def _sums_of_gradients(graph: StepGraph) -> set[fx.Node]:
    """What adds up, or looks at, gradients of a parameter behind their markers."""
    found: set[fx.Node] = set()
    for node in graph.graph.nodes:
        if node.op != "call_function":
            continue
        sources = node.all_input_nodes
        if sources and all(
            s in found or (s.op == "call_function" and stamp_of(s).role is Role.RESHARD)
            for s in sources
        ):
            found.add(node)
    return {node for node in found if stamp_of(node).role is not Role.RESHARD}


def _both_ways(value: fx.Node) -> int:
    """What crosses for a value: itself, and its gradient."""
    tensor = value.meta.get("val")
    if not isinstance(tensor, torch.Tensor):
        return 1 << 60  # nothing but tensors can
    return num_bytes(value) * (2 if tensor.is_floating_point() else 1)


def number_of(node: fx.Node) -> tuple[str, object]:
    """Equal for a node of forward and what has come of it in backward."""
    return stamp_of(node).layer, node.meta.get("seq_nr")


def operator_of(node: fx.Node) -> tuple[object, ...]:
    """Equal for the parts that an operator of the model was taken apart into.

    Autograd's numbers alone are not enough: operators without a gradient have the number of the
    next one that has some.
    """
    original = node.meta.get("original_aten")
    # By its name: copies of graphs have copies of operators, which are equal to nothing.
    return (*number_of(node), None if original is None else str(original))

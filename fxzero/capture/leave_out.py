"""Leave the middles of chains of layers out of a joint graph that was folded.

    y = layer_forward([x, …], 7)[0]; z = head(y)      →   z = head(x)
    gx = layer_backward([g], 7)[0]; …                 →   what read gx reads g

What the layers own stays: inputs that nobody reads for now, and places among what the graph
returns. See `fxzero.graph.left_out` for why, and `fxzero.passes.expand_layers` for the way back.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping

from torch import fx

from fxzero.capture.folded import CallNodes
from fxzero.graph import StepGraph
from fxzero.graph.left_out import LayerPlace, LeftOut
from fxzero.graph.modules import module_path
from fxzero.sharding.params import layer_of


def leave_out_middles(graph: StepGraph, calls: Mapping[int, CallNodes]) -> Collection[int]:
    """Take the middles of chains out of a folded graph, and note them in `graph.left_out`.

    A chain stays whole where somebody else has to do with what its layers own: with a gradient
    that the graph adds to another one, or does not return, or with parameters that are sharded in
    different ways.

    Returns:
        The numbers of the calls that are gone.
    """
    if not any(nodes.call.behind for nodes in calls.values()):
        return ()
    single = {id(n.call.chain.runs[0]): n for n in calls.values() if not n.call.behind}
    places = _Places(graph)
    names = _names(graph, calls)
    gone: list[int] = []
    missing: set[int] = set()
    for number, middle in calls.items():
        if not middle.call.behind:
            continue
        neighbours = [single.get(id(run)) for run in (*middle.call.before, *middle.call.behind)]
        left = places.of(middle, middle)
        kept = [place for n in neighbours if n is not None for place in places.of(n, middle)]
        if not left or len(kept) != len(neighbours):
            continue
        if len({places.kinds(place) for place in (*left, *kept)}) > 1:
            continue
        # By its name `expand_layers` finds what is a layer's.
        if any(names[place.name] > 1 for place in (*left, *kept)):
            continue
        a, b, c, d, e = kept
        without = [i for place in left for i in place.gradients if i is not None]
        parameters = {i: graph.gradients.pop(i) for i in without if i in graph.gradients}
        graph.left_out.append(LeftOut((a, b, c, d, e), tuple(left), parameters))
        _bypass(middle)
        missing.update(without)
        gone.append(number)
    graph.set_output_values(
        None if i in missing else value for i, value in enumerate(graph.output_values)
    )
    for number in gone:
        for call in (calls[number].forward, calls[number].backward):
            if call is not None:
                for node in (*call.users, call):
                    graph.graph.erase_node(node)
    return gone


def _names(graph: StepGraph, calls: Mapping[int, CallNodes]) -> Counter[str]:
    """How often something in the graph is of a layer: a call's run, or nodes that stand outside."""
    found = Counter(
        _name(run.nodes[0]) for nodes in calls.values() for run in nodes.call.chain.runs
    )
    of_calls = {node for n in calls.values() for node in (n.forward, n.backward)}
    for node in graph.graph.nodes:
        if node.op != "call_function" or node in of_calls:
            continue
        if not of_calls.isdisjoint(node.all_input_nodes) and node.target is operator.getitem:
            continue
        found[_name(node)] += 1
    return found


def _name(node: fx.Node) -> str:
    """The layer that a node is of, as stamps will say."""
    return layer_of(module_path(node) or "")


def _bypass(nodes: CallNodes) -> None:
    """Let what a chain passes on go past it, forward and backward."""
    passed = nodes.call.chain.passed
    ((result, _),) = nodes.results
    result.replace_all_uses_with(nodes.inputs[passed])
    gradient = nodes.gradients.get(passed)
    if gradient is not None:
        (tangent,) = nodes.tangents
        gradient.replace_all_uses_with(tangent)


class _Places:
    """What layers have for themselves in a graph."""

    def __init__(self, graph: StepGraph) -> None:
        self._graph = graph
        self._output = graph.output
        self._returned: dict[fx.Node, list[int]] = defaultdict(list)
        for i, value in enumerate(graph.output_values):
            if isinstance(value, fx.Node):
                self._returned[value].append(i)

    def of(self, nodes: CallNodes, middle: CallNodes) -> list[LayerPlace]:
        """By layer of a call; nothing if others have to do with what is a layer's own.

        Args:
            middle: the middle of the chain that the layers are of.
        """
        call = nodes.call
        if any(call.wanted) is not (nodes.backward is not None) or len(nodes.results) != 1:
            return []
        own = middle.call.chain.own
        parts = nodes.gradients
        gradients = call.chain.inputs_of([parts.get(i) for i in range(len(nodes.inputs))])
        found = []
        for run, inputs, of_input in zip(
            call.chain.runs, call.chain.inputs_of(nodes.inputs), gradients, strict=True
        ):
            mine: list[fx.Node] = []
            places: list[int | None] = []
            for i in own:
                node, part = inputs[i], of_input[i]
                place = self._place(part) if part is not None else None
                if node is None or node.op != "placeholder" or len(node.users) != 1:
                    return []
                if (place is not None) is not (i < len(call.layer.wanted) and call.layer.wanted[i]):
                    return []
                mine.append(node)
                places.append(place)
            found.append(
                LayerPlace(
                    name=_name(run.nodes[0]),
                    inputs=tuple(mine),
                    gradients=tuple(places),
                    keys=tuple(self._graph.inputs.get(node, "") for node in mine),
                    modules=tuple(node.meta.get("nn_module_stack") for node in run.nodes),
                )
            )
        return found

    def _place(self, part: fx.Node) -> int | None:
        """Where the graph returns a value, if it does so once and nobody else reads it."""
        places = self._returned.get(part, [])
        return places[0] if len(places) == 1 and list(part.users) == [self._output] else None

    def kinds(self, place: LayerPlace) -> tuple[object, ...]:
        """How a layer's parameters are laid out."""
        return tuple(self._graph.specs[key].kind if key else () for key in place.keys)

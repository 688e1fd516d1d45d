"""Read a joint graph that was folded: what its calls of layers read and return.

    layer_forward([x, mask], 7)     of a chain's parameters AOTAutograd has seen nothing:
    layer_backward([g], 7)          they are inputs that nobody reads, and have no gradients
→   layer_forward([x, mask, w_3, w_4, …], 7)
    layer_backward([g], 7)          …, and the graph returns its parts, their gradients
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from fxzero import _compat
from fxzero.capture.fold_layers import BACKWARD, FORWARD, Call, Folds, Layer
from fxzero.capture.layer_runs import Run
from fxzero.graph.aliases import root

_UNSHARD = torch.ops.fxzero.unshard.default


@dataclass(frozen=True)
class CallNodes:
    """A call in a joint graph."""

    call: Call
    forward: fx.Node
    backward: fx.Node | None
    """None if nothing in it has a gradient."""

    @property
    def inputs(self) -> list[fx.Node]:
        """What the chain reads."""
        inputs, _ = self.forward.args
        assert isinstance(inputs, (list, tuple))
        return [node for node in inputs if isinstance(node, fx.Node)]

    @property
    def results(self) -> list[tuple[fx.Node, int]]:
        """The nodes that pick the results of the last layer, with their numbers."""
        return [(part, _number_of(part)) for part in self.forward.users]

    @property
    def tangents(self) -> list[fx.Node]:
        """The gradients of the results that have one."""
        assert self.backward is not None
        tangents, _ = self.backward.args
        assert isinstance(tangents, (list, tuple))
        return [node for node in tangents if isinstance(node, fx.Node)]

    @property
    def gradients(self) -> dict[int, fx.Node]:
        """The nodes that pick gradients, by the input's number among the chain's."""
        if self.backward is None:
            return {}
        wanted = [i for i, wanted in enumerate(self.call.wanted) if wanted]
        return {wanted[_number_of(part)]: part for part in self.backward.users}


def _number_of(part: fx.Node) -> int:
    number = part.args[1]
    assert isinstance(number, int)
    return number


def calls_in(graph: fx.Graph, folds: Folds) -> dict[int, CallNodes]:
    """The calls of a joint graph, by number."""

    def of(target: object) -> dict[object, fx.Node]:
        nodes = graph.find_nodes(op="call_function", target=target)  # type: ignore[arg-type]
        return {node.args[1]: node for node in nodes}

    forwards, backwards = of(FORWARD), of(BACKWARD)
    return {
        number: CallNodes(call, forwards[number], backwards.get(number))
        for number, call in folds.calls.items()
        if number in forwards
    }


def reveal(graph: fx.Graph, folds: Folds) -> None:
    """Let calls of chains read the inputs that AOTAutograd was not shown, and have their gradients.

    Once for a graph, before anybody looks at its calls.
    """
    chains = [nodes for nodes in calls_in(graph, folds).values() if nodes.call.is_hidden]
    if not chains:
        return
    by_index = {
        _compat.input_index(node): node
        for node in graph.find_nodes(op="placeholder")
        if isinstance(node.meta.get("val"), torch.Tensor)
    }
    output = graph.output_node()
    (values,) = output.args
    assert isinstance(values, (list, tuple))
    returned = list(values)
    places = {
        _compat.gradient_index(description): i
        for i, description in enumerate(output.meta.get("desc") or ())
    }
    for nodes in chains:
        call = nodes.call
        shown = iter(nodes.inputs)
        inputs = [next(shown) if i is None else by_index[i] for i in call.hidden]
        _compat.set_args(nodes.forward, (inputs, nodes.forward.args[1]))
        if nodes.backward is None:
            continue
        wanted = [i for i, has_grad in enumerate(call.wanted) if has_grad]
        numbers = [k for k, i in enumerate(wanted) if call.hidden[i] is None]
        for part in list(nodes.backward.users):
            _compat.set_args(part, (nodes.backward, numbers[_number_of(part)]))
        with graph.inserting_after(nodes.backward):
            for k, i in enumerate(wanted):
                index, gradient = call.hidden[i], call.gradients[i]
                if index is not None and gradient is not None:
                    arguments = (nodes.backward, k)
                    part = _compat.create_node(
                        graph, "call_function", operator.getitem, arguments, {}
                    )
                    part.meta["val"] = gradient.meta["val"]
                    returned[places[index]] = part
    output.args = (tuple(returned),)


def marked_parameters(graph: fx.Graph, folds: Folds) -> Iterator[tuple[fx.Node, str]]:
    """What each marker of a parameter reads, and its key, those inside of folded layers too."""
    by_node = {nodes.forward: nodes for nodes in calls_in(graph, folds).values()}
    for node in graph.nodes:
        if node.target is _UNSHARD:
            yield node.args[0], node.args[1]
        elif node in by_node:
            call = by_node[node].call
            markers = _markers_of(call.layer)
            inputs = call.chain.inputs_of(by_node[node].inputs)
            for run, given in zip(call.chain.runs, inputs, strict=True):
                keys = keys_of(call.layer, run)
                for number, key in markers:
                    source = given[number]
                    assert source is not None, "a marker reads no parameter"
                    yield source, keys[key]


def _markers_of(layer: Layer) -> list[tuple[int, str]]:
    """By marker of a layer's graph, the number of the input that it reads, and its key there."""
    numbers = {node: i for i, node in enumerate(layer.placeholders)}
    markers = layer.graph.find_nodes(op="call_function", target=_UNSHARD)
    return [(numbers[root(marker.args[0])], marker.args[1]) for marker in markers]


def keys_of(layer: Layer, run: Run) -> dict[str, str]:
    """The keys of a run's parameters by those in the layer's graph."""
    return dict(zip(layer.run.keys, run.keys, strict=True))

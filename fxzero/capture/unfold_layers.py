"""Put the layers' own nodes back into a traced graph that was folded.

    y = layer_forward([x, w], 7)[0]          t = t(w); a = mm(x, t); …; y = add(x, m)
    …                                    →   …
    layer_backward([g], 7)                   … the layer's backward

Afterwards nobody can tell the difference from a graph of every layer, but for the names of nodes.
The middle of a long chain of layers is left out, and what it needs is noted for
`fxzero.passes.expand_layers`.
"""

from __future__ import annotations

import itertools
import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn

from fxzero import _compat
from fxzero.capture.fold_layers import BACKWARD, FORWARD, Call, Folds, Layer
from fxzero.capture.layer_runs import Run
from fxzero.graph import StepGraph, constants
from fxzero.graph.aliases import root
from fxzero.graph.left_out import LayerPlace, LeftOut
from fxzero.graph.modules import module_path, stack_text
from fxzero.sharding.params import layer_of

_UNSHARD = torch.ops.fxzero.unshard.default
_MARKERS = (_UNSHARD, torch.ops.fxzero.reshard_grad.default)


def reveal(graph: fx.Graph, folds: Folds) -> None:
    """Let calls of chains read the inputs that AOTAutograd was not shown, and have their gradients.

    Until then those are inputs that nobody reads, and have no gradients.
    """
    calls = {number: call for number, call in folds.calls.items() if len(call.chain.runs) > 1}
    if not calls:
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
        index: i
        for i, description in enumerate(output.meta.get("desc") or ())
        if (index := _compat.gradient_index(description)) is not None
    }
    nodes = [
        n
        for target in (FORWARD, BACKWARD)
        for n in graph.find_nodes(op="call_function", target=target)
    ]
    for node in nodes:
        given, number = node.args
        if number not in calls:
            continue
        call = calls[number]
        if node.target is FORWARD:
            shown = iter(given)
            inputs = [next(shown) if i is None else by_index[i] for i in call.hidden]
            _compat.set_args(node, (inputs, number))
            continue
        wanted = [i for i, wanted in enumerate(call.wanted) if wanted]
        parts = sorted(node.users, key=lambda part: part.args[1])
        shown = iter([k for k, i in enumerate(wanted) if call.hidden[i] is None])
        numbers = list(shown)
        for part in parts:
            _compat.set_args(part, (node, numbers[part.args[1]]))
        with graph.inserting_after(node):
            for k, i in enumerate(wanted):
                index, gradient = call.hidden[i], call.gradients[i]
                if index is not None and gradient is not None:
                    part = _compat.create_node(
                        graph, "call_function", operator.getitem, (node, k), {}
                    )
                    part.meta["val"] = gradient.meta["val"]
                    returned[places[index]] = part
    output.args = (tuple(returned),)


def marked_parameters(graph: fx.Graph, folds: Folds) -> Iterator[tuple[fx.Node, str]]:
    """What each marker of a parameter reads, and its key, those inside of folded layers too."""
    for node in graph.nodes:
        if node.target is _UNSHARD:
            yield node.args[0], node.args[1]
        elif node.target is FORWARD:
            inputs, number = node.args
            call = folds.calls[number]
            for run, given in zip(call.chain.runs, call.chain.inputs_of(inputs), strict=True):
                keys = _keys(call.layer, run)
                for place, key in _markers_of(call.layer):
                    source = given[place]
                    if source is not None:
                        yield source, keys[key]


def _markers_of(layer: Layer) -> list[tuple[int, str]]:
    """By marker of a layer's graph, the number of the input that it reads, and its key there."""
    numbers = {node: i for i, node in enumerate(layer.placeholders)}
    markers = layer.graph.find_nodes(op="call_function", target=_UNSHARD)
    return [(numbers[root(marker.args[0])], marker.args[1]) for marker in markers]


def _keys(layer: Layer, run: Run) -> dict[str, str]:
    return dict(zip(layer.run.keys, run.keys, strict=True))


class _Copy:
    """A layer's nodes in a joint graph, as one of its runs has them."""

    def __init__(self, layer: Layer, run: Run, first_sequence: int, module: nn.Module):
        self._module = module
        self._stacks = layer.stacks
        self._first_sequence = first_sequence
        self._keys = _keys(layer, run)
        self._modules = {
            stack_text(theirs.meta): ours.meta.get("nn_module_stack")
            for theirs, ours in zip(layer.run.nodes, run.nodes, strict=True)
        }
        self._copies: dict[fx.Node, fx.Node] = {}

    def bind(self, placeholders: Iterable[fx.Node], values: Iterable[fx.Node]) -> None:
        """Say what the layer's graph reads."""
        self._copies.update(zip(placeholders, values, strict=True))

    def nodes(self, wanted: Sequence[fx.Node], graph: fx.Graph) -> list[fx.Node]:
        """The copies of some nodes, made at the graph's insertion point with all they need."""
        needed: set[fx.Node] = set()
        queue = [n for n in wanted if n not in self._copies]
        while queue:
            node = queue.pop()
            if node not in needed:
                needed.add(node)
                queue.extend(n for n in node.all_input_nodes if n not in self._copies)
        for node in sorted(needed):
            is_constant = node.op == "get_attr"
            copy = _compat.create_node(
                graph,
                node.op,
                constants.adopt(self._module, node) if is_constant else node.target,
                fx.map_arg(node.args, self._copies.__getitem__),
                fx.map_arg(node.kwargs, self._copies.__getitem__),
                node.name,
            )
            if node.target in _MARKERS:
                own = (self._keys.get(a, a) if isinstance(a, str) else a for a in copy.args)
                _compat.set_args(copy, tuple(own))
            meta = dict(node.meta)
            if (sequence := meta.get("seq_nr")) is not None:
                meta["seq_nr"] = self._first_sequence + sequence
            if (modules := self._modules.get(self._stacks[node])) is not None:
                meta["nn_module_stack"] = modules
            _compat.set_meta(copy, meta)
            self._copies[node] = copy
        return [self._copies[node] for node in wanted]


class _Unfolding:
    """A graph whose calls are replaced one by one, in the graph's order."""

    def __init__(self, graph: StepGraph, folds: Folds) -> None:
        self._graph = graph.graph
        self._module = graph.module
        self._folds = folds
        self._last = max((n.meta.get("seq_nr") or 0 for n in graph.graph.nodes), default=0)
        self._copies: dict[int, list[_Copy]] = {}
        """By call, the copies of its layers."""
        self.returned: dict[fx.Node, fx.Node] = {}
        """Parts of calls that the graph returns, with what it shall return instead: one by one,
        each of a thousand gradients would go through the list of all of them."""

    def forward(self, node: fx.Node) -> None:
        """Replace a call of layers' forwards."""
        inputs, number = node.args
        assert isinstance(inputs, (list, tuple))
        call = self._folds.calls[number]  # type: ignore[index]  # a number
        layer, runs = call.layer, call.chain.runs
        copies = self._copies[number] = []  # type: ignore[index]  # a number
        for run in runs:
            copies.append(_Copy(layer, run, self._last + 1, self._module))
            self._last += 1 + layer.last_sequence
        parts = list(node.users)
        wanted = [layer.outputs[part.args[1]] for part in parts]  # type: ignore[index]  # a number
        values: list[fx.Node] = []
        with self._graph.inserting_before(node):
            for copy, given in zip(copies, call.chain.inputs_of(inputs), strict=True):
                own = [values[0] if value is None else value for value in given]
                copy.bind(layer.placeholders[: len(own)], own)
                # Nobody reads the result of a chain whose last result nobody reads.
                values = copy.nodes(wanted, self._graph)
                if not values:
                    break
        self._replace(node, parts, values)

    def backward(self, node: fx.Node) -> None:
        """Replace a call of layers' backwards."""
        gradients, number = node.args
        assert isinstance(gradients, (list, tuple))
        call = self._folds.calls[number]  # type: ignore[index]  # a number
        layer, chain = call.layer, call.chain
        parts = list(node.users)
        read = {part.args[1] for part in parts}
        numbers = itertools.count()
        # By input of the chain, the number that its gradient has among the call's parts.
        in_call = [next(numbers) if wanted else None for wanted in call.wanted]
        by_input = [i if i in read else None for i in in_call]
        found: dict[int, fx.Node] = {}
        tangents = layer.placeholders[len(chain.runs[0].inputs) :]
        given: Sequence[Any] = gradients
        with self._graph.inserting_before(node):
            by_run = chain.inputs_of(by_input)
            for copy, own, run in zip(
                reversed(self._copies[number]),
                reversed(by_run),
                reversed(chain.runs),
                strict=True,  # type: ignore[index]
            ):
                copy.bind(tangents, given)
                values = [
                    (i, layer.gradient_of_input[i])
                    for i, number in enumerate(own)
                    if number is not None
                ]
                is_first = run is chain.runs[0]
                if not is_first:
                    values.append((-1, layer.gradient_of_input[chain.passed]))
                copies = copy.nodes([value for _, value in values], self._graph)  # type: ignore[misc]
                if not is_first:
                    given = [copies.pop()]
                for (i, _), made in zip(values, copies, strict=False):
                    found[own[i]] = made  # type: ignore[index]
        self._replace(node, parts, [found[part.args[1]] for part in parts])  # type: ignore[index]

    def _replace(self, call: fx.Node, parts: list[fx.Node], values: Sequence[fx.Node]) -> None:
        """Let what reads a call's parts read these values."""
        for part, value in zip(parts, values, strict=True):
            part.replace_all_uses_with(value, delete_user_cb=lambda user: user.op != "output")
            if part.users:
                self.returned[part] = value
            else:
                self._graph.erase_node(part)
        if not call.users:
            self._graph.erase_node(call)

    def end(self) -> None:
        """Let the graph return what stands for the parts of calls that it returned, which go."""
        if not self.returned:
            return

        def end(node: fx.Node) -> fx.Node:
            while node in self.returned:
                node = self.returned[node]
            return node

        output = self._graph.output_node()
        output.args = fx.map_arg(output.args, end)
        calls = dict.fromkeys(part.all_input_nodes[0] for part in self.returned)
        for node in (*self.returned, *calls):
            self._graph.erase_node(node)


def unfold(graph: StepGraph, folds: Folds, *, leave_out: bool) -> None:
    """Put the layers' own nodes back into a traced graph, in place.

    Args:
        leave_out: do without the middle of each chain of layers that allows it, and note it in
            `graph.left_out`.
    """
    if not folds.calls:
        constants.record(graph.module)
        return
    if leave_out:
        graph.left_out = list(_leave_out(graph, folds))
    constants.record(graph.module)
    unfolding = _Unfolding(graph, folds)
    for node in list(graph.graph.nodes):
        if node.target is FORWARD:
            unfolding.forward(node)
        elif node.target is BACKWARD:
            unfolding.backward(node)
    unfolding.end()
    graph.module.recompile()


def _leave_out(graph: StepGraph, folds: Folds) -> Iterator[LeftOut]:
    """Take the middles of chains out of a folded graph, and say what they are."""
    long = [number for number, call in folds.calls.items() if call.behind]
    if not long:
        return
    nodes = _nodes_of_calls(graph)
    single = {id(call.chain.runs[0]): n for n, call in folds.calls.items() if not call.behind}
    places = _OutputPlaces(graph)
    missing: set[int] = set()
    for number in long:
        middle = folds.calls[number]
        neighbours = [single[id(run)] for run in (*middle.before, *middle.behind)]
        found: list[LayerPlace] = []
        for n in (number, *neighbours):
            if n in nodes:
                found += places.of(folds.calls[n], middle, nodes[n])
        if len(found) != len(middle.chain.runs) + len(neighbours):
            continue
        if len({tuple(_kinds(graph, place)) for place in found}) != 1:
            continue
        left, kept = found[: -len(neighbours)], found[-len(neighbours) :]
        gone = [i for place in left for i in place.gradients if i is not None]
        _bypass(graph.graph, nodes[number], middle)
        missing.update(gone)
        yield LeftOut(
            tuple(kept),  # type: ignore[arg-type]  # five of them
            tuple(left),
            {i: graph.gradients.pop(i) for i in gone if i in graph.gradients},
        )
    graph.set_output_values(
        None if i in missing else value for i, value in enumerate(graph.output_values)
    )
    for node in (node for number in long for node in nodes.get(number, ()) if node is not None):
        for part in list(node.users):
            if not part.users:
                graph.graph.erase_node(part)
        if not node.users:
            graph.graph.erase_node(node)


def _kinds(graph: StepGraph, place: LayerPlace) -> Iterator[tuple[object, ...]]:
    """How a layer's parameters are laid out."""
    for key in place.keys:
        yield graph.specs[key].kind if key else ()


_Nodes = tuple[fx.Node, fx.Node | None]
"""A call's forward, and its backward if there is one."""


def _nodes_of_calls(graph: StepGraph) -> dict[int, _Nodes]:
    def of(target: Any) -> dict[int, fx.Node]:
        nodes = graph.graph.find_nodes(op="call_function", target=target)
        return {node.args[1]: node for node in nodes}

    backwards = of(BACKWARD)
    return {number: (node, backwards.get(number)) for number, node in of(FORWARD).items()}


class _OutputPlaces:
    """Where a graph returns what."""

    def __init__(self, graph: StepGraph) -> None:
        self._graph = graph
        self._output = graph.output
        self._positions: dict[fx.Node, list[int]] = defaultdict(list)
        for i, value in enumerate(graph.output_values):
            if isinstance(value, fx.Node):
                self._positions[value].append(i)

    def _of_part(self, part: fx.Node) -> int | None:
        """The place of a value that the graph returns once, and nobody else reads."""
        places = self._positions.get(part, [])
        return places[0] if len(places) == 1 and list(part.users) == [self._output] else None

    def of(self, call: Call, whole: Call, nodes: _Nodes) -> list[LayerPlace]:
        """What each layer of a call has for itself; nothing if others have to do with it.

        Args:
            whole: the middle of the chain that the call is of.
        """
        forward, backward = nodes
        inputs, _ = forward.args
        assert isinstance(inputs, (list, tuple))
        if any(call.wanted) is not (backward is not None) or len(forward.users) != 1:
            return []
        parts = {part.args[1]: part for part in backward.users} if backward is not None else {}
        positions: list[int | None] = []
        numbers = itertools.count()
        for wanted in call.wanted or (False,) * len(inputs):
            part = parts.get(next(numbers)) if wanted else None
            positions.append(self._of_part(part) if part is not None else None)
        own = whole.chain.own
        found = []
        for run, given, ends in zip(
            call.chain.runs,
            call.chain.inputs_of(inputs),
            call.chain.inputs_of(positions),
            strict=True,
        ):
            wanted_of_run = call.layer.wanted or [False] * len(given)
            mine = tuple(given[i] for i in own)
            for i, node in zip(own, mine, strict=True):
                if node is None or node.op != "placeholder" or len(node.users) != 1:
                    return []
                if (ends[i] is not None) is not wanted_of_run[i]:
                    return []
            found.append(
                LayerPlace(
                    name=layer_of(module_path(run.nodes[0]) or ""),
                    inputs=mine,  # type: ignore[arg-type]  # none is None
                    gradients=tuple(ends[i] for i in own),
                    keys=tuple(self._graph.inputs.get(node, "") for node in mine),  # type: ignore[arg-type]
                    modules=tuple(node.meta.get("nn_module_stack") for node in run.nodes),
                )
            )
        return found


def _bypass(graph: fx.Graph, nodes: _Nodes, call: Call) -> None:
    """Let what a chain passes on go past it, forward and backward."""
    forward, backward = nodes
    passed = call.chain.passed
    (part,) = forward.users
    inputs, _ = forward.args
    part.replace_all_uses_with(inputs[passed])  # type: ignore[index,arg-type]  # a list of nodes
    if backward is None or not call.wanted[passed]:
        return
    number = sum(call.wanted[:passed])
    gradients, _ = backward.args
    for part in list(backward.users):
        if part.args[1] == number:
            part.replace_all_uses_with(gradients[0])  # type: ignore[index,arg-type]  # a list

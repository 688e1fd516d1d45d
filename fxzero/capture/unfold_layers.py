"""Put the layers' own nodes back into a joint graph that was folded.

    y = layer_forward([x, w], 7)[0]          t = t(w); a = mm(x, t); …; y = add(x, m)
    …                                    →   …
    layer_backward([g], 7)                   … the layer's backward

Afterwards nobody can tell the difference from a graph in which every layer was traced, but for the
names of nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import fx, nn

from fxzero import _compat
from fxzero.capture.fold_layers import Folds, Layer
from fxzero.capture.folded import CallNodes, calls_in, keys_of
from fxzero.capture.layer_runs import Run
from fxzero.capture.leave_out import leave_out_middles
from fxzero.graph import StepGraph, constants

_MARKERS = (torch.ops.fxzero.unshard.default, torch.ops.fxzero.reshard_grad.default)


class _Copy:
    """A layer's nodes in a joint graph, as one of its runs has them."""

    def __init__(self, layer: Layer, run: Run, first_sequence: int, module: nn.Module):
        self._module = module
        self._stacks = layer.stacks
        self._first_sequence = first_sequence
        self._keys = keys_of(layer, run)
        self._modules = {
            str(theirs.meta.get("nn_module_stack")): ours.meta.get("nn_module_stack")
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

    def __init__(self, graph: StepGraph) -> None:
        self._graph = graph.graph
        self._module = graph.module
        self._last = max((n.meta.get("seq_nr") or 0 for n in graph.graph.nodes), default=0)
        self._copies: dict[fx.Node, list[_Copy]] = {}
        """By call, the copies of its layers."""
        self._returned: dict[fx.Node, fx.Node] = {}
        """Parts of calls that the graph returns, with what it shall return instead: one by one,
        each of a thousand gradients would go through the list of all of them."""

    def forward(self, nodes: CallNodes) -> None:
        """Replace a call of layers' forwards."""
        layer, chain = nodes.call.layer, nodes.call.chain
        copies = self._copies[nodes.forward] = []
        for run in chain.runs:
            copies.append(_Copy(layer, run, self._last + 1, self._module))
            self._last += 1 + layer.last_sequence
        wanted = [layer.outputs[number] for _, number in nodes.results]
        values: list[fx.Node] = []
        with self._graph.inserting_before(nodes.forward):
            for copy, inputs in zip(copies, chain.inputs_of(nodes.inputs), strict=True):
                if not wanted:  # nobody reads what nobody reads the end of
                    break
                given = [values[0] if node is None else node for node in inputs]
                copy.bind(layer.placeholders[: len(given)], given)
                values = copy.nodes(wanted, self._graph)
        parts = [part for part, _ in nodes.results]
        self._replace(nodes.forward, dict(zip(parts, values, strict=True)))

    def backward(self, nodes: CallNodes) -> None:
        """Replace a call of layers' backwards."""
        assert nodes.backward is not None
        layer, chain = nodes.call.layer, nodes.call.chain
        parts = nodes.gradients
        parts_of = chain.inputs_of([parts.get(i) for i in range(len(nodes.call.wanted))])
        passed = layer.gradient_of_input[chain.passed]
        tangents: Sequence[fx.Node] = nodes.tangents
        found: dict[fx.Node, fx.Node] = {}
        with self._graph.inserting_before(nodes.backward):
            for copy, of_input in reversed(
                list(zip(self._copies[nodes.forward], parts_of, strict=True))
            ):
                copy.bind(layer.placeholders[len(of_input) :], tangents)
                read = {
                    part: value
                    for part, value in zip(of_input, layer.gradient_of_input, strict=True)
                    if part is not None and value is not None
                }
                values = list(read.values())
                is_first = copy is self._copies[nodes.forward][0]
                if not is_first and passed is not None:
                    values.append(passed)
                made = copy.nodes(values, self._graph)
                tangents = made[len(read) :]
                found.update(zip(read, made, strict=False))
        self._replace(nodes.backward, {part: found[part] for part in parts.values()})

    def _replace(self, call: fx.Node, values: dict[fx.Node, fx.Node]) -> None:
        """Let what reads a call's parts read these values."""
        for part, value in values.items():
            part.replace_all_uses_with(value, delete_user_cb=lambda user: user.op != "output")
            if part.users:
                self._returned[part] = value
            else:
                self._graph.erase_node(part)
        if not call.users:
            self._graph.erase_node(call)

    def end(self) -> None:
        """Let the graph return what stands for the parts of calls that it returned, which go."""
        if not self._returned:
            return

        def end(node: fx.Node) -> fx.Node:
            while node in self._returned:
                node = self._returned[node]
            return node

        output = self._graph.output_node()
        output.args = fx.map_arg(output.args, end)
        calls = dict.fromkeys(part.all_input_nodes[0] for part in self._returned)
        for node in (*self._returned, *calls):
            self._graph.erase_node(node)


def unfold(graph: StepGraph, folds: Folds, *, leave_out: bool) -> None:
    """Put the layers' own nodes back into a folded graph, in place.

    Args:
        leave_out: do without the middles of chains, where that is possible, and note in
            `graph.left_out` what `fxzero.passes.expand_layers` needs.
    """
    constants.record(graph.module)
    calls = calls_in(graph.graph, folds)
    if leave_out:
        gone = leave_out_middles(graph, calls)
        calls = {number: nodes for number, nodes in calls.items() if number not in gone}
    if not calls:
        return
    forwards = {nodes.forward: nodes for nodes in calls.values()}
    backwards = {nodes.backward: nodes for nodes in calls.values()}
    unfolding = _Unfolding(graph)
    for node in list(graph.graph.nodes):
        if node in forwards:
            unfolding.forward(forwards[node])
        elif node in backwards:
            unfolding.backward(backwards[node])
    unfolding.end()
    graph.module.recompile()

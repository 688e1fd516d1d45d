"""A scheduled graph of five micro-steps as code that runs the fourth as often as the step asks.

    state = before(inputs)
    for index in 3, 4, …:  state, loss = body(state, index, inputs)
    outputs = after(state, losses, inputs)

What goes from one part to the next travels in a list that the next part empties, so that nothing
lives longer than in a graph without a loop.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, fx

from fxzero._compat import copy_node
from fxzero.graph import StepGraph
from fxzero.graph.stamps import Role, stamp_of
from fxzero.graph.steady import STEADY, Loop, is_of_all_losses, is_remade


def rows_of(batch: Tensor, first: int, rows: int) -> Tensor:
    """Some rows of a batch, as a view."""
    return batch.narrow(0, first, rows)


def spread(values: list[Any]) -> list[Any]:
    """The items of a list, lists among them opened."""
    found: list[Any] = []
    for value in values:
        found += value if isinstance(value, list) else [value]
    return found


class _Part:
    """One part in the making: a graph of its own, and what stands in it for the whole one's."""

    def __init__(self, nodes: Iterable[fx.Node]) -> None:
        self.nodes = tuple(nodes)
        self.graph = fx.Graph()
        self.copies: dict[fx.Node, fx.Node] = {}
        self.inputs: list[int] = []
        """Positions of the step's inputs that it reads."""

    def take_inputs(self, whole: fx.Graph, also: Iterable[fx.Node] = ()) -> None:
        """Give the part the step's inputs that it reads."""
        read = {source for node in (*self.nodes, *also) for source in node.all_input_nodes}
        for node in [node for node in read if is_remade(node)]:
            read |= set(node.all_input_nodes)
        for i, node in enumerate(whole.find_nodes(op="placeholder")):
            if node in read:
                self.inputs.append(i)
                self.copies[node] = self.graph.placeholder(node.name)

    def unpack(self, state: fx.Node, values: Iterable[fx.Node]) -> None:
        """Take values out of the list in which they come."""
        for value in reversed(tuple(values)):
            self.copies[value] = self.graph.call_method("pop", (state,))

    def remake(self, node: fx.Node, index: fx.Node | None = None) -> fx.Node:
        """A constant, or a micro-batch's rows: with an index, of the micro-step that runs."""
        if index is None or node.op == "get_attr":
            return copy_node(self.graph, node, self.copies.__getitem__)
        batch, _, first, until = node.args
        assert isinstance(first, int)
        assert isinstance(until, int)
        rows = until - first
        assert stamp_of(node).role is Role.ROWS
        assert stamp_of(node).micro_step == STEADY, "what the body reads is of its own micro-step"
        begin = self.graph.call_function(operator.mul, (index, rows))
        return self.graph.call_function(rows_of, (self.copies[batch], begin, rows))  # type: ignore[index]

    def copy(self, index: fx.Node | None = None) -> None:
        """Put in its nodes."""
        for node in self.nodes:
            for source in node.all_input_nodes:
                if source not in self.copies:
                    self.copies[source] = self.remake(source, index)
            self.copies[node] = copy_node(self.graph, node, self.copies.__getitem__)


def looped(
    graph: StepGraph, loop: Loop, generated: Callable[[StepGraph, fx.Graph], Callable[..., Any]]
) -> Callable[..., Any]:
    """A graph's code with a loop, called like that of the graph itself.

    Args:
        generated: makes code of a part.
    """
    state = [*loop.carried, *loop.kept]
    following = [*loop.carried.values(), *loop.kept]
    before = _Part(loop.before)
    before.take_inputs(graph.graph)
    before.copy()
    before.graph.output([before.copies[value] for value in state])

    body = _Part(loop.body)
    handed, index = body.graph.placeholder("state"), body.graph.placeholder("index")
    body.take_inputs(graph.graph)
    body.unpack(handed, state)
    body.copy(index)
    left = [body.copies[value] for value in following]
    body.graph.output((left, [body.copies[value] for value in loop.collected]))

    after = _Part(loop.after)
    handed, collected = after.graph.placeholder("state"), after.graph.placeholder("collected")
    after.take_inputs(graph.graph, also=[graph.output])
    after.unpack(handed, following)
    after.copies |= dict.fromkeys(loop.collected, collected)
    after.copy()
    for node in loop.after:
        if is_of_all_losses(node) and not set(loop.collected).isdisjoint(node.all_input_nodes):
            copy = after.copies[node]
            with after.graph.inserting_before(copy):
                every = after.graph.call_function(spread, copy.args[:1])
            copy.args = (every, *copy.args[1:])
    copy_node(after.graph, graph.output, after.copies.__getitem__)

    first, repeated, last = (generated(graph, part.graph) for part in (before, body, after))
    runs = range(STEADY, STEADY + graph.steady_runs)

    def forward(attributes: Any, *inputs: Any) -> Any:
        state = first(attributes, *(inputs[i] for i in before.inputs))
        losses: list[Any] = []
        own = [inputs[i] for i in body.inputs]
        for index in runs:
            state, found = repeated(attributes, state, index, *own)
            losses += found
        return last(attributes, state, losses, *(inputs[i] for i in after.inputs))

    return forward

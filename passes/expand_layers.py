"""Make the layers of a chain that the passes before were not shown, by the one that they were.

    h_1 = h_forward(w1, x1);  h_2 = h_forward(w2, h_1[0]);  h_94 = h_forward(w94, h_2[0])
→   h_1 = …;  h_2 = …;  h_3 = h_forward(w3, h_2[0]);  …;  h_94 = h_forward(w94, h_93[0])

Of a chain of equal layers the first three and the last two are in the graph: see
`fxzero.graph.left_out`. The third is the example, if it does the same as the layers before and
behind it: the same calls in the same order, which read the same of the layer itself and of its
neighbours. So what passes decide for it is decided for its class; and what they do at the ends of
the chain is done there alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx
from torch.fx.node import map_aggregate

from fxzero._compat import create_node, set_args, set_meta
from fxzero.errors import PassError
from fxzero.graph import StepGraph
from fxzero.graph.left_out import LeftOut
from fxzero.graph.stamps import set_stamp, stamp_of
from fxzero.passes.base import Context, Fact, Notes, Pass

_EXAMPLE = 2
"""Which of the five layers that were kept the others are made by."""


class UnequalLayersError(PassError):
    """Passes have treated neighbours in a chain of equal layers differently."""


class _Chain:
    """What the kept layers of a chain do in a graph, and how they hang together."""

    def __init__(self, graph: StepGraph, left_out: LeftOut) -> None:
        self.kept = left_out.kept
        number = {place.name: i for i, place in enumerate(left_out.kept)}
        # A transfer is of its parameter's layer, which a compiled wrapper calls something else.
        number |= {key: i for i, place in enumerate(left_out.kept) for key in place.keys if key}
        self.members: tuple[list[fx.Node], ...] = tuple([] for _ in left_out.kept)
        self.place: dict[fx.Node, tuple[int, int]] = {}
        """By node of a kept layer, the layer's number and its own among the layer's."""
        self.input: dict[fx.Node, tuple[int, int]] = {
            node: (layer, i)
            for layer, place in enumerate(left_out.kept)
            for i, node in enumerate(place.inputs)
        }
        for node in graph.nodes():
            stamp = stamp_of(node)
            found = {number.get(word) for word in (stamp.layer, *stamp.params)} - {None}
            layer = found.pop() if len(found) == 1 else None
            if layer is not None:
                self.place[node] = (layer, len(self.members[layer]))
                self.members[layer].append(node)

    def check(self, output: fx.Node) -> None:
        """See that the example does what its neighbours do, and that only they read it.

        Raises:
            UnequalLayersError: it does not.
        """
        beside = range(_EXAMPLE - 1, _EXAMPLE + 2)
        before, example, behind = self.members[_EXAMPLE - 1 : _EXAMPLE + 2]
        if not len(before) == len(example) == len(behind):
            counts = ", ".join(
                f"{place.name} {len(nodes)}"
                for place, nodes in zip(self.kept, self.members, strict=True)
            )
            raise UnequalLayersError(f"equal layers have different numbers of nodes: {counts}")
        for nodes in zip(before, example, behind, strict=True):
            # More may stand in the first and the last layer than in others.
            if self._described(nodes[0], but=-1) != self._described(
                nodes[1], but=-1
            ) or self._described(nodes[1], but=1) != self._described(nodes[2], but=1):
                names = ", ".join(node.name for node in nodes)
                raise UnequalLayersError(f"{names} differ, of equal layers one behind the other")
            for user in nodes[1].users:
                reader, _ = self.place.get(user, (None, 0))
                if user is not output and reader not in beside:
                    raise UnequalLayersError(
                        f"{user.name} reads {nodes[1].name} of {self.kept[_EXAMPLE].name}, and is "
                        "not of a layer beside it"
                    )

    def _described(self, node: fx.Node, but: int) -> tuple[Any, ...]:
        """What a node does, by places in the chain: equal for the same nodes of equal layers.

        Args:
            but: the neighbour of whose nodes the numbers do not count.
        """
        stamp = stamp_of(node)
        layer, _ = self.place[node]

        def of(argument: Any) -> Any:
            if isinstance(argument, fx.Node):
                if argument in self.input:
                    other, number = self.input[argument]
                    return ("input", other - layer, number)
                found = self.relative(argument, layer, but)
                return ("of a layer", *found) if found is not None else argument
            if isinstance(argument, str) and argument in self.kept[layer].keys:
                return ("key", self.kept[layer].keys.index(argument))
            return (type(argument), repr(argument))

        return (
            node.target,
            map_aggregate(node.args, of),
            map_aggregate(node.kwargs, of),
            map_aggregate(stamp.params, of),
            stamp.but(layer="", params=(), again=bool(stamp.again)),
        )

    def relative(self, node: fx.Node, layer: int, but: int) -> tuple[Any, ...] | None:
        """Which node it is of which neighbour of a layer; None if of none.

        Args:
            but: the neighbour of whose nodes the numbers do not count.
        """
        if node not in self.place:
            return None
        other, number = self.place[node]
        return (other - layer, number if other - layer != but else None)

    def stretches(self) -> Iterator[_Stretch]:
        """Where the example's nodes stand, and what stands around them."""
        done: set[int] = set()
        for number, node in enumerate(self.members[_EXAMPLE]):
            if number not in done:
                stretch = self._stretch(node, number)
                done.update(number for _, number in stretch.turn)
                yield stretch

    def _stretch(self, begin: fx.Node, number: int) -> _Stretch:
        """The stretch in which the example's node of a number is the first that was not found yet.

        Raises:
            UnequalLayersError: around it the layers do not take turns.
        """
        before, behind = (self.members[_EXAMPLE + i][number] for i in (-1, 1))
        ascending = before < begin < behind
        end = behind if ascending else before
        period: list[fx.Node] = []
        node = begin
        while node is not end:
            if node.op == "output":
                raise UnequalLayersError(
                    f"{begin.name} stands apart from the layers beside its own"
                )
            period.append(node)
            node = node.next
        other: list[fx.Node] = []
        node = end if ascending else begin.prev
        while len(other) < len(period) and node.op not in ("placeholder", "output"):
            other.append(node)
            node = node.next if ascending else node.prev
        if not ascending:
            other.reverse()
        mine = [self.relative(n, _EXAMPLE, but=1) for n in period]
        if None in mine or mine != [self.relative(n, _EXAMPLE + 1, but=1) for n in other]:
            raise UnequalLayersError(
                f"between {begin.name} and {end.name} layers do not take turns as beside them"
            )
        return _Stretch(
            [self.place[n] for n in period],
            [self.place[n] for n in other],
            ascending,
            anchor=node if ascending else end,
        )


@dataclass(frozen=True)
class _Stretch:
    """Where layers take turns: each period is the one before, one layer further on."""

    turn: list[tuple[int, int]]
    """The nodes in the example's turn: of which layer each is, and its number."""
    last: list[tuple[int, int]]
    """Those in the turn of the layer that follows the example."""
    ascending: bool
    """Whether the next layer's turn comes behind: in forward, not in backward."""
    anchor: fx.Node
    """What comes behind the turns of the example and of the layer that follows it."""


class _Copies:
    """The layers that were left out, node by node. Layers have their numbers in the whole chain."""

    def __init__(self, graph: StepGraph, chain: _Chain, left_out: LeftOut) -> None:
        self._graph = graph
        self._chain = chain
        self._example = left_out.example
        self._layers = left_out.layers
        self._made: list[dict[int, fx.Node]] = [{} for _ in left_out.layers]
        stacks = {str(stack): i for i, stack in enumerate(left_out.example.modules)}
        self._stacks = [
            stacks.get(str(node.meta.get("nn_module_stack"))) for node in chain.members[_EXAMPLE]
        ]
        self._named = {node.name: i for i, node in enumerate(chain.members[_EXAMPLE])}
        # Not h_11 where the layer is h_1.
        self._prefix = re.compile(rf"{left_out.example.name.replace('.', '_')}(?![0-9])")

    def make(self) -> None:
        """Put every layer's nodes where its turn is."""
        for stretch in list(self._chain.stretches()):
            turns = [
                [(layer + later, number) for layer, number in stretch.turn]
                for later in range(len(self._layers) + 1)
            ]
            turns.append([(layer + len(self._layers), number) for layer, number in stretch.last])
            for turn in turns if stretch.ascending else reversed(turns):
                for layer, number in turn:
                    self._put(layer, number, stretch.anchor)

    def _put(self, layer: int, number: int, anchor: fx.Node) -> None:
        """Put a layer's node before another one; make it if it is not there."""
        if _EXAMPLE < layer <= _EXAMPLE + len(self._layers):
            with self._graph.graph.inserting_before(anchor):
                self._copy(number, layer)
        else:
            anchor.prepend(self._node_of(layer, number))

    def _copy(self, number: int, layer: int) -> None:
        node = self._chain.members[_EXAMPLE][number]
        left_out = layer - _EXAMPLE - 1
        place = self._layers[left_out]
        copy = create_node(
            self._graph.graph,
            node.op,
            node.target,
            self._arguments(node.args, layer),
            self._arguments(node.kwargs, layer),
            self._prefix.sub(place.name.replace(".", "_"), node.name),
        )
        meta = dict(node.meta)
        if (stack := self._stacks[number]) is not None:
            meta["nn_module_stack"] = place.modules[stack]
        set_meta(copy, meta)
        stamp = stamp_of(node)
        params = self._arguments(stamp.params, layer)
        is_its_own = stamp.layer == self._example.name
        name = place.name if is_its_own else self._graph.specs[params[0]].layer
        again = self._name_of_copy(stamp.again, left_out) if stamp.again else ""
        set_stamp(copy, stamp.but(layer=name, params=params, again=again))
        self._made[left_out][number] = copy

    def _name_of_copy(self, name: str, left_out: int) -> str:
        """What a node of the example is called in another layer; as it is if it is none."""
        made = self._made[left_out].get(self._named.get(name, -1))
        return made.name if made is not None else name

    def _arguments(self, arguments: Any, layer: int) -> Any:
        """What a layer is called with where the example is called with these."""

        def of(argument: Any) -> Any:
            if isinstance(argument, fx.Node):
                if argument in self._chain.place:
                    other, number = self._chain.place[argument]
                    return self._node_of(layer + other - _EXAMPLE, number)
                if argument in self._chain.input:
                    _, number = self._chain.input[argument]
                    return self._layers[layer - _EXAMPLE - 1].inputs[number]
            elif isinstance(argument, str) and argument in self._example.keys:
                keys = self._layers[layer - _EXAMPLE - 1].keys
                return keys[self._example.keys.index(argument)]
            return argument

        return map_aggregate(arguments, of)

    def _node_of(self, layer: int, number: int) -> fx.Node:
        """A layer's node of a number."""
        count = len(self._layers)
        if layer <= _EXAMPLE:
            return self._chain.members[layer][number]
        if layer > _EXAMPLE + count:
            return self._chain.members[layer - count][number]
        return self._made[layer - _EXAMPLE - 1][number]

    def link(self) -> None:
        """Let the kept layers on either side read the new ones next to them."""
        last = len(self._layers) - 1
        for layer, neighbour, left_out in (
            (_EXAMPLE, _EXAMPLE + 1, 0),
            (_EXAMPLE + 1, _EXAMPLE, last),
        ):
            made = self._made[left_out]

            def of(
                node: fx.Node, neighbour: int = neighbour, made: dict[int, fx.Node] = made
            ) -> fx.Node:
                other, number = self._chain.place.get(node, (None, 0))
                return made[number] if other == neighbour else node

            for node in self._chain.members[layer]:
                if any(of(source) is not source for source in node.all_input_nodes):
                    set_args(node, fx.map_arg(node.args, of))
                    if node.kwargs:
                        node.kwargs = fx.map_arg(node.kwargs, of)

    def gradients(self) -> dict[int, fx.Node]:
        """By output of the graph, the gradients of the layers' inputs."""
        values = self._graph.output_values
        found: dict[int, fx.Node] = {}
        for i, position in enumerate(self._example.gradients):
            if position is None:
                continue
            _, number = self._chain.place[values[position]]
            for place, made in zip(self._layers, self._made, strict=True):
                mine = place.gradients[i]
                assert mine is not None
                found[mine] = made[number]
        return found


def expand(graph: StepGraph, left_out: LeftOut) -> None:
    """Make the layers that were left out of one chain.

    Raises:
        UnequalLayersError: the example cannot stand for them.
    """
    chain = _Chain(graph, left_out)
    chain.check(graph.output)
    copies = _Copies(graph, chain, left_out)
    copies.make()
    found = copies.gradients()
    copies.link()
    graph.set_output_values(found.get(i, v) for i, v in enumerate(graph.output_values))
    graph.gradients = dict(sorted({**graph.gradients, **left_out.parameters}.items()))


@dataclass(frozen=True)
class ExpandLayers(Pass):
    """Make the layers that the passes before were not shown."""

    name: ClassVar[str] = "expand_layers"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.STAMPED})
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.EXPANDED})

    def run(self, graph: StepGraph, ctx: Context) -> Notes:
        """See the module's docstring."""
        left_out, graph.left_out = graph.left_out, []
        for chain in left_out:
            expand(graph, chain)
        layers = sum(len(chain.layers) for chain in left_out)
        return Notes(layers=layers) if layers else Notes()

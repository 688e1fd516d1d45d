"""Pieces: runs of compute as graphs of their own, which the step graph calls.

    t = t(w); a = mm(x, t); b = gelu(a); …      →      h_0 = h_forward(w, x)
    c = mm(b, t2); …  (of layer 1: the same)           b = h_0[0];  …
                                                       h_1 = h_forward(w1, x1);  …

What is left is the outline of the step: calls, transfers, updates, releases. A piece is made,
priced and lowered once, however many layers and micro-steps call it. It gets parameters in full,
and returns only values that own their memory: what looks at another value stands in the outline,
where everybody sees whose memory it is.
"""

from __future__ import annotations

import hashlib
import operator
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

from torch import Tensor, fx, nn

from fxzero._compat import copy_node, create_node, set_args, set_meta
from fxzero.graph.aliases import is_view, root
from fxzero.graph.structure import StructureKey, structure_key


class Piece:
    """A graph that is called.

    Args:
        name: its own among the pieces of a step.
        body: inputs, calls of operators and a tuple of outputs.
        key: equal for pieces that do the same.
        pieces: those of its step, among which it is unique.
    """

    __module__ = "fxzero.graph.pieces"

    def __init__(self, name: str, body: fx.Graph, key: StructureKey, pieces: Pieces) -> None:
        self.__name__ = self.__qualname__ = name
        self.body = body
        self.key = key
        self.pieces = pieces
        self.facts: dict[str, Any] = {}
        """What was found out about it once: its work, its memory."""
        self.splits: dict[tuple[int, ...], fx.Graph] = {}
        """See `split`."""

    @cached_property
    def inputs(self) -> list[fx.Node]:
        """The placeholders of its body."""
        return list(self.body.find_nodes(op="placeholder"))

    @cached_property
    def nodes(self) -> list[fx.Node]:
        """What it calls, in order."""
        return [node for node in self.body.nodes if node.op == "call_function"]

    @cached_property
    def outputs(self) -> list[fx.Node]:
        """What it returns."""
        (values,) = self.body.output_node().args
        assert isinstance(values, (list, tuple))
        return [value for value in values if isinstance(value, fx.Node)]

    @cached_property
    def first_reads(self) -> list[int]:
        """By input, the number among its nodes of the first one that reads it.

        An input that is only returned counts as read behind the last node.
        """
        numbers = {node: i for i, node in enumerate(self.nodes)}
        behind = len(numbers)
        return [min((numbers.get(u, behind) for u in i.users), default=behind) for i in self.inputs]

    @cached_property
    def digest(self) -> str:
        """A hash of what it does, equal in all processes."""
        words = [str(part) for part in self.key.nodes] + [str(self.key.outputs)]
        return hashlib.blake2b("\n".join(words).encode(), digest_size=8).hexdigest()

    @cached_property
    def _module(self) -> fx.GraphModule:
        return fx.GraphModule(nn.Module(), self.body)

    def module(self, name: str) -> fx.GraphModule:
        """A copy of its body to be changed."""
        copy = fx.Graph()
        copy.output(copy.graph_copy(self.body, {}))
        return fx.GraphModule(nn.Module(), copy, class_name=name)

    def __call__(self, *inputs: Any) -> Any:
        return self._module(*inputs)

    def __deepcopy__(self, memo: object) -> Piece:
        return self  # nobody changes it

    def __repr__(self) -> str:
        return f"Piece({self.__name__})"


@dataclass
class Pieces:
    """The pieces of a step, each of its own structure."""

    shape_env: Any = None
    """The shape environment of their values."""
    known: dict[StructureKey, Piece] = field(default_factory=dict)
    _names: Counter[str] = field(default_factory=Counter)

    def of(self, run: Sequence[fx.Node], outputs: Sequence[fx.Node], name: str) -> Piece:
        """The piece that does what a run does.

        Its inputs are the run's `inputs_of`, in that order. Pieces that the run calls become part
        of it.

        Args:
            outputs: what of the run others read.
            name: what a new piece is called, a number aside.
        """
        inputs = inputs_of(run)
        key = structure_key(inputs, run, outputs, self.shape_env)
        found = self.known.get(key)
        if found is not None:
            return found
        body = _copied(inputs, run, outputs)
        if any(map(is_call, run)):
            placeholders = list(body.find_nodes(op="placeholder"))
            nodes = [node for node in body.nodes if node.op == "call_function"]
            (ends,) = body.output_node().args
            whole = structure_key(placeholders, nodes, ends, self.shape_env)  # type: ignore[arg-type]  # nodes
        else:
            whole = key
        if whole not in self.known:
            self._names[name] += 1
            number = self._names[name]
            own = name if number == 1 else f"{name}_{number}"
            self.known[whole] = Piece(own, body, whole, self)
        piece = self.known[key] = self.known[whole]
        return piece


def is_call(node: fx.Node) -> bool:
    """Whether a node calls a piece."""
    return isinstance(node.target, Piece)


def piece_of(call: fx.Node) -> Piece:
    """The piece that a node calls."""
    assert isinstance(call.target, Piece)
    return call.target


def inputs_of(run: Sequence[fx.Node]) -> list[fx.Node]:
    """The nodes outside of a run that it reads, in order of first use."""
    inside = set(run)
    return list(dict.fromkeys(i for n in run for i in n.all_input_nodes if i not in inside))


def read_outside(run: Sequence[fx.Node]) -> list[fx.Node]:
    """What others read of a run, in order."""
    inside = set(run)
    return [n for n in run if any(user not in inside for user in n.users)]


def whole_call(run: Sequence[fx.Node]) -> fx.Node | None:
    """The call that a run is: with all of its parts and nothing else, of different inputs."""
    call = run[0]
    if not is_call(call) or len(run) != 1 + len(piece_of(call).outputs):
        return None
    if len(set(call.args)) != len(call.args):
        return None
    indices = {n.args[1] for n in run[1:] if n.target is operator.getitem and n.args[0] is call}
    if len(indices) != len(run) - 1 or not all(node.users for node in run[1:]):
        return None
    return call


def _copied(
    inputs: Sequence[fx.Node], run: Sequence[fx.Node], outputs: Sequence[fx.Node]
) -> fx.Graph:
    """A run as a graph of its own, in which no pieces are called and nothing is unused."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for i, node in enumerate(inputs):
        copies[node] = graph.placeholder(f"input_{i}")
        copies[node].meta["val"] = node.meta["val"]
    returned: dict[fx.Node, list[fx.Node]] = {}
    for node in run:
        if is_call(node):
            returned[node] = _inlined(graph, node, copies)
        elif node.target is operator.getitem and node.args[0] in returned:
            call, index = node.args
            copies[node] = returned[call][index]  # type: ignore[index]  # a node, a number
        else:
            copies[node] = copy_node(graph, node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in outputs))
    for node in reversed(graph.nodes):
        if node.op == "call_function" and not node.users:
            graph.erase_node(node)
    return graph


def _inlined(graph: fx.Graph, call: fx.Node, copies: dict[fx.Node, fx.Node]) -> list[fx.Node]:
    """Copy what a call calls to the end of a graph; what it returns there."""
    piece = piece_of(call)
    given = (copies[n] for n in call.args if isinstance(n, fx.Node))
    inside = dict(zip(piece.inputs, given, strict=True))
    for node in piece.nodes:
        inside[node] = copy_node(graph, node, inside.__getitem__)
    return [inside[node] for node in piece.outputs]


def put_into_piece(
    graph: fx.Graph, run: Sequence[fx.Node], pieces: Pieces, name: str, call_name: str
) -> fx.Node | None:
    """Replace a run by a call of its piece; None if nobody reads what it computes.

    What is read of it keeps its name, its place and what is known of it: it becomes a part of the
    call, or stays where it only looks at such a part, or at an input.
    """
    parts, views = _parts_of(run)
    if not parts:
        return None
    inputs = inputs_of(run)
    piece = pieces.of(run, list(parts.values()), name)
    with graph.inserting_before(run[0]):
        call = create_node(graph, "call_function", piece, tuple(inputs), {}, call_name)
    first = run[0].meta
    set_meta(call, {key: value for key, value in first.items() if key in _OF_ORIGIN})
    call.meta["val"] = tuple(node.meta["val"] for node in parts)
    for i, node in enumerate(parts):
        node.target = operator.getitem
        set_args(node, (call, i))
        if node.kwargs:
            node.kwargs = {}
    for node in reversed(run):
        if node not in parts and node not in views:
            graph.erase_node(node)
    return call


_OF_ORIGIN = ("fxzero", "stack_trace", "nn_module_stack")


def _parts_of(run: Sequence[fx.Node]) -> tuple[dict[fx.Node, fx.Node], set[fx.Node]]:
    """What of a run others read.

    Returns:
        By node that becomes a part of the call, in order, the value of the run that it is: itself,
        or what it shows as it is (a gradient that was transposed twice). And the nodes that only
        look at those, or at inputs, for others.
    """
    inside = set(run)
    shown: dict[fx.Node, list[fx.Node]] = {}
    views: set[fx.Node] = set()
    for node in read_outside(run):
        owner = root(node) if is_view(node) else node
        if owner in inside and (owner is node or _is_the_same(node, owner)):
            shown.setdefault(owner, []).append(node)
            continue
        current = node
        while current in inside and is_view(current) and current not in views:
            views.add(current)
            current = current.all_input_nodes[0]
        if current in inside and current not in views:
            shown.setdefault(current, []).insert(0, current)
    parts: dict[fx.Node, fx.Node] = {}
    for owner, nodes in shown.items():
        part = owner if owner in nodes else nodes[0]
        parts[part] = owner
        for other in nodes:
            if other is not part and other not in views:
                other.replace_all_uses_with(part, delete_user_cb=lambda u: u not in inside)
    return {node: parts[node] for node in run if node in parts}, views


def _is_the_same(view: fx.Node, owner: fx.Node) -> bool:
    """Whether a view shows a tensor as it is."""
    value, other = view.meta.get("val"), owner.meta.get("val")
    if not isinstance(value, Tensor) or not isinstance(other, Tensor):
        return False
    mine = (value.shape, value.stride(), value.storage_offset(), value.dtype)
    return mine == (other.shape, other.stride(), other.storage_offset(), other.dtype)


def split(piece: Piece, positions: tuple[int, ...]) -> fx.Graph:
    """A piece's body as an outline of its own: calls of what lies before, between and behind.

    Args:
        positions: where parts begin, by number among the piece's `nodes`; the first is not named.
    """
    if positions not in piece.splits:
        graph = fx.Graph()
        graph.output(graph.graph_copy(piece.body, {}))
        nodes = [node for node in graph.nodes if node.op == "call_function"]
        for begin, end in pairwise((0, *positions, len(nodes))):
            run = nodes[begin:end]
            if not all(map(is_view, run)):
                put_into_piece(graph, run, piece.pieces, piece.__name__, "call")
        piece.splits[positions] = graph
    return piece.splits[positions]


def replace_call(graph: fx.Graph, call: fx.Node, body: fx.Graph) -> list[fx.Node]:
    """Put the nodes of a graph in the place of a call; those that came.

    What was read of the call keeps its name.

    Args:
        body: does what the called piece does.
    """
    copies = dict(zip(body.find_nodes(op="placeholder"), call.args, strict=True))
    (ends,) = body.output_node().args
    parts: dict[fx.Node, fx.Node] = {}
    for part in list(call.users):
        end = ends[part.args[1]]  # type: ignore[index]  # a tuple, a number
        assert isinstance(end, fx.Node)
        if end in parts:
            part.replace_all_uses_with(parts[end])
            graph.erase_node(part)
        else:
            parts[end] = part
    came: list[fx.Node] = []
    for node in body.nodes:
        if node.op != "call_function":
            continue
        own = parts.get(node)
        if own is None:
            with graph.inserting_before(call):
                own = copy_node(graph, node, copies.__getitem__)
            own.meta["fxzero"] = call.meta["fxzero"]
        else:
            call.prepend(own)
            own.target = node.target
            set_args(own, fx.map_arg(node.args, copies.__getitem__))
            own.kwargs = fx.map_arg(node.kwargs, copies.__getitem__)
        copies[node] = own
        came.append(own)
    graph.erase_node(call)
    return came


def spelled_out(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """Nodes with what is called in place of the calls and their parts."""
    found: list[fx.Node] = []
    for node in nodes:
        source = node.args[0] if node.target is operator.getitem else None
        if is_call(node):
            found += piece_of(node).nodes
        elif not (isinstance(source, fx.Node) and is_call(source)):
            found.append(node)
    return found


def first_read(call: fx.Node, values: Collection[fx.Node]) -> int:
    """The number of the first of a called piece's nodes that reads one of some values."""
    reads = zip(piece_of(call).first_reads, call.args, strict=True)
    return min(number for number, given in reads if given in values)


def called(nodes: Iterable[fx.Node]) -> list[Piece]:
    """The pieces that nodes call, each once, in order."""
    return list({id(n.target): n.target for n in nodes if isinstance(n.target, Piece)}.values())

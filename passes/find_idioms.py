"""Find idioms in a step graph: the code that `fxzero.kernels.patterns` lists, forward and backward.

An idiom's forward is traced once and looked for whatever the sizes. Where it is found it is traced
anew with the sizes, dtypes and numbers of that place, forward and backward, and must match to the
letter. What something else reads the insides of is left alone.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from fxzero import _compat
from fxzero.graph import Phase, StepGraph
from fxzero.graph.match import (
    Allowed,
    Mapping,
    Pattern,
    accumulated_terms,
    captured,
    matches,
)
from fxzero.graph.stamps import stamp_of
from fxzero.passes.stamp import ancestors

if TYPE_CHECKING:
    from fxzero.kernels.patterns import Idiom

_aten = torch.ops.aten
Tracer = Callable[..., fx.GraphModule | None]
_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass
class FoundIdiom:
    """An idiom in a graph, forward and backward."""

    idiom: Idiom
    inputs: list[fx.Node]
    tangent: fx.Node | None
    nodes: list[fx.Node]
    """All that the kernels replace, in graph order."""
    output: fx.Node
    gradients: list[list[fx.Node]]
    """For each input, the terms of its gradient; none where it has none."""
    numbers: dict[str, float]
    differentiated: tuple[bool, ...]


class Finder:
    """Looks for idioms in one graph."""

    def __init__(self, graph: StepGraph, decompositions: dict[Any, Callable[..., Any]]) -> None:
        self.graph = graph
        self.decompositions = decompositions
        self.has_backward = any(True for _ in graph.nodes(phase=Phase.BACKWARD))
        self.left: list[tuple[str, list[fx.Node]]] = []
        self.exact: dict[object, _Exact] = {}
        """Of tensors of sizes that vary."""
        self.calls: dict[object, fx.Graph | None] = {}
        self.index()

    def index(self) -> None:
        """Look at the forward's nodes by their operator."""
        self.by_target: dict[object, list[fx.Node]] = defaultdict(list)
        self.dtypes = set()
        for node in self.graph.nodes(phase=Phase.FORWARD):
            self.by_target[node.target].append(node)
            value = node.meta.get("val")
            if isinstance(value, Tensor) and value.dtype in _FLOATS:
                self.dtypes.add(value.dtype)

    def find(self, idiom: Idiom) -> Iterable[FoundIdiom]:
        """All places of an idiom; those that have been replaced meanwhile are passed over."""
        for dtype in sorted(self.dtypes, key=str):
            pattern = _loose(idiom, dtype, self.decompositions)
            if pattern is None:
                continue
            begin = min(pattern.calls(), key=lambda n: len(self.by_target.get(n.target, ())))
            candidates = self.by_target.get(begin.target, [])
            for mapping in matches(pattern, begin, candidates, exact=False, allowed=_in_forward):
                if any(node._erased for node in mapping.values()):
                    continue
                numbers = captured(pattern, mapping)
                if numbers is not None:
                    found = self.confirm(idiom, pattern, mapping, numbers)
                    if found is not None:
                        yield found

    def confirm(
        self, idiom: Idiom, loose: Pattern, mapping: Mapping, numbers: dict[str, float]
    ) -> FoundIdiom | None:
        """Match forward and backward exactly, around a forward that looks right."""
        inputs = [mapping[p] for p in loose.graph.find_nodes(op="placeholder") if p in mapping]
        (written,) = loose.outputs()
        if written is None or len(inputs) != len(idiom.shapes):
            return None
        # Layers that were folded have been exported, which takes more apart.
        tracers = (_compat.trace_function, _compat.trace_joint)
        for differentiated, tracer in itertools.product(
            _combinations(inputs, self.has_backward), tracers
        ):
            pattern, counts = self.trace(idiom, inputs, numbers, differentiated, tracer)
            if pattern is None:
                continue
            output = pattern.outputs()[0]
            assert output is not None
            allowed = _in_its_phase(pattern, len(inputs))
            for exact in matches(pattern, output, [mapping[written]], exact=True, allowed=allowed):
                found = _extractable(idiom, pattern, counts, exact, numbers, differentiated)
                if found is None:
                    self.leave(idiom, loose, mapping, "read by others")
                return found
        self.leave(idiom, loose, mapping, "another backward")
        return None

    def call(self, found: FoundIdiom) -> fx.Graph | None:
        """The kernel's call on what an idiom was found with."""
        values = [node.meta["val"] for node in found.inputs]
        key = (found.idiom, _key(values), tuple(found.numbers.items()), found.differentiated)
        if key not in self.calls:
            self.calls[key] = trace(
                partial(found.idiom.call, **found.numbers), values, found.differentiated,
                self.decompositions, self.graph.fake_mode,
            )  # fmt: skip
        return self.calls[key]

    def leave(self, idiom: Idiom, loose: Pattern, mapping: Mapping, why: str) -> None:
        """Note what looked right and is left alone."""
        self.left.append((f"{idiom.kernel}: {why}", [mapping[n] for n in loose.calls()]))

    def skipped(self) -> dict[str, int]:
        """What was left alone, and why; not what another idiom took."""
        kept = {nodes[-1]: why for why, nodes in self.left if not any(n._erased for n in nodes)}
        return dict(Counter(kept.values()))

    def trace(
        self,
        idiom: Idiom,
        inputs: list[fx.Node],
        numbers: dict[str, float],
        differentiated: tuple[bool, ...],
        tracer: Tracer,
    ) -> tuple[Pattern | None, list[int]]:
        """An idiom on these inputs, its gradients' sums taken apart into their terms."""
        values = [node.meta["val"] for node in inputs]
        setting = len(self.decompositions), _surroundings()
        key = idiom, _key(values), repr(numbers), differentiated, tracer, setting
        fake_mode, known = self.graph.fake_mode, self.exact
        if not any(map(_compat.has_symbolic_shape, values)):  # whose names are of this graph alone
            fake_mode, known = _compat.fake_tensors(), _exact_patterns
        if key not in known:
            graph = trace(
                partial(idiom.write, **numbers), values, differentiated,
                self.decompositions, fake_mode, tracer,
            )  # fmt: skip
            if len(known) == _MOST_KNOWN:
                del known[next(iter(known))]
            known[key] = _by_terms(graph) if graph is not None else None
        return known[key] or (None, [])


def _in_forward(_: fx.Node, node: fx.Node) -> bool:
    return stamp_of(node).phase is Phase.FORWARD


def _in_its_phase(pattern: Pattern, num_inputs: int) -> Allowed:
    """Forward is what the output needs, backward what needs its gradient; others may be either."""
    placeholders = pattern.graph.find_nodes(op="placeholder")
    (output, *_) = pattern.outputs()
    forward = ancestors([output] if output is not None else [])
    backward = depends_on(placeholders[num_inputs:])

    def allowed(wanted: fx.Node, node: fx.Node) -> bool:
        phase = stamp_of(node).phase
        if wanted in forward:
            return phase is Phase.FORWARD
        return wanted not in backward or phase is Phase.BACKWARD

    return allowed


def _combinations(inputs: list[fx.Node], has_backward: bool) -> list[tuple[bool, ...]]:
    """Which inputs may have been differentiated, those that need most first."""
    floats = [node.meta["val"].dtype.is_floating_point for node in inputs]
    choices = itertools.product(
        *((True, False) if f and has_backward else (False,) for f in floats)
    )
    return sorted(choices, key=sum, reverse=True)


def _surroundings() -> object:
    """What else decides what a trace of some code is."""
    devices = ("cpu", "cuda")
    casts = [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices]
    return tuple(casts), torch.are_deterministic_algorithms_enabled()


def _key(values: list[Tensor]) -> object:
    return tuple((str(v.shape), str(v.stride()), v.dtype, v.device) for v in values)


def trace(
    function: Callable[..., Any],
    values: list[Tensor],
    differentiated: tuple[bool, ...],
    decompositions: dict[Any, Callable[..., Any]],
    fake_mode: Any,
    tracer: Tracer = _compat.trace_function,
) -> fx.Graph | None:
    """The joint graph of a function of tensors like these; the forward's if none is differentiated.

    Returns:
        A graph of the inputs and the output's gradient that returns the output and the inputs'
        gradients, None where there is none. None if it cannot be traced.
    """
    with fake_mode:
        inputs = [
            torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device) for v in values
        ]
    for tensor, wanted in zip(inputs, differentiated, strict=True):
        tensor.requires_grad_(wanted)
    joint = any(differentiated)

    def tuple_of(*args: Tensor) -> tuple[Tensor]:
        return (function(*args),)

    try:
        with torch.enable_grad():
            traced = tracer(tuple_of, inputs, decompositions, joint, fake_mode)
    except (ValueError, IndexError, TypeError):  # the kernel refuses, or the idiom cannot be this
        return None
    if traced is None or any(traced.graph.find_nodes(op="get_attr")):
        return None  # a constant's name means nothing in another graph, so nothing would compare it
    graph: fx.Graph = traced.graph
    for node in graph.nodes:
        if node.target is _aten._assert_tensor_metadata.default:  # what casts leave when traced
            node.graph.erase_node(node)
    return graph


_Exact = tuple[Pattern, list[int]] | None
_MOST_KNOWN = 1024
_exact_patterns: dict[object, _Exact] = {}
"""Idioms on tensors of fixed sizes, those that were traced last: equal in every graph."""
_loose_patterns: dict[object, Pattern | None] = {}


def _loose(
    idiom: Idiom, dtype: torch.dtype, decompositions: dict[Any, Callable[..., Any]]
) -> Pattern | None:
    """The forward of an idiom, for any sizes."""
    key = (idiom, dtype, bool(decompositions))
    if key not in _loose_patterns:
        fake_mode = _compat.fake_tensors()
        with fake_mode:
            values = [
                torch.empty([-n for n in shape], dtype=torch.int64)
                if shape[0] < 0
                else torch.empty(shape, dtype=dtype)
                for shape in idiom.shapes
            ]
        numbers = dict(idiom.numbers)
        nothing = tuple(False for _ in values)
        graph = trace(partial(idiom.write, **numbers), values, nothing, decompositions, fake_mode)
        names = {number: name for name, number in idiom.numbers}
        _loose_patterns[key] = Pattern(graph, names) if graph is not None else None
    return _loose_patterns[key]


def _by_terms(graph: fx.Graph) -> tuple[Pattern, list[int]]:
    """A joint graph that returns its output and every term of every gradient.

    Returns:
        The pattern, and the number of terms of each input's gradient.
    """
    pattern = Pattern(graph)
    output, *gradients = pattern.outputs()
    terms = [accumulated_terms(g) if g is not None else [] for g in gradients]
    end = next(iter(reversed(graph.nodes)))
    end.args = ((output, *itertools.chain.from_iterable(terms)),)
    graph.eliminate_dead_code()
    return pattern, [len(t) for t in terms]


def _extractable(
    idiom: Idiom,
    pattern: Pattern,
    counts: list[int],
    mapping: Mapping,
    numbers: dict[str, float],
    differentiated: tuple[bool, ...],
) -> FoundIdiom | None:
    """A match that can be taken out of its graph, or None."""
    placeholders = pattern.graph.find_nodes(op="placeholder")
    if any(p not in mapping for p in placeholders):
        return None
    inputs = [mapping[p] for p in placeholders[: len(idiom.shapes)]]
    tangents = [mapping[p] for p in placeholders[len(idiom.shapes) :]]
    nodes = sorted({mapping[n] for n in pattern.calls()})
    inside = set(nodes)
    results = [mapping[n] for n in pattern.outputs() if n is not None]
    output, *flat = results
    if len(set(results)) != len(results) or inside & {*inputs, *tangents}:
        return None
    if any(u not in inside for n in inside - set(results) for u in n.users):
        return None
    rest = iter(flat)
    gradients = [list(itertools.islice(rest, count)) for count in counts]
    if not all(_sum_up(terms, inside) for terms in gradients):
        return None
    tangent = tangents[0] if tangents else None
    return FoundIdiom(idiom, inputs, tangent, nodes, output, gradients, numbers, differentiated)


def _sum_up(terms: list[fx.Node], inside: set[fx.Node]) -> bool:
    """Whether terms end in one sum, and nothing sees a part of it."""
    if len(terms) < 2:
        return True
    chains = [_additions(term, inside) for term in terms]
    return any(all(node in chain for chain in chains) for node in chains[0])


def _additions(term: fx.Node, inside: set[fx.Node]) -> list[fx.Node]:
    """The additions that a term goes through, as long as nobody else reads it on its way."""
    chain: list[fx.Node] = []
    node = term
    while len(users := [u for u in node.users if u not in inside]) == 1:
        (node,) = users
        if len(accumulated_terms(node)) < 2:
            break
        chain.append(node)
    return chain


def depends_on(sources: Iterable[fx.Node]) -> set[fx.Node]:
    """Everything that is computed from some nodes."""
    found: set[fx.Node] = set()
    queue = list(sources)
    while queue:
        for user in queue.pop().users:
            if user not in found:
                found.add(user)
                queue.append(user)
    return found

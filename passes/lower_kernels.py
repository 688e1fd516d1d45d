"""Put our kernels where a model writes out what they do, and where they win.

    t = pow(x, 2); m = mean(t, [-1], True); r = rsqrt(m + 1e-6); y = x * r * w     forward
    … eleven nodes …                                                               backward
→   y, _, _, rstd = fxzero.norm(x, None, w, None, 1e-6, False)
    dx, dw, _ = fxzero.norm_backward(dy, None, x, w, …, rstd, …)

Idioms are found by tracing them as the graph was traced (`fxzero.kernels.patterns`,
`fxzero.graph.match`): first the forward with any sizes, then, traced anew with the sizes, dtypes
and numbers that were found there, forward and backward to the letter. A match is left alone if
something else reads its insides, or if shapes, dtypes or strides would change.

A kernel wins by a table measured on the device. Without one, and on CPU, torch's operators stay;
but `linear_cross_entropy`, which is there to save memory, is used on CPU wherever the logits are
large. Backward kernels stand where the first of the gradients was computed.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, fx

from fxzero import _compat
from fxzero.cost.analytic import value_bytes
from fxzero.cost.kernel_table import KernelTable, read_table, table_for
from fxzero.errors import ConfigError, nearest
from fxzero.graph import Phase, StepGraph
from fxzero.graph.match import (
    Allowed,
    Mapping,
    Pattern,
    accumulated_terms,
    captured,
    matches,
)
from fxzero.graph.stamps import set_stamp, stamp_of
from fxzero.passes.base import Context, Fact, Notes, Pass
from fxzero.passes.stamp import ancestors

if TYPE_CHECKING:
    from fxzero.kernels.patterns import Idiom

_aten = torch.ops.aten
_PRODUCTS = (_aten.mm.default, _aten.addmm.default)
_FOR_MEMORY = "linear_cross_entropy"
Tracer = Callable[..., fx.Graph | None]
_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass
class _Found:
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


class _Finder:
    """Looks for idioms in one graph."""

    def __init__(self, graph: StepGraph, decompositions: dict[Any, Callable[..., Any]]) -> None:
        self.graph = graph
        self.decompositions = decompositions
        self.has_backward = any(True for _ in graph.nodes(phase=Phase.BACKWARD))
        self.left: list[tuple[str, list[fx.Node]]] = []
        self.exact: dict[object, tuple[Pattern, list[int]] | None] = {}
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

    def find(self, idiom: Idiom) -> Iterable[_Found]:
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
    ) -> _Found | None:
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
                found = _found(idiom, pattern, counts, exact, numbers, differentiated)
                if found is None:
                    self.leave(idiom, loose, mapping, "read by others")
                return found
        self.leave(idiom, loose, mapping, "another backward")
        return None

    def call(self, found: _Found) -> fx.Graph | None:
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
        key = (idiom, _key(values), tuple(numbers.items()), differentiated, tracer)
        if key not in self.exact:
            graph = trace(
                partial(idiom.write, **numbers), values, differentiated,
                self.decompositions, self.graph.fake_mode, tracer,
            )  # fmt: skip
            self.exact[key] = _by_terms(graph) if graph is not None else None
        return self.exact[key] or (None, [])


def _in_forward(_: fx.Node, node: fx.Node) -> bool:
    return stamp_of(node).phase is Phase.FORWARD


def _in_its_phase(pattern: Pattern, num_inputs: int) -> Allowed:
    """Forward is what the output needs, backward what needs its gradient; others may be either."""
    placeholders = pattern.graph.find_nodes(op="placeholder")
    (output, *_) = pattern.outputs()
    forward = ancestors([output] if output is not None else [])
    backward = _depends_on(placeholders[num_inputs:])

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
            graph = tracer(tuple_of, inputs, decompositions, joint, fake_mode)
    except (ValueError, IndexError, TypeError):  # the kernel refuses, or the idiom cannot be this
        return None
    for node in graph.nodes if graph is not None else ():
        if node.target is _aten._assert_tensor_metadata.default:  # what casts leave when traced
            node.graph.erase_node(node)
    return graph


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


def _found(
    idiom: Idiom,
    pattern: Pattern,
    counts: list[int],
    mapping: Mapping,
    numbers: dict[str, float],
    differentiated: tuple[bool, ...],
) -> _Found | None:
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
    return _Found(idiom, inputs, tangent, nodes, output, gradients, numbers, differentiated)


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


def _replace(graph: StepGraph, found: _Found, made: fx.Graph | None) -> str:
    """Put the kernel's call in; return why not, or nothing."""
    if made is None:
        return "not for its shapes or dtypes"
    new = Pattern(made)
    output, *gradients = new.outputs()
    pairs = [(found.output, output)]
    for terms, gradient in zip(found.gradients, gradients, strict=False):
        if bool(terms) != (gradient is not None):
            return "other gradients"
        pairs += [(terms[0], gradient)] if terms else []
    moved: dict[fx.Node, Tensor] = {}
    for old, result in pairs:
        assert result is not None
        was, value = old.meta["val"], result.meta["val"]
        if (was.dtype, was.shape) != (value.dtype, value.shape):
            return "another dtype or shape"
        if was.stride() != value.stride() and not _restride(graph, old, value, moved):
            return "another layout"
    placeholders = made.find_nodes(op="placeholder")
    inputs = [*found.inputs, *([found.tangent] if found.tangent is not None else [])]
    copies = dict(zip(placeholders, inputs, strict=True))
    backward = [terms[0] for terms in found.gradients if terms]
    flat_terms = [t for terms in found.gradients for t in terms]
    late = _depends_on(placeholders[len(found.inputs) :])
    for node in new.calls():
        origin = min(backward, default=found.output) if node in late else found.output
        before = min(flat_terms) if node in late else found.output
        with graph.graph.inserting_before(before):
            copies[node] = graph.graph.node_copy(node, copies.__getitem__)
        meta = {k: v for k, v in origin.meta.items() if k not in ("val", "fxzero_work")}
        copies[node].meta = {**meta, "val": node.meta.get("val")}
        stamp = stamp_of(origin)
        set_stamp(copies[node], replace(stamp, made_by="lower_kernels"))
    inside = set(found.nodes)
    for old, result in pairs:
        assert result is not None
        old.replace_all_uses_with(copies[result])
    for terms in found.gradients:
        for term in terms[1:]:
            _leave_out(graph, term, inside)
    for node, value in moved.items():
        _accept(node, value)
    for node in reversed(found.nodes):
        if not node._erased and not node.users:
            graph.graph.erase_node(node)
    return ""


def _restride(graph: StepGraph, old: fx.Node, value: Tensor, moved: dict[fx.Node, Tensor]) -> bool:
    """Find out what follows from a value in another layout; False if it would leave the graph.

    Args:
        moved: gets the values of the nodes after it that will be laid out differently.
    """
    changed = {old: value}
    queue = sorted(old.users)
    while queue:
        node = queue.pop(0)
        if node.op == "output":
            return False
        if not isinstance(node.target, torch._ops.OpOverload):
            return False
        values = {n: changed.get(n, moved.get(n, n.meta["val"])) for n in node.all_input_nodes}
        args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        target = node.target
        try:
            new = graph.value_of(target, args, kwargs)
        except (RuntimeError, ValueError):
            if target not in (_aten.view.default, _aten._unsafe_view.default):
                return False
            new = graph.value_of(_aten.reshape.default, args, kwargs)
        was = node.meta["val"]
        if not isinstance(new, Tensor) or new.shape != was.shape:
            return False
        if new.stride() != was.stride() or target is not node.target:
            queue = sorted({*queue, *node.users})
        changed[node] = new
    moved.update((node, v) for node, v in changed.items() if node is not old)
    return True


def _accept(node: fx.Node, value: Tensor) -> None:
    """Let a node have a value in another layout; a view that is none any more becomes a copy."""
    if node._erased:
        return
    if node.target in (_aten.view.default, _aten._unsafe_view.default):
        node.target = _aten.reshape.default
    node.meta["val"] = value


def _depends_on(sources: Iterable[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    queue = list(sources)
    while queue:
        for user in queue.pop().users:
            if user not in found:
                found.add(user)
                queue.append(user)
    return found


def _leave_out(graph: StepGraph, term: fx.Node, inside: set[fx.Node]) -> None:
    """Take a term out of the sum that it goes into."""
    (addition,) = (user for user in term.users if user not in inside)
    a, b = addition.args
    rest = b if a is term else a
    assert isinstance(rest, fx.Node)
    addition.replace_all_uses_with(rest)
    graph.graph.erase_node(addition)


@dataclass(frozen=True)
class LowerKernels(Pass):
    """Call our kernels where the model writes out what they do, and where they win."""

    name: ClassVar[str] = "lower_kernels"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.STAMPED})

    enabled: bool = True
    """Look for kernels at all."""
    force: str = ""
    """Kernels to use wherever they fit, whatever was measured, by comma: ``rms_norm,swiglu``;
    ``all`` for every one."""
    table: str = ""
    """A table of measurements to decide by, instead of the one that comes with fxzero for the
    device: see ``examples/benchmarks/kernels.py --table``."""
    min_logits_bytes: int = 128 << 20
    """Logits that take this much are never held as a whole: on CPU, `linear_cross_entropy` takes
    the place of a linear layer and its loss. It works on 64 MiB of them at a time."""

    def run(self, graph: StepGraph, ctx: Context) -> Notes:
        """See the module's docstring."""
        if not self.enabled:
            return Notes()
        forced = self._forced()
        gpu = _gpu_name(graph)
        on_cpu = gpu is None
        table = read_table(self.table) if self.table else table_for(gpu) if gpu else None
        wanted = forced | ({row.kernel for row in table.rows} if table is not None else set())
        if on_cpu and _has_large_product(graph, self.min_logits_bytes):
            wanted.add(_FOR_MEMORY)
        if _has_symbolic_sizes(graph):
            return Notes(skipped="symbolic sizes: whether a kernel fits them is not known")
        if not wanted or graph.fake_mode is None:
            return Notes(**({"no_table_for": gpu} if gpu and table is None else {}))
        from fxzero.kernels.patterns import IDIOMS

        finder = _Finder(graph, ctx.decompositions)
        replaced: Counter[str] = Counter()
        for idiom in IDIOMS:
            if idiom.kernel not in wanted:
                continue
            changed = False
            for found in finder.find(idiom):
                why_not = self._loses(found, idiom.kernel in forced, table, on_cpu)
                why_not = why_not or _replace(graph, found, finder.call(found))
                if why_not:
                    finder.left.append((f"{idiom.kernel}: {why_not}", found.nodes))
                else:
                    replaced[idiom.kernel] += 1
                    changed = True
            if changed:
                finder.index()
        skipped = finder.skipped()
        return Notes(**replaced, **({"skipped": skipped} if skipped else {}))

    def _forced(self) -> set[str]:
        """The kernels of `force`.

        Raises:
            ConfigError: one does not exist.
        """
        names = {name.strip() for name in self.force.split(",") if name.strip()}
        if not names:
            return set()
        from fxzero.kernels.patterns import KERNELS

        if names == {"all"}:
            return set(KERNELS)
        for name in names - set(KERNELS):
            raise ConfigError(f"lower_kernels.force={name!r}: {nearest(name, [*KERNELS, 'all'])}")
        return names

    def _loses(self, found: _Found, forced: bool, table: KernelTable | None, on_cpu: bool) -> str:
        """Why torch's operators are the better choice; empty if they are not."""
        if forced:
            return ""
        if table is None or (on_cpu and found.idiom.kernel == _FOR_MEMORY):
            products = (n for n in found.nodes if n.target in _PRODUCTS)
            logits = max((value_bytes(n) for n in products), default=0)
            return "few logits" if logits < self.min_logits_bytes else ""
        results = [t[0] for t in found.gradients if t]
        moved = sum(map(value_bytes, (*found.inputs, found.output, *results)))
        dtype = found.inputs[0].meta["val"].dtype
        speedup = table.speedup(found.idiom.kernel, dtype, moved)
        return "no faster" if speedup is None or speedup < 1.0 else ""


def _gpu_name(graph: StepGraph) -> str | None:
    """The GPU that the forward runs on, by torch's name; None on CPU."""
    for node in graph.nodes(phase=Phase.FORWARD):
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            return torch.cuda.get_device_name(value.device) if value.is_cuda else None
    return None


def _has_symbolic_sizes(graph: StepGraph) -> bool:
    """Whether the batch's sizes are left open: matching to the letter would fix them."""
    inputs = graph.graph.find_nodes(op="placeholder")
    return any(isinstance(node.meta.get("val"), torch.SymInt) for node in inputs)


def _has_large_product(graph: StepGraph, num_bytes: int) -> bool:
    """Whether there is anything like large logits: a cheap look before patterns are traced."""
    return any(
        node.target in _PRODUCTS and value_bytes(node) >= num_bytes
        for node in graph.nodes(phase=Phase.FORWARD)
    )

"""Put our kernels where a model writes out what they do, and where they win.

    t = pow(x, 2); m = mean(t, [-1], True); r = rsqrt(m + 1e-6); y = x * r * w     forward
    … eleven nodes …                                                               backward
→   y, _, _, rstd = fxzero.norm(x, None, w, None, 1e-6, False)
    dx, dw, _ = fxzero.norm_backward(dy, None, x, w, …, rstd, …)

Idioms are found by `fxzero.passes.find_idioms`, to the letter. A match is left alone if the kernel
refuses its shapes, or if a result of another layout would leave the graph.

A kernel wins by a table measured on the device. Without one, and on CPU, torch's operators stay;
but `linear_cross_entropy`, which is there to save memory, is used on CPU wherever the logits are
large. Backward kernels stand where the first of the gradients was computed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from fxzero._compat import OpOverload, copy_node
from fxzero.cost.analytic import value_bytes
from fxzero.cost.kernel_table import WORTHWHILE, KernelTable, read_table, table_for
from fxzero.errors import ConfigError, nearest
from fxzero.graph import Phase, StepGraph
from fxzero.graph.match import Pattern
from fxzero.graph.stamps import set_stamp, stamp_of
from fxzero.passes.base import Context, Fact, Notes
from fxzero.passes.decision import DecidingPass, Decision
from fxzero.passes.find_idioms import Finder, FoundIdiom, depends_on
from fxzero.settings import at_least

_aten = torch.ops.aten
_PRODUCTS = (_aten.mm.default, _aten.addmm.default)
_FOR_MEMORY = "linear_cross_entropy"
UPDATE = "adamw"
"""The kernel of a bucket's update, which the pass `update` calls."""


def _replace(graph: StepGraph, found: FoundIdiom, made: fx.Graph | None) -> str:
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
    late = depends_on(placeholders[len(found.inputs) :])
    for node in new.calls():
        origin = min(backward, default=found.output) if node in late else found.output
        before = min(flat_terms) if node in late else found.output
        with graph.graph.inserting_before(before):
            copies[node] = copy_node(graph.graph, node, copies.__getitem__)
        meta = {k: v for k, v in origin.meta.items() if k not in ("val", "fxzero_work")}
        copies[node].meta = {**meta, "val": node.meta.get("val")}
        stamp = stamp_of(origin)
        set_stamp(copies[node], stamp.but(made_by="lower_kernels"))
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
        if not isinstance(node.target, OpOverload):
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
        if new.stride() != was.stride():
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


def _leave_out(graph: StepGraph, term: fx.Node, inside: set[fx.Node]) -> None:
    """Take a term out of the sum that it goes into."""
    (addition,) = (user for user in term.users if user not in inside)
    a, b = addition.args
    rest = b if a is term else a
    assert isinstance(rest, fx.Node)
    addition.replace_all_uses_with(rest)
    graph.graph.erase_node(addition)


@dataclass(frozen=True)
class KernelSite:
    """Where a kernel could stand."""

    kernel: str
    output: str
    """The node whose value it would compute."""
    loses: str = ""
    """Why torch's operators stay; empty where the kernel wins."""
    speedup: float | None = None
    """By the table."""


@dataclass(frozen=True)
class Kernels(Decision):
    """Where kernels stand for what a model writes out."""

    places: tuple[KernelSite, ...] = ()
    wanted: tuple[str, ...] = ()
    """The kernels that were looked for."""
    skipped: str = ""
    """Why nothing was looked for."""
    no_table_for: str = ""
    """The GPU that nobody has measured kernels on."""


@dataclass(frozen=True)
class LowerKernels(DecidingPass[Kernels]):
    """Call our kernels where the model writes out what they do, and where they win."""

    name: ClassVar[str] = "lower_kernels"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.STAMPED})
    decides: ClassVar[type[Any]] = Kernels

    enabled: bool = True
    """Look for kernels at all."""
    force: str = ""
    """Kernels to use wherever they fit, whatever was measured, by comma: ``rms_norm,swiglu``;
    ``all`` for every one. ``adamw`` is the update of whole steps with Adam or AdamW."""
    table: str = ""
    """A table of measurements to decide by, instead of the one that comes with fxzero for the
    device: see ``examples/benchmarks/kernels.py --table``."""
    min_logits_bytes: int = 128 << 20
    """Logits that take this much are never held as a whole: on CPU, `linear_cross_entropy` takes
    the place of a linear layer and its loss. It works on 64 MiB of them at a time."""

    def __post_init__(self) -> None:
        """Kernels that exist, a table that can be read, and nothing asked for that is off."""
        super().__post_init__()
        at_least("lower_kernels.min_logits_bytes", self.min_logits_bytes, 0)
        for field in ("force", "table"):
            value = getattr(self, field)
            if value and not self.enabled:
                raise ConfigError(
                    f"lower_kernels.{field}={value!r} beside lower_kernels.enabled=false: with "
                    f"the pass off no kernel is used. Drop one of them."
                )
        assert self.forced is not None
        if self.table:
            read_table(self.table)

    def decide(self, graph: StepGraph, ctx: Context) -> Kernels:
        """Find what a kernel could stand for, and say of each whether it wins."""
        if not self.enabled:
            return Kernels()
        forced = self.forced - {UPDATE}
        gpu = gpu_name(graph)
        on_cpu = gpu is None
        table = self.table_for(gpu)
        measured = {row.kernel for row in table.rows} if table is not None else set()
        wanted = forced | (measured - {UPDATE})
        if on_cpu and _has_large_product(graph, self.min_logits_bytes):
            wanted.add(_FOR_MEMORY)
        if _has_symbolic_sizes(graph):
            return Kernels(skipped="symbolic sizes: whether a kernel fits them is not known")
        if not wanted or graph.fake_mode is None:
            return Kernels(no_table_for=gpu or "" if table is None else "")
        from fxzero.kernels.patterns import IDIOMS

        finder = Finder(graph, ctx.decompositions)
        places = []
        for idiom in IDIOMS:
            for found in finder.find(idiom) if idiom.kernel in wanted else ():
                loses, speedup = self._loses(found, idiom.kernel in forced, table, on_cpu)
                places.append(KernelSite(idiom.kernel, found.output.name, loses, speedup))
        return Kernels(tuple(places), tuple(sorted(wanted)))

    def apply(self, graph: StepGraph, decision: Kernels, ctx: Context) -> Notes:
        """Put in the kernels that win, where their results fit what reads them."""
        if not decision.wanted:
            notes = {"skipped": decision.skipped, "no_table_for": decision.no_table_for}
            return Notes(**{name: value for name, value in notes.items() if value})
        from fxzero.kernels.patterns import IDIOMS

        places = {(place.kernel, place.output): place for place in decision.places}
        finder = Finder(graph, ctx.decompositions)
        replaced: Counter[str] = Counter()
        for idiom in IDIOMS:
            if idiom.kernel not in decision.wanted:
                continue
            changed = False
            for found in finder.find(idiom):
                place = places.get((idiom.kernel, found.output.name))
                why_not = place.loses if place is not None else "not in the decision"
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

    def table_for(self, gpu: str | None) -> KernelTable | None:
        """What was measured on a GPU; None if nobody has, or without one and without a file."""
        if self.table:
            return read_table(self.table)
        return table_for(gpu) if gpu else None

    @property
    def forced(self) -> set[str]:
        """The kernels of `force`.

        Raises:
            ConfigError: one does not exist.
        """
        names = {name.strip() for name in self.force.split(",") if name.strip()}
        if self.force and not names:
            raise ConfigError(f"lower_kernels.force={self.force!r} names no kernel")
        if not names:
            return set()
        from fxzero.kernels.patterns import KERNELS

        every = [*KERNELS, UPDATE]
        if names == {"all"}:
            return set(every)
        for name in sorted(names - set(every)):
            known = every if "all" in names else [*every, "all"]
            alone = "'all' stands alone; " if name == "all" else ""
            raise ConfigError(f"lower_kernels.force={name!r}: {alone}{nearest(name, known)}")
        return names

    def _loses(
        self, found: FoundIdiom, forced: bool, table: KernelTable | None, on_cpu: bool
    ) -> tuple[str, float | None]:
        """Why torch's operators are the better choice, empty if they are not; and the speed-up."""
        if forced:
            return "", None
        if table is None or (on_cpu and found.idiom.kernel == _FOR_MEMORY):
            products = (n for n in found.nodes if n.target in _PRODUCTS)
            logits = max((value_bytes(n) for n in products), default=0)
            return "few logits" if logits < self.min_logits_bytes else "", None
        results = [t[0] for t in found.gradients if t]
        moved = sum(map(value_bytes, (*found.inputs, found.output, *results)))
        dtype = found.inputs[0].meta["val"].dtype
        speedup = table.speedup(found.idiom.kernel, dtype, moved)
        return "no faster" if speedup is None or speedup < WORTHWHILE else "", speedup


def gpu_name(graph: StepGraph) -> str | None:
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

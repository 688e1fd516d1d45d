"""Repeat in backward what costs less to compute than to keep.

    forward: y = gelu(x); z = mm(y, w)      forward: y = gelu(x); z = mm(y, w)
    backward: dw = mm(g, y)             →   backward: y' = gelu(x); dw = mm(g, y')

What `torch.utils.checkpoint` asked for is repeated, and what a few cheap operators (views, casts,
element-wise) compute from values that backward reads anyway. Under a memory budget more is, up to
a level of `fxzero.schedule.repetition`; `policy`, `save` and `repeat` choose by hand. Random
operators are never repeated: their results are saved. Nor is what reads an input that the forward
changes, nor a collective.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Any, ClassVar

from torch import fx

from fxzero._compat import OpOverload, checkpoint_tag, copy_node
from fxzero.errors import ConfigError
from fxzero.graph import Phase, Role, StepGraph
from fxzero.graph.aliases import is_view
from fxzero.graph.modules import module_path
from fxzero.graph.operators import is_cheap, num_bytes
from fxzero.graph.stamps import set_stamp, stamp_of
from fxzero.passes.base import Context, Fact, Notes
from fxzero.passes.decision import DecidingPass, Decision
from fxzero.passes.stamp import sink_backward
from fxzero.schedule.forward_values import (
    ForwardValues,
    asked_to_repeat,
    forward_values,
    reads_what_changes,
    repeat_us,
)
from fxzero.schedule.repetition import closure, crossers, levels
from fxzero.settings import at_least


class Policy(StrEnum):
    """What is repeated."""

    AUTO = "auto"
    """What is cheap; under a `memory_budget` as much more as it takes."""
    CHEAP = "cheap"
    """What a few cheap operators compute from what backward reads anyway."""
    FULL = "full"
    """Every block between its input and its output, as with `torch.utils.checkpoint` on each."""


def is_saved(node: fx.Node) -> bool:
    """Whether a forward node is read by backward."""
    return (
        node.op == "call_function"
        and stamp_of(node).phase is Phase.FORWARD
        and any(stamp_of(user).phase is Phase.BACKWARD for user in node.users)
    )


def cheap_expression(
    node: fx.Node, max_nodes: int, saved: Collection[fx.Node], mutated: Collection[fx.Node] = ()
) -> list[fx.Node] | None:
    """The cheap nodes that compute `node` from what backward has, in graph order.

    Backward has the graph's inputs but for those `mutated` meanwhile, what is `saved` already,
    and the parameters. None if there is no such expression of at most `max_nodes` nodes.
    """
    found: set[fx.Node] = set()
    queue = [node]
    while queue:
        current = queue.pop()
        if current in found:
            continue
        if not is_cheap(current) or checkpoint_tag(current) == "save":
            return None
        found.add(current)
        if len(found) > max_nodes:
            return None
        for source in current.all_input_nodes:
            if source in mutated:
                return None
            has_it = source.op == "placeholder" or source in saved
            if stamp_of(source).role is Role.UNSHARD:
                has_it = source in saved or num_bytes(source) <= num_bytes(node)
            if not has_it:
                queue.append(source)
    return sorted(found)


def repeat_in_backward(
    graph: StepGraph, nodes: list[fx.Node], made: dict[fx.Node, fx.Node], before: fx.Node
) -> fx.Node:
    """Copy forward nodes into backward and let backward read the copies.

    Args:
        before: backward's first node. Copies go in front of it.

    Returns:
        What backward's first node is now.
    """
    new = [node for node in nodes if node not in made]
    for node in new:
        with graph.graph.inserting_before(before):
            copy = copy_node(graph.graph, node, lambda n: made.get(n, n))
        stamp = stamp_of(node)
        set_stamp(copy, stamp.but(phase=Phase.BACKWARD, made_by="recompute", again=node.name))
        made[node] = copy
    for node in nodes:
        for user in list(node.users):
            if stamp_of(user).phase is Phase.BACKWARD and user is not made[node]:
                user.replace_input_with(node, made[node])
    return made[new[0]] if new else before


@dataclass(frozen=True)
class Repeated:
    """One value that backward computes again."""

    value: str
    """The forward node."""
    nodes: tuple[str, ...]
    """What is repeated for it, in order, itself included."""
    saved_bytes: int
    """What need not be kept; 0 of a view."""
    asked: bool
    """Whether `torch.utils.checkpoint` asked for it."""
    layer: str
    us: float
    """What repeating takes, by the cost model, operator by operator."""


@dataclass(frozen=True)
class Repetitions(Decision):
    """What backward repeats, later values first."""

    values: tuple[Repeated, ...]


@dataclass(frozen=True)
class Recompute(DecidingPass[Repetitions]):
    """Trade saved activations for cheap repeated compute."""

    name: ClassVar[str] = "recompute"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.STAMPED})
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.RECOMPUTED})
    decides: ClassVar[type[Any]] = Repetitions

    max_nodes: int = 16
    """Most cheap operators to repeat for one saved activation; 0 repeats only what
    `torch.utils.checkpoint` asked for."""
    policy: Policy = Policy.AUTO
    """``auto``: what is cheap, and under a `memory_budget` as much more as it takes. ``cheap``:
    no more than that. ``full``: every block between its input and its output, as with
    `torch.utils.checkpoint` on each."""
    save: tuple[str, ...] = ()
    """Never repeated: modules, as patterns of their names (``h.*.attn``, what is in them too), and
    operators (``aten.mm``, ``mm``)."""
    repeat: tuple[str, ...] = ()
    """Repeated whatever it costs, as far as it may be: modules and operators alike. `save` goes
    first."""

    def __post_init__(self) -> None:
        """A number of operators is none, or some."""
        super().__post_init__()
        at_least("recompute.max_nodes", self.max_nodes, 0)

    def decide(self, graph: StepGraph, ctx: Context) -> Repetitions:
        """What is cheap, and what the policy, the lists and the level of a budget add."""
        cheap = self._cheap(graph, ctx)
        by_level = ctx.level is not None and self.policy is Policy.AUTO
        if not (self.save or self.repeat or by_level or self.policy is Policy.FULL):
            return cheap
        found = forward_values(
            graph,
            ctx.costs,
            fuses=ctx.fuses,
            stays=lambda node: _is_named(node, self.save),
        )
        self._check_names(found.nodes)
        names = {name for value in cheap.values for name in value.nodes}
        base = {i for i, node in enumerate(found.nodes) if node.name in names}
        chosen = set(base)
        values = found.values
        if self.policy is Policy.FULL:
            chosen |= _blocks(found)
        elif by_level:
            assert ctx.level is not None
            if ctx.level.levels is None:
                ctx.level.levels = levels(values, base)
            if ctx.level.number:
                chosen |= ctx.level.levels.at(ctx.level.number)
            elif not (self.save or self.repeat):
                return cheap
        chosen |= {i for i, node in enumerate(found.nodes) if _is_named(node, self.repeat)}
        return _repetitions(found, chosen)

    def _cheap(self, graph: StepGraph, ctx: Context) -> Repetitions:
        """Go through what is saved, from the end, as if each choice were applied at once."""
        outputs = set(graph.output_values[: graph.num_forward_outputs])
        forward = list(graph.nodes(phase=Phase.FORWARD, role=Role.COMPUTE))
        saved = {node for node in graph.nodes(phase=Phase.FORWARD) if is_saved(node)}
        repeated: set[fx.Node] = set()
        found: list[Repeated] = []
        for node in reversed(forward):
            if node not in saved or node in outputs:
                continue
            reads_mutated = reads_what_changes(graph, node)
            asked = asked_to_repeat(node) and not reads_mutated
            if asked or (is_view(node) and not reads_mutated):
                chosen: list[fx.Node] | None = [node]  # of a view its base is saved, or not
            elif self.max_nodes:
                chosen = cheap_expression(node, self.max_nodes, saved, graph.mutated)
            else:
                chosen = None
            if not chosen:
                continue
            saved.difference_update(chosen)
            for source in (s for n in chosen for s in n.all_input_nodes):
                if source not in repeated and source not in chosen and _is_of_forward(source):
                    saved.add(source)
            repeated.update(chosen)
            names = tuple(n.name for n in chosen)
            found.append(
                Repeated(
                    node.name,
                    names,
                    0 if is_view(node) else num_bytes(node),
                    asked,
                    stamp_of(node).layer,
                    round(sum(repeat_us(n, ctx.costs, ctx.fuses) for n in chosen), 1),
                )
            )
        return Repetitions(tuple(found))

    def _check_names(self, nodes: Collection[fx.Node]) -> None:
        """See that every name of the lists is one of the graph's.

        Raises:
            ConfigError: one is not.
        """
        for what in ("save", "repeat"):
            for name in getattr(self, what):
                if not any(_is_named(node, (name,)) for node in nodes):
                    raise ConfigError(
                        f"recompute.{what}: nothing in the forward is called {name!r}. Name "
                        "modules as model.named_modules() does, with * for any part (h.*.mlp), or "
                        "operators as the graph's text does (aten.mm, mm)."
                    )

    def apply(self, graph: StepGraph, decision: Repetitions, ctx: Context) -> Notes:
        """Copy what is repeated into backward.

        Raises:
            ConfigError: the decision names what is no forward node.
        """
        nodes = {n.name: n for n in graph.nodes(phase=Phase.FORWARD, role=Role.COMPUTE)}
        made: dict[fx.Node, fx.Node] = {}
        first = next(graph.nodes(phase=Phase.BACKWARD), graph.output)
        for value in decision.values:
            for name in value.nodes:
                if name not in nodes:
                    raise ConfigError(f"the plan repeats {name!r}, which is no forward node")
            if value.value not in value.nodes:
                raise ConfigError(
                    f"the plan repeats {', '.join(value.nodes) or 'nothing'} for {value.value!r}, "
                    "which is not among them: a value is the last of its nodes"
                )
            first = repeat_in_backward(
                graph, [nodes[name] for name in value.nodes], made, before=first
            )
        if made:
            sink_backward(graph)
        return Notes(
            repeated=len(made),
            for_checkpoint=sum(value.asked for value in decision.values),
            unsaved_bytes=sum(value.saved_bytes for value in decision.values),
        )


def _is_of_forward(node: fx.Node) -> bool:
    """Whether a node is a call of forward: what is saved if backward reads it."""
    return node.op == "call_function" and stamp_of(node).phase is Phase.FORWARD


def _is_named(node: fx.Node, names: Collection[str]) -> bool:
    """Whether a node is called by a name, or was traced in a module that is."""
    if not names:
        return False
    path = module_path(node)
    words = []
    if path:
        parts = path.split(".")
        words += [".".join(parts[: i + 1]) for i in range(len(parts))]
    if isinstance(node.target, OpOverload):
        packet = node.target.overloadpacket
        words += [str(node.target), str(packet), packet.__name__]
    return any(fnmatchcase(word, name) for name in names for word in words)


def _blocks(found: ForwardValues) -> set[int]:
    """What stands inside of a block, and does not leave it."""
    layers = [stamp_of(node).layer for node in found.nodes]
    fences = [i for i in range(1, len(layers)) if layers[i] != layers[i - 1]]
    crossing = crossers(found.values, fences)
    return {
        i
        for i, layer in enumerate(layers)
        if i not in crossing and any(part.isdigit() for part in layer.split("."))
    }


def _repetitions(found: ForwardValues, chosen: Collection[int]) -> Repetitions:
    """What backward repeats if it may repeat these, one node at a time, later ones first."""
    result = closure(found.values, chosen)
    return Repetitions(
        tuple(
            Repeated(
                found.nodes[i].name,
                (found.nodes[i].name,),
                found.values[i].num_bytes if found.values[i].is_needed else 0,
                asked_to_repeat(found.nodes[i]),
                stamp_of(found.nodes[i]).layer,
                round(found.values[i].us, 1),
            )
            for i in reversed(result.repeated)
            if stamp_of(found.nodes[i]).role is Role.COMPUTE
        )
    )

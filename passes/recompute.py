"""Repeat in backward what costs less to compute than to keep.

    forward: y = gelu(x); z = mm(y, w)      forward: y = gelu(x); z = mm(y, w)
    backward: dw = mm(g, y)             →   backward: y' = gelu(x); dw = mm(g, y')

What `torch.utils.checkpoint` asked for is repeated, and what a few cheap operators (views, casts,
element-wise) compute from values that backward reads anyway. Under a memory budget more is, up to
a level of `fxzero.schedule.repetition_levels`; `policy`, `save`, `repeat` and `partition` choose by
hand. What several ranks have may be kept in parts (ZeRO-R's P_a, Rajbhandari et al. 2020, section
6.1), and is gathered again:

    forward: y = mm(x, w)                   forward: y = mm(x, w); part = own_part(y, 8, "0")
    backward: dw = mm(t(y), g)          →   backward: y' = all_gather(part); dw = mm(t(y'), g)

Results of random operators are saved, or drawn again from the state that their generator had
(`fxzero.runtime.random`). What reads an input that the forward changes is not repeated, nor is a
collective.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Any, ClassVar

from torch import fx

from fxzero._compat import OpOverload, checkpoint_tag
from fxzero.errors import ConfigError
from fxzero.graph import Phase, Role, StepGraph
from fxzero.graph.aliases import is_view
from fxzero.graph.modules import module_path
from fxzero.graph.operators import is_cheap, is_random, num_bytes
from fxzero.graph.same_on_ranks import same_on_ranks
from fxzero.graph.stamps import stamp_of
from fxzero.passes.base import Context, Fact, Notes
from fxzero.passes.decision import DecidingPass
from fxzero.passes.repeat_values import (
    Partitioned,
    Repeated,
    Repetitions,
    cut_parts,
    keep_states,
    release_unread,
    repeat_before_put_off,
    repeat_in_backward,
    repeat_where_read,
)
from fxzero.passes.stamp import sink_backward
from fxzero.schedule.forward_values import (
    ForwardValues,
    asked_to_repeat,
    forward_values,
    reads_what_changes,
    repeat_us,
)
from fxzero.schedule.repetition import Value, closure
from fxzero.schedule.repetition_levels import crossers, levels
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

    Backward has the graph's inputs but for those `mutated` meanwhile, what is `saved` already and
    will not be repeated itself for `torch.utils.checkpoint`, and the parameters. None if there is
    no such expression of at most `max_nodes` nodes.
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
            is_kept = source in saved and not asked_to_repeat(source)
            has_it = source.op == "placeholder" or is_kept
            if stamp_of(source).role is Role.UNSHARD:
                has_it = source in saved or num_bytes(source) <= num_bytes(node)
            if not has_it:
                queue.append(source)
    return sorted(found)


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
    """Kept as it is: modules, as patterns of their names (``h.*.attn``, what is in them too), and
    operators (``aten.mm``, ``mm``)."""
    repeat: tuple[str, ...] = ()
    """Repeated whatever it costs, as far as it may be: modules and operators alike. `save` goes
    first."""
    partition: tuple[str, ...] = ()
    """Kept as this rank's part and gathered again in backward, where other ranks have the same:
    modules and operators alike. `save` and `repeat` go first. Under a `memory_budget` such values
    are found without being named."""

    def __post_init__(self) -> None:
        """A number of operators is none, or some."""
        super().__post_init__()
        at_least("recompute.max_nodes", self.max_nodes, 0)

    def decide(self, graph: StepGraph, ctx: Context) -> Repetitions:
        """What is cheap, and what the policy, the lists and the level of a budget add."""
        cheap = self._cheap(graph, ctx)
        by_level = ctx.level is not None and self.policy is Policy.AUTO
        lists = self.save or self.repeat or self.partition
        if not (lists or by_level or self.policy is Policy.FULL):
            return cheap
        found = self._values(graph, ctx)
        self._check_names(found.nodes)
        names = {name for value in cheap.values for name in value.nodes}
        base = {i for i, node in enumerate(found.nodes) if node.name in names}
        repeated = set(base)
        in_parts: set[int] = set()
        if self.policy is Policy.FULL:
            repeated = _blocks(found, base)
        elif by_level:
            assert ctx.level is not None
            found = replace(found, values=_with_parts(found, ctx.level.parts))
            if ctx.level.levels is None:
                by_hand = [_blocks(found, base), range(len(found.values))]
                # What is cheap and crosses a fence is kept. Where regions are compiled it is
                # repeated: it is fused into what reads it, and takes little.
                ctx.level.levels = levels(
                    found.values, base, by_hand, crosses=ctx.fuses, reads=found.reads
                )
            at = ctx.level.levels.at(ctx.level.number, ctx.level.spare_bytes)
            repeated = set(at.repeated)
            if not (ctx.level.number or lists or at.in_parts) and base <= repeated:
                return cheap
            in_parts |= at.in_parts
        repeated |= {i for i, node in enumerate(found.nodes) if _is_named(node, self.repeat)}
        named = {i for i, node in enumerate(found.nodes) if _is_named(node, self.partition)}
        if self.partition and not any(found.nodes[i] in found.along for i in named):
            ctx.warnings.append(
                f"recompute.partition={list(self.partition)} has no effect: of what it names no "
                "value is the same on several ranks, lies in one piece and is worth a collective"
            )
        in_parts |= named
        return _repetitions(found, repeated, in_parts)

    def _values(self, graph: StepGraph, ctx: Context) -> ForwardValues:
        return forward_values(
            graph,
            ctx.costs,
            fuses=ctx.fuses,
            stays=lambda node: _is_named(node, self.save),
            draws_again=not ctx.replays,
        )

    def question(self, graph: StepGraph, ctx: Context) -> str:
        """Ranks that may keep values in parts decide alike: what they gather is collectives."""
        if not (self.partition or ctx.level is not None):
            return ""
        names = [node.name for node, alongs in same_on_ranks(graph).items() if alongs]
        if not names:
            return ""
        level = ctx.level
        at = "" if level is None else f"{level.number} {level.spare_bytes} {level.parts}"
        return " ".join([at, *names])

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
            elif self.max_nodes and not _later_layer_repeats_from(node, repeated):
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
        for what in ("save", "repeat", "partition"):
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
            ConfigError: the decision names what is no forward node, or ranks that do not have it.
        """
        nodes = {n.name: n for n in graph.nodes(phase=Phase.FORWARD)}
        made: dict[fx.Node, fx.Node] = {}
        first = next(graph.nodes(phase=Phase.BACKWARD), graph.output)
        cut_parts(graph, decision.parts, nodes, made, before=first)
        states = keep_states(graph, decision.values, nodes)
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
                graph, [nodes[name] for name in value.nodes], made, before=first, states=states
            )
        if made:
            release_unread(graph, made)
            sink_backward(graph)
            if graph.pipeline is not None:
                repeat_where_read(made.values())
                repeat_before_put_off(graph, set(made.values()))
        parts = {"in_parts": len(decision.parts)} if decision.parts else {}
        drawn = {"drawn_again": len(states)} if states else {}
        return Notes(
            repeated=len(made) - len(decision.parts),
            for_checkpoint=sum(value.asked for value in decision.values),
            unsaved_bytes=sum(value.saved_bytes for value in decision.values)
            + sum(part.saved_bytes for part in decision.parts),
            **parts,
            **drawn,
        )


def _later_layer_repeats_from(node: fx.Node, repeated: Collection[fx.Node]) -> bool:
    """Whether a later layer repeats something from a node. Backward comes to that layer first, so
    that a chain of such nodes would be repeated, and held, at once, from the first layer on."""
    layer = stamp_of(node).layer
    return any(user in repeated and stamp_of(user).layer != layer for user in node.users)


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
    elif callable(node.target):
        words.append(getattr(node.target, "__name__", ""))
    return any(fnmatchcase(word, name) for name in names for word in words)


def _blocks(found: ForwardValues, base: Collection[int]) -> set[int]:
    """What stands inside of a block, or is cheap, and does not leave it."""
    layers = [stamp_of(node).layer for node in found.nodes]
    fences = [i for i in range(1, len(layers)) if layers[i] != layers[i - 1]]
    crossing = crossers(found.values, fences)
    return {
        i
        for i, layer in enumerate(layers)
        if i not in crossing
        and (i in base or any(part.isdigit() for part in layer.split(".")))
        and not is_random(found.nodes[i])  # its numbers are kept: they cost more than their bytes
    }


def _with_parts(
    found: ForwardValues, parts: Collection[tuple[str, str]] | None
) -> tuple[Value, ...]:
    """Values of which those of some names are kept in parts whatever it costs, and no others; as
    they are if nothing was said of it."""
    if parts is None:
        return found.values
    named = {name for name, _ in parts}
    return tuple(
        replace(value, is_needed=True, may_keep=False, may_repeat=False)
        if node.name in named and node in found.along
        else replace(value, part_us=None)
        for node, value in zip(found.nodes, found.values, strict=True)
    )


def _repetitions(
    found: ForwardValues, chosen: Collection[int], in_parts: Collection[int]
) -> Repetitions:
    """What backward repeats if it may repeat these, one node at a time, later ones first."""
    result = closure(found.values, chosen, in_parts)
    parts = tuple(
        Partitioned(
            found.nodes[i].name,
            found.along[found.nodes[i]].name,
            found.values[i].num_bytes - found.values[i].part_bytes,
            stamp_of(found.nodes[i]).layer,
            round(found.values[i].part_us or 0, 1),
        )
        for i in sorted(result.in_parts)
    )
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
        ),
        parts,
    )

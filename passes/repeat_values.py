"""Let backward read values that it repeats, draws again or gathers again.

    forward   state = generator_state("cpu"); mask = dropout_mask([4, 8], 0.1)
              y = gelu(x); part = own_part(v, 8, "0")
    backward  mask' = draw_again(state, [4, 8], 0.1); y' = gelu(x); v' = wait(gather(part))

What shall be repeated is decided in `fxzero.passes.recompute`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, fx

from fxzero._compat import copy_node
from fxzero.errors import ConfigError
from fxzero.graph import Lane, Phase, Role, StepGraph
from fxzero.graph.aliases import is_view, readers, root
from fxzero.graph.operators import can_draw_again, num_bytes
from fxzero.graph.same_on_ranks import can_be_cut, same_on_ranks
from fxzero.graph.stamps import set_stamp, stamp_of
from fxzero.passes.decision import Decision
from fxzero.runtime.random import STATE_BYTES, DrawAgain, generator_state
from fxzero.schedule.parts import emit_gather_again, emit_own_part


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
class Partitioned:
    """One value that each rank keeps a part of."""

    value: str
    """The forward node."""
    along: str
    """The ranks that have it: `fxzero.graph.same_on_ranks.Along.name`."""
    saved_bytes: int
    """What need not be kept."""
    layer: str
    us: float
    """What gathering it again takes, by the cost model."""


@dataclass(frozen=True)
class Repetitions(Decision):
    """What backward repeats, later values first, and what it gathers from parts."""

    values: tuple[Repeated, ...]
    parts: tuple[Partitioned, ...] = ()


def repeat_in_backward(
    graph: StepGraph,
    nodes: list[fx.Node],
    made: dict[fx.Node, fx.Node],
    before: fx.Node,
    states: Mapping[fx.Node, fx.Node] = MappingProxyType({}),
) -> fx.Node:
    """Copy forward nodes into backward and let backward read the copies.

    Args:
        before: backward's first node. Copies go in front of it.
        states: by random node, its generator's state when it ran.

    Returns:
        What backward's first node is now.
    """
    new = [node for node in nodes if node not in made]
    for node in new:
        with graph.graph.inserting_before(before):
            copy = copy_node(graph.graph, node, lambda n: made.get(n, n))
        if node in states:
            copy.target = DrawAgain(node.target, _device_of(node))  # type: ignore[arg-type]
            copy.args = (states[node], *copy.args)
        stamp = stamp_of(node)
        set_stamp(copy, stamp.but(phase=Phase.BACKWARD, made_by="recompute", again=node.name))
        made[node] = copy
    for node in nodes:
        for user in list(node.users):
            if stamp_of(user).phase is Phase.BACKWARD and user is not made[node]:
                user.replace_input_with(node, made[node])
    return made[new[0]] if new else before


def cut_parts(
    graph: StepGraph,
    parts: Sequence[Partitioned],
    nodes: Mapping[str, fx.Node],
    made: dict[fx.Node, fx.Node],
    before: fx.Node,
) -> None:
    """Let backward read values that it gathers from the ranks' parts.

    Args:
        made: gets what stands for each value in backward.
    """
    same = same_on_ranks(graph) if parts else {}
    for part in parts:
        node = nodes.get(part.value)
        alongs = {along.name: along for along in same.get(node, ())} if node is not None else {}
        if node is None or part.along not in alongs or not can_be_cut(node.meta.get("val")):
            raise ConfigError(
                f"the plan keeps {part.value!r} in parts along {part.along!r}: no such value of "
                f"forward is the same there; it is along {', '.join(alongs) or 'nothing'}"
            )
        along = alongs[part.along]
        own = emit_own_part(graph, node, along)
        full = made[node] = emit_gather_again(graph, node, own, along, before)
        for user in list(node.users):
            if user is not full and stamp_of(user).phase is Phase.BACKWARD:
                user.replace_input_with(node, full)


def release_unread(graph: StepGraph, made: Mapping[fx.Node, fx.Node]) -> None:
    """End what is gathered again and not read: another rank's backward reads it, so that this one
    sends its part, and takes what comes.

    Args:
        made: by forward node, what stands for it in backward.
    """
    unread: dict[fx.Node, None] = {}
    for copy in sorted(made.values(), reverse=True):
        if all(user in unread for user in copy.users):
            unread[copy] = None
    for copy in unread:
        if stamp_of(copy).lane is not Lane.GATHER:
            continue  # compute that nobody reads goes by itself
        last = max((copy, *copy.users))
        with graph.graph.inserting_after(last), graph.made_for(copy):
            graph.call(
                torch.ops.fxzero.release.default,
                ([copy],),
                stamp=stamp_of(copy).but(lane=Lane.COMPUTE, role=Role.RELEASE),
            )


def keep_states(
    graph: StepGraph, values: Sequence[Repeated], nodes: Mapping[str, fx.Node]
) -> dict[fx.Node, fx.Node]:
    """Keep the states from which random operators draw that will be drawn again."""
    found: dict[fx.Node, fx.Node] = {}
    for name in dict.fromkeys(name for value in values for name in value.nodes):
        node = nodes.get(name)
        if node is None or node in found or not can_draw_again(node):
            continue
        device = _device_of(node)
        like = _state_like(graph, device)
        stamp = stamp_of(node).but(made_by="recompute")
        with graph.graph.inserting_before(node), graph.made_for(node):
            found[node] = graph.call(
                generator_state, (device,), stamp=stamp, name=f"{name}_state", value=like
            )
    return found


def _device_of(node: fx.Node) -> str:
    value = node.meta["val"]
    first = value[0] if isinstance(value, (list, tuple)) else value
    device: str = first.device.type
    return device


def _state_like(graph: StepGraph, device: str) -> Tensor:
    """A fake generator's state."""
    if graph.fake_mode is None:
        return torch.empty(STATE_BYTES[device], dtype=torch.uint8)
    with graph.fake_mode:
        return torch.empty(STATE_BYTES[device], dtype=torch.uint8)


def repeat_where_read(nodes: Iterable[fx.Node]) -> None:
    """Let what is repeated be part of the stage, and of the half of a backward, that reads it."""
    for node in sorted(nodes, reverse=True):
        readers = [stamp_of(user) for user in node.users if user.op != "output"]
        if readers:
            first = min(readers, key=lambda stamp: (-stamp.stage, stamp.half))
            set_stamp(node, stamp_of(node).but(stage=first.stage, half=first.half))


def repeat_before_put_off(graph: StepGraph, nodes: Collection[fx.Node]) -> None:
    """Repeat for products that are put off when backward reads the same values for the last time.

        gx = gelu_backward(g, x)              y' = gelu(x); gx = gelu_backward(g, x)
        …                                     …
        y' = gelu(x); dw = mm(t(g), y')   →   dw = mm(t(g), y')

    Both are then one kernel, which computes what they share once, and from there to the product y'
    is held in place of x: a value is moved where it is not larger than what ends for it. While that
    kernel runs there is one value more than without.

    Args:
        nodes: what is repeated.
    """
    place = {node: i for i, node in enumerate(graph.nodes(phase=Phase.BACKWARD))}
    for value in sorted(nodes):
        if value not in place or is_view(value):
            continue
        read = [place[user] for user in readers(value) if user in place and user not in nodes]
        made = _repeated_for(value, nodes)
        if not read or made is None:
            continue
        anchor = _last_reader_of_what_ends(value, made, place, min(read))
        if anchor is None:
            continue
        segment = stamp_of(anchor)
        for node in sorted(made):
            if anchor < node:  # a view may have gone further up, with another value
                anchor.prepend(node)
                set_stamp(node, stamp_of(node).but(stage=segment.stage, half=segment.half))


def _repeated_for(value: fx.Node, nodes: Collection[fx.Node]) -> set[fx.Node] | None:
    """What is repeated for a value, itself and views of it included; None if another one needs it
    too."""
    made = {value, *(user for user in readers(value) if user in nodes and is_view(user))}
    queue = [value]
    while queue:
        for source in queue.pop().all_input_nodes:
            if source in nodes and source not in made:
                made.add(source)
                queue.append(source)
    shared = any(
        user not in made
        for node in made
        if not is_view(node) and node is not value
        for user in readers(node)
    )
    return None if shared else made


def _last_reader_of_what_ends(
    value: fx.Node, made: Collection[fx.Node], place: Mapping[fx.Node, int], first_read: int
) -> fx.Node | None:
    """Where backward has read for the last time what is then only kept for a value; None if that is
    less than the value, or is read behind it."""
    ends, ended_bytes = -1, 0
    for source in {root(s) for node in made for s in node.all_input_nodes if s not in made}:
        if source.op != "call_function" or stamp_of(source).role is Role.UNSHARD:
            continue  # inputs and parameters are there anyway
        if stamp_of(source).phase is not Phase.FORWARD:
            return None
        others = [place[user] for user in readers(source) if user in place and user not in made]
        if others and max(others) < first_read:
            ends, ended_bytes = max(ends, *others), ended_bytes + num_bytes(source)
    if ended_bytes < num_bytes(value):
        return None
    return next(node for node, i in place.items() if i == ends)

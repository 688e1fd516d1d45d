"""Which parameter a value belongs to: what `verify` asks of gathers, gradients and updates.

    gather([a, b])  →  the first result is a's, over the group that a is sharded over
    return da       →  a's gradient: a mean over its group, of every micro-step once
    update([a], [da], [[momentum of a]])
    ahead(a)        →  after a's last update

All of it can be wrong in a graph in which every node stands in its place and every shape fits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import fx

from fxzero.graph.stamps import Lane, Phase, Role, stamp_of
from fxzero.graph.step_graph import StepGraph, Transfer


class Finding(NamedTuple):
    """A rule that is broken."""

    node: fx.Node
    rule: str
    advice: str


def wrong_transfers(graph: StepGraph) -> Iterator[Finding]:
    """Results that are waited for as another parameter's than the one that was sent."""
    for transfer in graph.transfers():
        stamp = transfer.stamp
        if stamp.phase is Phase.OPTIMIZER or not stamp.params:
            continue
        yield from _wrong_group(graph, transfer)
        for wait in transfer.waits:
            source = wait.all_input_nodes[0]
            sent, expected = _what_was_sent(transfer, source)
            given = stamp_of(wait).params
            if stamp.lane is Lane.GATHER:
                expected = _params_behind(sent)
            if expected and given and not set(given) <= set(expected):
                yield Finding(
                    wait,
                    f"{wait.name} is waited for as {_names(given)}, but {transfer.launch.name} "
                    f"sent {_names(expected)} there",
                    "Keep the order of tensors, parts and waits of a transfer alike.",
                )


def _what_was_sent(
    transfer: Transfer, source: fx.Node
) -> tuple[tuple[fx.Node, ...], tuple[str, ...]]:
    """What a result is made of, and the parameters that the launch says it carries there."""
    launch, params = transfer.launch, transfer.stamp.params
    if source is launch:  # one tensor each: after `lower_transfers`
        return tuple(launch.all_input_nodes), params
    index = source.args[1]
    assert isinstance(index, int)
    of_it = params[index : index + 1] if len(params) == len(transfer.tensors) else params
    return (transfer.tensors[index],), of_it


def _params_behind(nodes: tuple[fx.Node, ...]) -> tuple[str, ...]:
    """The parameters among the graph inputs that nodes are made of."""
    found: dict[str, None] = {}
    queue = list(nodes)
    seen: set[fx.Node] = set()
    while queue:
        node = queue.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.op == "placeholder":
            found.update(dict.fromkeys(stamp_of(node).params))
        queue.extend(node.all_input_nodes)
    return tuple(found)


def _wrong_group(graph: StepGraph, transfer: Transfer) -> Iterator[Finding]:
    """A gather over other ranks than those that share the parameter."""
    launch = transfer.launch
    if transfer.stamp.lane is not Lane.GATHER or len(launch.args) < 3:
        return  # a take: its group is the launch's of the step before
    for key in transfer.stamp.params:
        group = graph.specs[key].shard_group if key in graph.specs else None
        if group is not None and tuple(launch.args[1:3]) != (group.size, group.name):
            yield Finding(
                launch,
                f"{launch.name} gathers {graph.specs[key].name} over group {launch.args[2]} of "
                f"{launch.args[1]}, but it is sharded over {group.name} of {group.size}",
                "A shard is gathered over the group that shares it: ParamSpec.shard_group.",
            )


def micro_steps(graph: StepGraph) -> list[int]:
    """The micro-steps of a graph's backward."""
    return sorted({stamp_of(node).micro_step for node in graph.nodes(phase=Phase.BACKWARD)})


def wrong_gradient(
    graph: StepGraph, gradient: fx.Node, key: str, expected: list[int]
) -> Iterator[Finding]:
    """What leaves the graph as a parameter's gradient, or updates it, and is something else.

    Before transfers are lowered: afterwards the operators are the backend's.

    Args:
        expected: the micro-steps whose gradients it adds up.
    """
    name = graph.specs[key].name
    steps: list[int] = []
    for term in _terms(gradient):
        node = term
        while node.op == "call_function" and stamp_of(node).role is not Role.COMPUTE:
            stamp = stamp_of(node)
            if stamp.role is Role.WAIT and stamp.lane is Lane.REDUCE:
                if key not in stamp.params:
                    yield Finding(
                        node,
                        f"the gradient of {name} is {node.name}, which is that of "
                        f"{_names(stamp.params)}",
                        "Keep parameters and gradients in one order.",
                    )
                launch = node.all_input_nodes[0].all_input_nodes[0]
                if "avg" not in launch.args:
                    yield Finding(
                        launch,
                        f"the gradient of {name} is no mean over the ranks: {launch.args[1:]}",
                        "Gradients are averaged: reduce them with 'avg'.",
                    )
            node = _before(node)
        steps.append(stamp_of(term).micro_step)
    if sorted(steps) != expected and (len(steps) > 1 or len(expected) > 1):
        yield Finding(
            gradient,
            f"the gradient of {name} adds up micro-steps {sorted(steps)}, expected {expected}",
            "Every micro-step's gradient is added once.",
        )


def _before(node: fx.Node) -> fx.Node:
    """Where a node's value comes from, through the transfer that brought it."""
    if stamp_of(node).role is Role.PART:
        launch, index = node.args
        assert isinstance(launch, fx.Node)
        sent = launch.args[0]
        assert isinstance(sent, (list, tuple))
        assert isinstance(index, int)
        found = sent[index]
        assert isinstance(found, fx.Node)
        return found
    return node.all_input_nodes[0]


def _terms(node: fx.Node) -> list[fx.Node]:
    """The micro-steps' gradients whose sum a gradient is."""
    while node.op == "call_function" and stamp_of(node).role not in (
        Role.COMPUTE,
        Role.ACCUMULATE,
        Role.WAIT,
    ):
        node = _before(node)
    if node.op == "call_function" and stamp_of(node).role is Role.WAIT:
        # Stages 0 and 1 reduce the sum: it is behind the transfer.
        sent = node
        while sent.op == "call_function" and stamp_of(sent).role in _MOVES:
            sent = _before(sent)
        if sent.op != "call_function" or stamp_of(sent).role is not Role.ACCUMULATE:
            return [node]
        node = sent
    if node.op == "call_function" and stamp_of(node).role is Role.ACCUMULATE:
        parts = [part for part in node.args if isinstance(part, fx.Node)]
        return [term for part in parts for term in _terms(part)]
    return [node]


_MOVES = (Role.WAIT, Role.PART, Role.FINISH, Role.PREPARE)


def wrong_updates(graph: StepGraph) -> Iterator[Finding]:
    """Updates that take one parameter for another, or its state."""
    for node in graph.nodes(role=Role.UPDATE):
        params, _, *rest = node.args
        keys = stamp_of(node).params
        assert isinstance(params, (list, tuple))
        if not keys:
            continue  # buffers
        state = rest[0] if rest and isinstance(rest[0], (list, tuple)) else []
        for what, nodes in (("parameter", params), *(("state", part) for part in state)):
            assert isinstance(nodes, (list, tuple))
            for key, source in zip(keys, nodes, strict=True):
                assert isinstance(source, fx.Node)
                found = _key_of(source)
                if found != key:
                    yield Finding(
                        node,
                        f"{node.name} takes {source.name} for the {what} of {_names((key,))}, "
                        f"which is that of {_names((found,))}",
                        "Keep parameters, gradients and state of an update in one order.",
                    )


def _key_of(source: fx.Node) -> str:
    """The parameter that a graph input is, or holds the state of."""
    match source.meta.get("fxzero_source"):
        case ("state", key, _):
            return str(key)
    return next(iter(stamp_of(source).params), "")


def early_launches(graph: StepGraph) -> Iterator[Finding]:
    """The next step's gathers that start before the parameters are what they will be."""
    updated_later: dict[str, fx.Node] = {}
    for node in reversed(list(graph.nodes())):
        stamp = stamp_of(node)
        if stamp.role is Role.UPDATE:
            updated_later |= dict.fromkeys(stamp.params, node)
        elif stamp.role is Role.AHEAD:
            # Not those of its stamp: lowered, each of a bucket's gathers names them all.
            for key in _params_behind(tuple(node.all_input_nodes)):
                if key in updated_later:
                    update = updated_later[key]
                    yield Finding(
                        node,
                        f"{node.name} gathers {_names((key,))} for the next step before "
                        f"{update.name} has changed it",
                        "Launch it behind the last update of its parameters.",
                    )


def _names(keys: tuple[str, ...]) -> str:
    """Parameters' names, without their models' numbers."""
    return ", ".join(key.partition("/")[2] or key or "nothing" for key in keys) or "nothing"

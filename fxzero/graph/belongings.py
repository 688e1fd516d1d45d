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

from fxzero.graph.launch import call_of, full_bytes, record_of_call
from fxzero.graph.operators import is_random
from fxzero.graph.stamps import Lane, Phase, Role, stamp_of
from fxzero.graph.step_graph import StepGraph, TransferNodes, sent_by, transfer_nodes
from fxzero.transfer import TransferKind


class Finding(NamedTuple):
    """A rule that is broken."""

    node: fx.Node
    rule: str
    advice: str


def wrong_transfers(graph: StepGraph) -> Iterator[Finding]:
    """Results that are taken for another parameter's than the one that was sent."""
    for transfer in graph.transfers():
        if not transfer.of_parameters:
            continue
        yield from _wrong_group(graph, transfer)
        for part in transfer.parts if transfer.parts != (transfer.wait,) else ():
            sent, expected = _what_was_sent(transfer, part)
            given = stamp_of(part).params
            if transfer.stamp.lane in (Lane.GATHER, Lane.H2D):
                expected = _params_behind((sent,)) if sent is not None else ()
                given = tuple(graph.owner_of(key) for key in given)
            if expected and given and not set(given) <= set(expected):
                yield Finding(
                    part,
                    f"{part.name} is taken for {named(given)}, but {transfer.launch.name} "
                    f"sent {named(expected)} there",
                    "Keep the order of tensors and parts of a transfer alike.",
                )


def _what_was_sent(
    transfer: TransferNodes, part: fx.Node
) -> tuple[fx.Node | None, tuple[str, ...]]:
    """What a result is made of, and the parameters that the launch says it carries there."""
    index = part.args[1]
    assert isinstance(index, int)
    tensors, params = transfer.tensors, transfer.stamp.params
    if len(tensors) != len(params):  # taken ahead: its tensors are the launch's of a step before
        return None, params
    return tensors[index], params[index : index + 1]


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


def _wrong_group(graph: StepGraph, transfer: TransferNodes) -> Iterator[Finding]:
    """A transfer over other ranks than those along its axis of the parameters' mesh."""
    record = transfer.record
    for key in transfer.stamp.params:
        if transfer.is_copy or key not in graph.specs:
            continue
        layout = graph.specs[key].layout
        due = layout.gathers if transfer.stamp.lane is Lane.GATHER else layout.reductions
        over = [(kind, axis.group.name, axis.group.size) for kind, axis in due]
        if (record.kind, record.group, record.size) not in over:
            expected = ", ".join(f"{kind} over {name} of {size}" for kind, name, size in over)
            yield Finding(
                transfer.launch,
                f"{transfer.launch.name} moves {graph.specs[key].name} by {record}, but its "
                f"layout asks for {expected or 'nothing'}",
                "What is gathered and reduced, over which ranks, follows from ParamSpec.layout.",
            )


def wrong_calls(graph: StepGraph) -> Iterator[Finding]:
    """Launches that do something else than their record says. Before transfers are lowered."""
    for launch in graph.nodes(role=Role.LAUNCH):
        record = stamp_of(launch).transfer
        if record is None:
            rule = f"{launch.name} is stamped as a launch and says nothing of its transfer"
            yield Finding(launch, rule, "Emit transfers by fxzero.graph.launch.")
            continue
        if record.kind is TransferKind.COPY:
            continue  # see `fxzero.graph.lanes`
        if record.kind in (TransferKind.SEND, TransferKind.RECEIVE):
            continue  # see `fxzero.graph.messages`
        if stamp_of(launch).made_by == "capture":
            found = record_of_call(launch)
            said = str(record)
        else:
            sent = sent_by(launch)
            target, arguments = call_of(record, sent)
            found = record if (launch.target, launch.args) == (target, arguments) else None
            said = f"{target}{arguments[1:]}"
            moved = full_bytes(record.kind, record.size, sent)
            if moved != record.full_bytes or len(sent) != record.num_tensors:
                rule = (
                    f"{launch.name} moves {len(sent)} tensors, {moved} bytes in full, "
                    f"and its record says {record.num_tensors} and {record.full_bytes}"
                )
                yield Finding(launch, rule, "Write the record when the tensors are known.")
        if found != record:
            yield Finding(
                launch,
                f"{launch.name} calls {launch.target}{launch.args[1:]}, its record means {said}",
                "Change a transfer's record and its call together: fxzero.graph.launch.",
            )


def wrong_draws(graph: StepGraph) -> Iterator[Finding]:
    """Random operators that are run again from a state that is not the one they had."""
    drawn_from: dict[fx.Node, fx.Node] = {}
    """By state, the first node that draws from it."""
    state: fx.Node | None = None
    for node in graph.graph.nodes:
        if getattr(node.target, "reads_generator", False):
            state = node
        elif state is not None and is_random(node):
            drawn_from[state] = node
            state = None
        elif getattr(node.target, "draws_again", False):
            source = node.args[0]
            if source.op == "placeholder":
                continue  # backward's own graph: forward has kept it
            first = drawn_from.get(source)
            if first is None or first.target is not node.target.target:
                found = first.name if first is not None else "nothing"
                yield Finding(
                    node,
                    f"{node.name}, {node.target.__name__}, begins with the state {source.name}, "
                    f"from which {found} has drawn",
                    "Keep a generator's state right before the operator that draws from it.",
                )


def wrong_parts(graph: StepGraph) -> Iterator[Finding]:
    """Values that are gathered again from something else than their parts."""
    for launch in graph.nodes(role=Role.LAUNCH):
        if not stamp_of(launch).again:
            continue
        transfer = transfer_nodes(launch)
        for part in transfer.tensors if transfer.of_activations else ():
            if part.op == "placeholder":
                continue  # backward's own graph: forward has cut it
            record = transfer.record
            is_cut = getattr(part.target, "cuts_part", False)
            if not is_cut or part.args[1:] != (record.size, record.group):
                yield Finding(
                    transfer.launch,
                    f"{transfer.launch.name} gathers {part.name} by {record}, which is no part of "
                    "a value that was cut for these ranks",
                    "Cut and gather by fxzero.schedule.parts.",
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
            if is_received(node):
                break
            stamp = stamp_of(node)
            if stamp.role is Role.PART and stamp.lane is Lane.REDUCE:
                if key not in stamp.params:
                    yield Finding(
                        node,
                        f"the gradient of {name} is {node.name}, which is that of "
                        f"{named(stamp.params)}",
                        "Keep parameters and gradients in one order.",
                    )
                launch = launch_of(node)
                record = stamp_of(launch).transfer
                tied = graph.specs[key].layout.tied
                due, what = "avg", "mean over the ranks"  # of its stage
                if record is not None and tied is not None and record.group == tied.name:
                    due, what = "sum", "sum over its stages"
                if record is None or record.op != due:
                    yield Finding(
                        launch,
                        f"the gradient of {name} is no {what}: {launch.args[1:]}",
                        f"Reduce it with {due!r} over this group.",
                    )
            node = value_before(node)
        steps.append(stamp_of(term).micro_step)
    if sorted(steps) != expected and (len(steps) > 1 or len(expected) > 1):
        yield Finding(
            gradient,
            f"the gradient of {name} adds up micro-steps {sorted(steps)}, expected {expected}",
            "Every micro-step's gradient is added once.",
        )


def launch_of(part: fx.Node) -> fx.Node:
    """The launch of the transfer that brings a part."""
    return part.all_input_nodes[0].all_input_nodes[0]


def sent_as(part: fx.Node) -> fx.Node:
    """What a part was when it was sent."""
    index = part.args[1]
    assert isinstance(index, int)
    return sent_by(launch_of(part))[index]


def is_received(node: fx.Node) -> bool:
    """Whether a node is part of a message: another stage has computed it."""
    if stamp_of(node).role is not Role.PART:
        return False
    record = stamp_of(launch_of(node)).transfer
    return record is not None and record.kind is TransferKind.RECEIVE


def value_before(node: fx.Node) -> fx.Node:
    """Where a node's value comes from, through the transfer that brought it."""
    return sent_as(node) if stamp_of(node).role is Role.PART else node.all_input_nodes[0]


def _terms(node: fx.Node) -> list[fx.Node]:
    """The micro-steps' gradients whose sum a gradient is."""
    while node.op == "call_function" and stamp_of(node).role not in (
        Role.COMPUTE,
        Role.ACCUMULATE,
        Role.PART,
        Role.ROWS,  # of the batch itself, which somebody's backward returns
    ):
        node = value_before(node)
    if node.op == "call_function" and stamp_of(node).role is Role.PART:
        # Stages 0 and 1 reduce the sum: it is behind the transfer.
        sent = node
        while sent.op == "call_function" and stamp_of(sent).role in _MOVES:
            if is_received(sent):
                break
            sent = value_before(sent)
        if sent.op != "call_function" or stamp_of(sent).role is not Role.ACCUMULATE:
            return [node]
        node = sent
    if node.op == "call_function" and stamp_of(node).role is Role.ACCUMULATE:
        parts = [part for part in node.args if isinstance(part, fx.Node)]
        return [term for part in parts for term in _terms(part)]
    return [node]


_MOVES = (Role.PART, Role.FINISH, Role.PREPARE)


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
                        f"{node.name} takes {source.name} for the {what} of {named((key,))}, "
                        f"which is that of {named((found,))}",
                        "Keep parameters, gradients and state of an update in one order.",
                    )


def _key_of(source: fx.Node) -> str:
    """The parameter that a graph input is, or holds the state of."""
    if source.op != "placeholder" and stamp_of(source).lane is Lane.H2D:
        source = sent_as(source)
    match source.meta.get("fxzero_source"):
        case ("state", key, _):
            return str(key)
    return next(iter(stamp_of(source).params), "")


def early_launches(graph: StepGraph) -> Iterator[Finding]:
    """The next step's gathers that start before the parameters are what they will be."""
    updated_later: dict[str, fx.Node] = {}
    if next(graph.nodes(role=Role.AHEAD), None) is None:
        return
    for node in reversed(list(graph.nodes())):
        stamp = stamp_of(node)
        if stamp.role is Role.UPDATE:
            updated_later |= dict.fromkeys(stamp.params, node)
        elif stamp.role is Role.AHEAD:
            copies = stamp.lane is Lane.H2D  # behind an update, which it reads too
            for key in _params_behind(tuple(sent_by(node) if copies else node.all_input_nodes)):
                if key in updated_later:
                    update = updated_later[key]
                    yield Finding(
                        node,
                        f"{node.name} gathers {named((key,))} for the next step before "
                        f"{update.name} has changed it",
                        "Launch it behind the last update of its parameters.",
                    )


def named(keys: tuple[str, ...]) -> str:
    """Parameters' names, without their models' numbers."""
    return ", ".join(key.partition("/")[2] or key or "nothing" for key in keys) or "nothing"

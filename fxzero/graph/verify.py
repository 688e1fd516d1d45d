"""What is always true of a step graph: checked behind the passes, or behind each (FXZERO_VERIFY).

    stamped       every node has a stamp
    waits         every transfer is waited for exactly once, after its launch and before its
                  first use, and does what its record says
    constants     what a node reads from the module is what it was traced with
    belongings    what is waited for is the parameter that was sent, over its group; of a block of
                  it, the block's columns
    releases      nothing reads a parameter after its release
    reductions    every trainable parameter's gradient is its own, averaged exactly once over
                  each of its groups, and holds every micro-step once, before it leaves the
                  graph or updates the parameter; of one in blocks so is each block's, and it
                  holds all of them in their places
    updates       an update takes the parameter's own gradient and state; nothing reads a
                  parameter, or a buffer, after it was updated, but the next step's gathers,
                  which do not start before
    lanes         what runs beside compute is waited for before it is read, or before what it
                  reads is changed; no place in the host's memory is given twice
    messages      what stages of a pipeline send is what their records say
    slabs         nor any place in a slab, until nothing reads what is there
    randomness    a random node is never run twice, but from the state that its generator had
    parts         what is gathered again is what was cut, over the ranks that it was cut for

That all ranks run the same sequence of collectives is compared when they run: see
`fxzero.ranks.agree`.
A failure shows the node, ten nodes either side, the user's source line and what to do.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
from torch import fx

from fxzero.errors import VerificationError
from fxzero.graph.aliases import is_view, root
from fxzero.graph.belongings import (
    Finding,
    early_launches,
    is_received,
    launch_of,
    micro_steps,
    sent_as,
    wrong_calls,
    wrong_draws,
    wrong_gradient,
    wrong_parts,
    wrong_transfers,
    wrong_updates,
)
from fxzero.graph.blocks import block_of, shards_side_by_side, wrong_blocks, wrong_columns
from fxzero.graph.constants import mismatch
from fxzero.graph.lanes import wrong_lanes
from fxzero.graph.messages import messages_out_of_order, wrong_messages
from fxzero.graph.node_text import node_line, source_line
from fxzero.graph.operators import is_random
from fxzero.graph.slabs import wrong_slabs
from fxzero.graph.stamps import Lane, Role, has_stamp, stamp_of
from fxzero.graph.step_graph import StepGraph
from fxzero.graph.streamed_states import overwritten_by

_BEFORE_SUM_TIED = ("shard_grads", "expand_layers", "bucket")
"""Passes behind which stages of a pipeline have not added up the gradients of what they share."""
_RELEASES = (torch.ops.fxzero.release.default, torch.ops.fxzero.release_saved.default)


def verify(graph: StepGraph, facts: Iterable[str], *, after: str) -> None:
    """Check every rule that the facts make applicable.

    Args:
        facts: values of `fxzero.passes.Fact` that hold.
        after: the pass that ran last, for the message.

    Raises:
        VerificationError: a rule is broken.
    """
    known = {str(getattr(fact, "value", fact)) for fact in facts}
    if "stamped" in known:
        check_stamps(graph, after)
        check_order(graph, after)
        check_randomness(graph, after)
        check_constants(graph, after)
    if "stamped" in known:
        check_waits(graph, after)
        _none_of(graph, after, wrong_parts(graph))
        _none_of(graph, after, wrong_messages(graph))
        _none_of(graph, after, messages_out_of_order(graph))
        if "cut" not in known:
            _none_of(graph, after, wrong_calls(graph))
    if known & {"gathered", "reduced", "cut"}:
        _none_of(graph, after, wrong_transfers(graph))
        if "cut" not in known:
            _none_of(graph, after, wrong_blocks(graph))
        check_releases(graph, after)
    if "reduced" in known and "cut" not in known:
        check_reductions(graph, after)
    if "bucketed" in known and graph.loss is None:
        _none_of(graph, after, wrong_lanes(graph))
    if "updated" in known:
        check_updates(graph, after, lowered="cut" in known)
    if "cut" in known:
        _none_of(graph, after, wrong_slabs(graph))


def _fail(graph: StepGraph, node: fx.Node, after: str, rule: str, advice: str) -> None:
    nodes = list(graph.graph.nodes)
    at = nodes.index(node) if node in nodes else 0
    near = nodes[max(at - 10, 0) : at + 11]
    lines = [f"{'>' if n is node else ' '} {node_line(n)}" for n in near]
    source = source_line(node)
    where = f"\nfrom {source}" if source else ""
    raise VerificationError(
        f"after pass {after!r}: {rule}{where}\n\n" + "\n".join(lines) + f"\n\n{advice}"
    )


def _none_of(graph: StepGraph, after: str, findings: Iterable[Finding]) -> None:
    """See that there is no finding."""
    for found in findings:
        _fail(graph, found.node, after, found.rule, found.advice)


def check_stamps(graph: StepGraph, after: str) -> None:
    """Every node has a stamp."""
    for node in graph.graph.nodes:
        if not has_stamp(node):
            _fail(
                graph,
                node,
                after,
                f"node {node.name} has no stamp",
                "A pass that makes nodes stamps them: use StepGraph.call.",
            )


def check_order(graph: StepGraph, after: str) -> None:
    """Nodes stand after what they read."""
    seen: set[fx.Node] = set()
    for node in graph.graph.nodes:
        for source in node.all_input_nodes:
            if source not in seen:
                _fail(
                    graph,
                    node,
                    after,
                    f"node {node.name} reads {source.name} before it exists",
                    "The pass moved one of them too far.",
                )
        seen.add(node)


def check_randomness(graph: StepGraph, after: str) -> None:
    """No random node is a repetition of another one, unless it draws from the same state."""
    for node in graph.graph.nodes:
        if stamp_of(node).again and is_random(node):
            _fail(
                graph,
                node,
                after,
                f"random node {node.name} repeats {stamp_of(node).again}: backward would see other "
                "numbers than forward",
                "Save its result instead of running it again.",
            )
    _none_of(graph, after, wrong_draws(graph))


def check_constants(graph: StepGraph, after: str) -> None:
    """Every `get_attr` reads the very value that it was traced with, unchanged."""
    for node in graph.graph.find_nodes(op="get_attr"):
        wrong = mismatch(graph.module, node)
        if wrong:
            _fail(
                graph,
                node,
                after,
                f"the constant {node.target} is not the one of {node.name}: {wrong}",
                "Copy such a node into another module by fxzero.graph.constants.adopt.",
            )


def check_waits(graph: StepGraph, after: str) -> None:
    """Every transfer is joined once, nothing else reads what is in flight, and each of its
    tensors is taken once."""
    for node in graph.graph.nodes:
        if node.op != "call_function" or stamp_of(node).role is not Role.LAUNCH:
            continue
        waits = [u for u in node.users if u.op != "output" and stamp_of(u).role is Role.WAIT]
        _only_read_by(graph, after, node, waits)
        if len(waits) != 1:
            _fail(
                graph,
                node,
                after,
                f"the transfer {node.name} is waited for {len(waits)} times",
                "Each launch needs exactly one wait: fxzero.graph.launch.emit_wait.",
            )
        values = waits[0].meta.get("val")
        taken = [u.args[1] for u in waits[0].users if u.op != "output" and _is_part(u)]
        if isinstance(values, (list, tuple)) and sorted(taken) != list(range(len(values))):
            _fail(
                graph,
                waits[0],
                after,
                f"{waits[0].name} brings {len(values)} tensors, and those at {sorted(taken)} are "
                "taken",
                "Each tensor of a transfer has one part.",
            )


def _is_part(node: fx.Node) -> bool:
    return node.target is operator.getitem and stamp_of(node).role is Role.PART


def _only_read_by(graph: StepGraph, after: str, node: fx.Node, waits: list[fx.Node]) -> None:
    for user in node.users:
        role = stamp_of(user).role
        waits_on_its_lane = role is Role.AHEAD and bool(overwritten_by(node))
        if user not in waits and role is not Role.RELEASE and not waits_on_its_lane:
            _fail(
                graph,
                user,
                after,
                f"{user.name} reads {node.name}, which is still in flight",
                "Read a part of its wait instead.",
            )


def check_releases(graph: StepGraph, after: str) -> None:
    """Nothing looks at memory after its release, through views or directly."""
    ends = [
        (node, node.all_input_nodes)
        for node in graph.nodes(role=Role.RELEASE)
        if node.target in _RELEASES or getattr(node.target, "leaves_places", False)
    ]
    _nothing_reads_after(
        graph, after, ends, "released its memory", "Move the release behind the last reader."
    )


def _nothing_reads_after(
    graph: StepGraph,
    after: str,
    ends: Iterable[tuple[fx.Node, Iterable[fx.Node]]],
    what: str,
    advice: str,
) -> None:
    """See that memory is not read once a node has ended what it held.

    Args:
        ends: such nodes, and values in the memory that each of them ends.
    """
    for end, values in ends:
        for value in values:
            owner = root(value)
            for alias in _aliases(owner):
                late = [user for user in alias.users if end < user and not _takes_result(user)]
                if late:
                    rule = f"{min(late).name} reads {alias.name} after {end.name} {what}"
                    _fail(graph, min(late), after, rule, advice)


def _aliases(owner: fx.Node) -> list[fx.Node]:
    """A node that owns its memory, and everything that looks at it."""
    found = [owner]
    for node in found:
        found += [
            user
            for user in node.users
            if is_view(user) and user not in found and root(user) is owner
        ]
    return found


def _takes_result(node: fx.Node) -> bool:
    """Whether a node reads what an update leaves: it starts a gather for the next step, or brings
    state back to the host."""
    if node.op != "call_function":
        return False
    return stamp_of(node).role is Role.AHEAD or bool(overwritten_by(node))


def check_reductions(graph: StepGraph, after: str) -> None:
    """Each trainable parameter's gradient passes through its reductions exactly once."""
    values = graph.output_values
    steps = micro_steps(graph)
    for position, key in graph.gradients.items():
        node = values[position]
        if isinstance(node, fx.Node):
            _check_reduced(graph, node, key, steps, after)
    for node in graph.graph.nodes:
        if node.op == "call_function" and stamp_of(node).role is Role.RESHARD:
            _fail(
                graph,
                node,
                after,
                f"the gradient marker {node.name} was left in the graph",
                "shard_grads replaces all of them: is its parameter's gradient an output?",
            )


def _check_reduced(graph: StepGraph, node: fx.Node, key: str, steps: list[int], after: str) -> None:
    """See that a gradient passed the reductions of its parameter, or each of its blocks did."""
    if key in graph.blocks:
        _none_of(graph, after, wrong_columns(graph, node, key))
        for part, _, _ in shards_side_by_side(graph, node):
            _check_reduced(graph, part, block_of(part), steps, after)
        return
    spec = graph.specs[key]
    expected = [group.name for group in spec.reduced_over]
    if spec.layout.tied is not None and after not in _BEFORE_SUM_TIED:
        expected.append(spec.layout.tied.name)
    found = _reductions(node)
    if found is None:
        return  # kept whole on purpose, by no_sync
    if sorted(found) != sorted(expected):
        _fail(
            graph,
            node,
            after,
            f"the gradient of {spec.name} is reduced over groups {found}, expected {expected}",
            "Every trainable parameter is reduced once over each group that shares it.",
        )
    _none_of(graph, after, wrong_gradient(graph, node, key, steps))


def check_updates(graph: StepGraph, after: str, *, lowered: bool = False) -> None:
    """Updates get their own reduced gradients, after the last reader of what they change.

    Args:
        lowered: transfers are the backend's own, which do not say how they reduce.
    """
    updates = list(graph.nodes(role=Role.UPDATE))
    _nothing_reads_after(
        graph,
        after,
        [(node, _changed_by(node)) for node in updates],
        "has changed it",
        "Move the update behind the last reader.",
    )
    _none_of(graph, after, wrong_updates(graph))
    _none_of(graph, after, wrong_lanes(graph))
    _none_of(graph, after, early_launches(graph))
    steps = micro_steps(graph)
    for node in () if lowered else updates:
        gradients = node.args[1]
        assert isinstance(gradients, (list, tuple))
        for key, gradient in zip(stamp_of(node).params, gradients, strict=False):
            assert isinstance(gradient, fx.Node)
            _check_reduced(graph, gradient, key, steps, after)


def _changed_by(update: fx.Node) -> list[fx.Node]:
    """What an update writes to."""
    targets = update.args[0]
    assert isinstance(targets, (list, tuple))
    return [target for target in targets if isinstance(target, fx.Node)]


def _reductions(node: fx.Node) -> list[str] | None:
    """Names of the groups that a gradient was reduced over; None if it was kept."""
    groups: list[str] = []
    while node.op == "call_function" and not is_received(node):
        stamp = stamp_of(node)
        if stamp.role is Role.PART and stamp.lane is Lane.REDUCE:
            record = stamp_of(launch_of(node)).transfer
            groups.append(record.group if record is not None else "")
            node = sent_as(node)
        elif stamp.role is Role.PART and stamp.lane in (Lane.HOST, Lane.D2H):
            node = sent_as(node)  # a copy on the host
        elif stamp.role is Role.KEEP and node.target is torch.ops.fxzero.keep_grad.default:
            return None
        elif stamp.role is Role.ACCUMULATE:
            kinds = [_reductions(part) for part in node.args if isinstance(part, fx.Node)]
            if kinds[0] is None or kinds[1] is None:
                return None
            # Every micro-step's gradient passes the same reductions.
            return [*groups, *kinds[0], *(kinds[1] if kinds[1] != kinds[0] else [])]
        elif stamp.role in (Role.FINISH, Role.PREPARE, Role.KEEP):
            node = node.all_input_nodes[0]
        else:
            break
    return groups

"""What is always true of a step graph, checked after every pass.

    stamped       every node has a stamp
    waits         every collective is waited for exactly once per tensor, after its launch
                  and before its first use
    releases      nothing reads a parameter after its release
    reductions    every trainable parameter's gradient is reduced exactly once (in a step of
                  several micro-batches, each of its terms) before it leaves the graph or
                  updates the parameter
    updates       nothing reads a parameter, or a buffer, after it was updated
    randomness    a random node is never run twice
    ranks         the sequence of collectives is the same on all ranks (`check_ranks`)

A failure shows the node, ten nodes either side, the user's source line and what to do.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterable

import torch
from torch import fx

from fxzero._compat import default_store
from fxzero.errors import VerificationError
from fxzero.graph.aliases import view_base
from fxzero.graph.operators import is_random
from fxzero.graph.stamps import Lane, Role, has_stamp, stamp_of
from fxzero.graph.step_graph import StepGraph, node_line

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
    if known & {"gathered", "reduced", "cut"}:
        check_waits(graph, after)
        check_releases(graph, after)
    if "reduced" in known and "cut" not in known:
        check_reductions(graph, after)
    if "updated" in known:
        check_updates(graph, after)


def _fail(graph: StepGraph, node: fx.Node, after: str, rule: str, advice: str) -> None:
    nodes = list(graph.graph.nodes)
    at = nodes.index(node) if node in nodes else 0
    near = nodes[max(at - 10, 0) : at + 11]
    lines = [f"{'>' if n is node else ' '} {node_line(n)}" for n in near]
    source = _source_line(node)
    where = f"\nfrom {source}" if source else ""
    raise VerificationError(
        f"after pass {after!r}: {rule}{where}\n\n" + "\n".join(lines) + f"\n\n{advice}"
    )


def _source_line(node: fx.Node) -> str:
    """The innermost line of the user's code that made a node."""
    trace = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines()]
    trace = [line for line in trace if line.strip("^~ ")]  # Python 3.11 underlines
    return " ".join(trace[-2:])


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
    """No random node is a repetition of another one."""
    for node in graph.graph.nodes:
        if is_random(node) and stamp_of(node).again:
            _fail(
                graph,
                node,
                after,
                f"random node {node.name} repeats {stamp_of(node).again}: backward would see other "
                "numbers than forward",
                "Save its result instead of running it again.",
            )


def check_waits(graph: StepGraph, after: str) -> None:
    """Every tensor of every collective is joined once, and only its wait reads it."""
    for node in graph.graph.nodes:
        if node.op != "call_function" or stamp_of(node).role is not Role.LAUNCH:
            continue
        tensors = node.meta.get("val")
        if isinstance(tensors, (list, tuple)):
            in_flight = [u for u in node.users if u.target is operator.getitem]
            count = [sum(1 for p in in_flight if p.args[1] == i) for i in range(len(tensors))]
            _only_read_by(graph, after, node, lambda u: u.target is operator.getitem)
        else:
            in_flight, count = [node], [1]
        for part in in_flight:
            _only_read_by(graph, after, part, lambda u: stamp_of(u).role is Role.WAIT)
        waits = sum(1 for part in in_flight for _ in part.users)
        if waits != len(count) or any(n != 1 for n in count):
            _fail(
                graph,
                node,
                after,
                f"collective {node.name} carries {len(count)} tensors and is waited for {waits} "
                "times",
                "Each launched tensor needs exactly one wait_tensor.",
            )


def _only_read_by(
    graph: StepGraph, after: str, node: fx.Node, allowed: Callable[[fx.Node], bool]
) -> None:
    for user in node.users:
        if not allowed(user):
            _fail(
                graph,
                user,
                after,
                f"{user.name} reads {node.name}, which is still in flight",
                "Read the result of its wait_tensor instead.",
            )


def check_releases(graph: StepGraph, after: str) -> None:
    """Nothing looks at memory after its release, through views or directly."""

    def released(node: fx.Node) -> Iterable[fx.Node]:
        return node.all_input_nodes if node.target in _RELEASES else ()

    _nothing_reads_after(
        graph, after, released, "released its memory", "Move the release behind the last reader."
    )


def _nothing_reads_after(
    graph: StepGraph,
    after: str,
    ended_by: Callable[[fx.Node], Iterable[fx.Node]],
    what: str,
    advice: str,
) -> None:
    """See that memory is not read once a node has ended what it held."""
    owner: dict[fx.Node, fx.Node] = {}
    ended: dict[fx.Node, fx.Node] = {}
    for node in graph.graph.nodes:
        base = view_base(node)
        owner[node] = owner[base] if base is not None else node
        for source in node.all_input_nodes:
            end = ended.get(owner[source])
            if end is not None:
                rule = f"{node.name} reads {source.name} after {end.name} {what}"
                _fail(graph, node, after, rule, advice)
        for source in ended_by(node):
            ended[owner[source]] = node


def check_reductions(graph: StepGraph, after: str) -> None:
    """Each trainable parameter's gradient passes through its reductions exactly once."""
    values = graph.output_values
    for position, key in graph.gradients.items():
        node = values[position]
        if isinstance(node, fx.Node):
            _check_reduced(graph, node, key, after)
    for node in graph.graph.nodes:
        if node.op == "call_function" and stamp_of(node).role is Role.RESHARD:
            _fail(
                graph,
                node,
                after,
                f"the gradient marker {node.name} was left in the graph",
                "shard_grads replaces all of them: is its parameter's gradient an output?",
            )


def _check_reduced(graph: StepGraph, node: fx.Node, key: str, after: str) -> None:
    """See that a gradient passed the reductions of its parameter."""
    spec = graph.specs[key]
    expected = [g.name for g in (spec.shard_group, *spec.replica_groups) if g is not None]
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


def check_updates(graph: StepGraph, after: str) -> None:
    """Updates get reduced gradients, and come after the last reader of what they change."""

    def changed(node: fx.Node) -> Iterable[fx.Node]:
        if node.op != "call_function" or stamp_of(node).role is not Role.UPDATE:
            return ()
        targets = node.args[0]
        assert isinstance(targets, (list, tuple))
        return [target for target in targets if isinstance(target, fx.Node)]

    _nothing_reads_after(
        graph, after, changed, "has changed it", "Move the update behind the last reader."
    )
    for node in graph.nodes(role=Role.UPDATE):
        gradients = node.args[1]
        assert isinstance(gradients, (list, tuple))
        for key, gradient in zip(stamp_of(node).params, gradients, strict=False):
            assert isinstance(gradient, fx.Node)
            _check_reduced(graph, gradient, key, after)


def _reductions(node: fx.Node) -> list[str] | None:
    """Names of the groups that a gradient was reduced over; None if it was kept."""
    groups: list[str] = []
    while node.op == "call_function":
        stamp = stamp_of(node)
        if stamp.role is Role.PART and stamp.lane is Lane.REDUCE:
            launch, index = node.args
            assert isinstance(launch, fx.Node)
            groups.append(str(launch.args[-1]))
            node = launch.args[0][index]  # type: ignore[index, assignment]
        elif stamp.role is Role.KEEP and node.target is torch.ops.fxzero.keep_grad.default:
            return None
        elif stamp.role is Role.ACCUMULATE:
            kinds = [_reductions(part) for part in node.all_input_nodes]
            if kinds[0] is None or kinds[1] is None:
                return None
            # Every micro-step's gradient passes the same reductions.
            return [*groups, *kinds[0], *(kinds[1] if kinds[1] != kinds[0] else [])]
        elif stamp.role in (Role.WAIT, Role.FINISH, Role.PREPARE, Role.KEEP):
            node = node.all_input_nodes[0]
        else:
            break
    return groups


def collectives_digest(graph: StepGraph) -> str:
    """A hash of the sequence of collectives: operators, groups, global shapes and dtypes."""
    digest = hashlib.sha256()
    for transfer in graph.transfers():
        stamp = transfer.stamp
        words = [stamp.phase.value, str(transfer.launch.target), *stamp.params]
        words += [str(argument) for argument in transfer.launch.args[1:-1]]
        words += [str(node.meta["val"].dtype) for node in transfer.tensors]
        digest.update("|".join(words).encode())
    return digest.hexdigest()


_posted: dict[str, list[str]] = {}


def check_ranks(graph: StepGraph, identity: str, rank: int) -> None:
    """Compare this rank's collectives with the first rank that compiled the same graph.

    Nothing is waited for: the first to arrive posts its digest in the process group's
    store, later ones compare. A model's graphs are numbered in the order in which new
    sequences of collectives appear, so that a graph which one rank alone compiles again
    (for another batch size, say) counts once.

    Args:
        identity: what the ranks agree to call the model.

    Raises:
        VerificationError: the sequences differ; going on would hang in a collective.
    """
    store = default_store()
    if store is None or not graph.transfers():
        return
    digest = collectives_digest(graph)
    versions = _posted.setdefault(identity, [])
    if digest in versions:
        return
    versions.append(digest)
    key = f"fxzero/collectives/{identity}/{len(versions)}"
    first = store.compare_set(key, "", f"{digest} {rank}").decode()
    theirs, _, first_rank = first.partition(" ")
    if theirs != digest:
        order = "\n".join(
            f"  {t.stamp.phase.value} {t.launch.target} {', '.join(t.stamp.params)}"
            for t in graph.transfers()[:20]
        )
        raise VerificationError(
            f"rank {rank} and rank {first_rank} would run different sequences of collectives for "
            f"the same graph, and hang. This rank's sequence begins with\n{order}\n"
            "Build the model and call it alike on all ranks: the same branches, the same frozen "
            "parameters, the same options."
        )

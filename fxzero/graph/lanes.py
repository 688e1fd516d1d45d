"""What must hold between lanes: what `verify` asks of copies between pools, and of host updates.

    up = upload([w]); …; wait(up); A(w')       the device reads no memory of the host but copies,
                                               and their waits come before what they copy changes
    down = download([dw]); h = arrived(down)   only the host's lane reads what only it waits for
    u = update([w], [h]); …; join([u])         nothing else reads what an update is changing

A read in one lane of what another one writes is ordered by a wait, or it is a race, which may show
on one machine and not on another. None of it needs a run to be found.

The order of nodes is enough, as the runtime keeps one promise: **work that a lane is given at some
point of the step sees all that compute has waited for up to that point**. Where the device is a CPU
that goes without saying. Of a GPU compute waits by events, on which it is as far behind as it likes
to be; there lanes begin behind an event that is recorded when they are given their work
(`fxzero.runtime.lanes`). The host's own part of a copy, a cast, may come before: it is of what
lives on the host, which its update alone changes, behind its last reader.
"""

from __future__ import annotations

from bisect import bisect, bisect_left
from collections.abc import Iterator

from torch import fx

from fxzero.graph.aliases import readers, root
from fxzero.graph.belongings import Finding
from fxzero.graph.copies import elsewhere, wrong_copy
from fxzero.graph.late_updates import wrong_starts
from fxzero.graph.operators import num_bytes, writes_memory
from fxzero.graph.stamps import BESIDE_COMPUTE, Lane, Role, stamp_of
from fxzero.graph.step_graph import StepGraph, TransferNodes, sent_by
from fxzero.graph.streamed_states import brings_back, overwritten_by, wrong_streamed_states
from fxzero.graph.streams import is_stream, wrong_streams
from fxzero.transfer import Pool

ALIGNMENT = 64
"""Bytes: where places in a block of memory begin, for vector instructions and dtypes alike."""


def aligned(num_bytes: int) -> int:
    """So many bytes, rounded up to where the next place may begin."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def wrong_lanes(graph: StepGraph) -> Iterator[Finding]:
    """Reads that nothing orders, places that are given twice, and copies of something else."""
    found = [transfer for transfer in graph.transfers() if transfer.is_copy]
    down = [copy for copy in found if copy.stamp.lane is Lane.D2H]
    writers = [node for node in graph.graph.nodes if _writes(node)]
    yield from _read_by_compute(graph)
    yield from elsewhere(graph)
    for copy in found:
        if is_stream(copy):
            continue
        yield from wrong_copy(copy)
        yield from _changed_meanwhile(copy, writers)
        yield from _returned(graph, copy)
    yield from _copied_over(found, list(graph.nodes(role=Role.AHEAD)))
    for update in graph.nodes(role=Role.UPDATE):
        yield from _wrong_host(update)
        if stamp_of(update).lane is Lane.HOST:
            yield from _not_joined(update)
    yield from _shared_places(graph, down)
    yield from wrong_starts(graph, down)
    yield from wrong_streams(graph, [copy for copy in found if is_stream(copy)])
    yield from wrong_streamed_states(graph, found)


def _read_by_compute(graph: StepGraph) -> Iterator[Finding]:
    """Values in the host's memory are for copies and for the host's lane, and those on disk for
    the disk's."""
    for node in graph.graph.nodes:
        pool = Pool.DEVICE if node.op == "output" else stamp_of(node).pool
        if pool is Pool.DEVICE:
            continue
        for user in node.users:
            if user.op == "output" and graph.loss is None and _is_there(node):
                continue
            if user.op == "output" or stamp_of(user).lane not in _may_read(node):
                where = "in the host's memory" if pool is Pool.HOST else "on disk"
                yield Finding(
                    user,
                    f"{user.name} reads {node.name}, which is {where} and which nothing makes it "
                    "wait for",
                    "Read a copy of it, behind its wait: fxzero.passes.offload_states.",
                )


def _is_there(node: fx.Node) -> bool:
    """Whether a value in the host's memory may leave a graph of the ordinary loop: a parameter,
    which backward gets so, or a gradient for whose copy compute has waited."""
    return node.op == "placeholder" or stamp_of(node).lane is Lane.D2H


def _may_read(node: fx.Node) -> frozenset[Lane]:
    """The lanes that may read a value in the host's memory, or on disk."""
    if stamp_of(node).pool is Pool.DISK:
        return frozenset({Lane.READ, Lane.HOST, Lane.D2H})  # a gradient is laid out like it
    only_by_host = node.op == "call_function" and stamp_of(node).lane is Lane.HOST
    return frozenset({Lane.HOST}) if only_by_host else BESIDE_COMPUTE


def _changed_meanwhile(copy: TransferNodes, writers: list[fx.Node]) -> Iterator[Finding]:
    """What is being copied must not change before the copy is there.

    Args:
        writers: all nodes that may change something, in order.
    """
    end = copy.wait
    if stamp_of(end).lane is Lane.HOST:  # only the host's lane has waited
        landed = [user for user in copy.launch.users if stamp_of(user).role is Role.RELEASE]
        end = min(landed, default=copy.launch.graph.output_node())
    between = {*writers[bisect(writers, copy.launch) : bisect_left(writers, end)]}
    for source in copy.tensors if between else ():  # most copies have nothing to fear
        for user in _writers(source, between):
            yield Finding(
                user,
                f"{user.name} changes {source.name} while {copy.launch.name} copies it, which "
                f"is waited for by {end.name}",
                "Wait for the copy first.",
            )


def _writers(source: fx.Node, among: set[fx.Node]) -> Iterator[fx.Node]:
    """What writes to a value's memory: updates to what they change and to the gradients that they
    scale, operators that write to their first argument, and what is copied over it."""
    for alias in [root(source), *readers(root(source))]:
        for user in alias.users:
            if user in among and (
                stamp_of(user).role is Role.UPDATE
                or (writes_memory(user) and user.args and user.args[0] is alias)
                or alias in overwritten_by(user)
            ):
                yield user


def _writes(node: fx.Node) -> bool:
    """Whether a node changes what another one has made."""
    if node.op != "call_function":
        return False
    is_update = stamp_of(node).role is Role.UPDATE
    return is_update or writes_memory(node) or bool(overwritten_by(node))


def _returned(graph: StepGraph, copy: TransferNodes) -> Iterator[Finding]:
    """A copy that stays on the device is copied over: whoever calls the step must not hold it."""
    if not hasattr(copy.launch.target, "ahead"):
        return
    seen = {*copy.parts, *readers(*copy.parts)}
    for value in graph.output.all_input_nodes:
        if value in seen and root(value) in copy.parts:
            yield Finding(
                value,
                f"the step returns {value.name}, which {copy.launch.name} keeps for the next one",
                "Return a copy of it.",
            )


def _copied_over(copies: list[TransferNodes], ahead: list[fx.Node]) -> Iterator[Finding]:
    """The next step's copies go where this one's are, once nothing reads those."""
    taken = {id(getattr(copy.launch.target, "ahead", None)): copy for copy in copies}
    for node in ahead:
        if stamp_of(node).lane is not Lane.H2D:
            continue
        copy = taken.pop(id(getattr(node.target, "ahead", None)), None)
        if copy is None or (sent_by(node), node.args[2:]) != (copy.tensors, copy.launch.args[1:]):
            yield Finding(
                node,
                f"{node.name} copies for the next step what no copy of this one takes alike, or "
                "twice",
                "Take and launch by one Resident: fxzero.passes.join_copies.",
            )
            continue
        for reader in readers(*copy.parts):
            if node < reader:
                yield Finding(
                    reader,
                    f"{reader.name} reads what {copy.launch.name} has brought, which {node.name} "
                    "has begun to copy over",
                    "Copy for the next step behind the last reader.",
                )


def _wrong_host(update: fx.Node) -> Iterator[Finding]:
    """An update of what is on the host that does not run there, or takes what is not there."""
    stamp = stamp_of(update)
    on_host = stamp.lane is Lane.HOST
    if on_host != getattr(update.target, "runs_on_host", False):
        yield Finding(
            update,
            f"{update.name} is stamped for lane {stamp.lane} and calls {update.target}",
            "An update on the host is a HostUpdate: fxzero.passes.offload_states.",
        )
        return
    if not on_host:
        return
    params, grads, state = update.args[:3]
    assert isinstance(params, (list, tuple))
    assert isinstance(grads, (list, tuple))
    assert isinstance(state, (list, tuple))
    may = {Pool.HOST, Pool.DISK} if hasattr(update.target, "bucket") else {Pool.HOST}
    for node in (*params, *grads, *(node for part in state for node in part)):  # type: ignore[union-attr]
        assert isinstance(node, fx.Node)
        if stamp_of(node).pool not in may:
            yield Finding(
                update,
                f"{update.name} runs on the host and takes {node.name}, which is on the device",
                "Copy it down first, or hold it there.",
            )
    for key, grad in zip(stamp.params, grads, strict=True):
        assert isinstance(grad, fx.Node)
        if stamp_of(grad).params != (key,):
            yield Finding(
                update,
                f"{update.name} takes {grad.name} for the gradient of {key.partition('/')[2]}, and "
                f"it is that of {stamp_of(grad).params}",
                "Keep parameters and gradients in one order.",
            )


def _not_joined(update: fx.Node) -> Iterator[Finding]:
    """An update on the host is waited for once, before anything but its lane reads what it
    changes."""
    joins = [user for user in update.users if stamp_of(user).role is Role.JOIN]
    behind = {
        user for user in update.users if stamp_of(user).lane in (Lane.H2D, Lane.D2H, Lane.WRITE)
    }
    if len(joins) != 1 or len(update.users) != 1 + len(behind):
        yield Finding(
            update,
            f"{update.name}, which runs on the host, is joined {len(joins)} times and read "
            f"{len(update.users)} times",
            "Every update on the host is joined once, and nothing else reads it.",
        )
        return
    for node in update.all_input_nodes:
        if node.op != "placeholder" or stamp_of(node).pool is not Pool.HOST:
            continue
        for user in node.users:
            if update < user < joins[0] and user not in behind:
                yield Finding(
                    user,
                    f"{user.name} reads {node.name}, which {update.name} changes until "
                    f"{joins[0].name}",
                    "Read it before the update starts, or once it is joined.",
                )


def _shared_places(graph: StepGraph, copies: list[TransferNodes]) -> Iterator[Finding]:
    """Places in the staging area, each of which is read until a node of the step."""
    taken: list[tuple[int, int, fx.Node, fx.Node]] = []
    done = _waited_before(copies)
    read_by: dict[fx.Node, set[fx.Node]] = {}
    for copy in copies:
        if not is_staged(copy):
            continue
        read_by[copy.launch] = {user for part in copy.parts for user in part.users}
        staging, offsets = copy.launch.args[2:4]
        assert isinstance(staging, fx.Node)
        assert isinstance(offsets, (list, tuple))
        until = _last_reader(graph, copy)
        for begin, tensor in zip(offsets, copy.tensors, strict=True):
            end = int(begin) + num_bytes(tensor)
            if int(begin) < 0 or int(begin) % ALIGNMENT or end > num_bytes(staging):
                yield Finding(
                    copy.launch,
                    f"{copy.launch.name} copies {tensor.name} to bytes {begin} to {end} of "
                    f"{num_bytes(staging)}",
                    f"Begin at multiples of {ALIGNMENT} in an area that has room for all.",
                )
            if end > int(begin):
                taken.append((int(begin), end, copy.launch, until))
    taken.sort(key=lambda place: place[:2])
    for i, (begin, end, first, until) in enumerate(taken):
        for start, _, second, later in taken[i + 1 :]:
            if start >= end:
                break
            early, late = sorted((first, second))
            if read_by[early] and read_by[early] <= done[late]:
                continue
            if begin < end and first < later and second < until:
                yield Finding(
                    late,
                    f"{late.name} copies to byte {start}, where {early.name} has copied what is "
                    "still to be read",
                    "Give every value a place of its own until its last reader.",
                )


def is_staged(copy: TransferNodes) -> bool:
    """Whether a copy to the host goes to a place that is said, and not to memory of its own."""
    return len(copy.launch.args) > 2 and not brings_back(copy)


def _waited_before(copies: list[TransferNodes]) -> dict[fx.Node, set[fx.Node]]:
    """By copy, the updates that are done when it begins: those that it waits for, and those that
    copies before it on their lane have waited for."""
    found: dict[fx.Node, set[fx.Node]] = {}
    done: set[fx.Node] = set()
    for copy in filter(is_staged, copies):
        behind = copy.launch.args[5]
        assert isinstance(behind, (list, tuple))
        done |= set(behind)  # type: ignore[arg-type]
        found[copy.launch] = set(done)
    return found


def _last_reader(graph: StepGraph, copy: TransferNodes) -> fx.Node:
    """The node behind which nothing reads what was copied to the host."""
    if stamp_of(copy.wait).lane is Lane.HOST:
        return graph.output  # an update, whose end the step's end waits for
    found = readers(*copy.parts)  # copies to the device, until their waits
    return max(found, default=copy.wait)

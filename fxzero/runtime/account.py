"""What a graph is to the other ranks: a digest of its collectives, and words about it.

The digest holds what makes two graphs' collectives belong together: which operators, in which
order of launches, for which parameters, with which shapes and dtypes. What a rank computes in
between is its own affair, so another batch size, or an evaluation that gathers alike, is equal.
What a step was compiled with, and shows in no collective, is there too: where it clips.
"""

from __future__ import annotations

import hashlib
from typing import Any

from torch import fx

from fxzero.graph import Lane, Phase, Role, StepGraph
from fxzero.graph.stamps import stamp_of
from fxzero.graph.steady import runs_of
from fxzero.ranks.agree import Account, channel_of, digest_of
from fxzero.ranks.places import user_line
from fxzero.sharding.layout import BETWEEN_STAGES
from fxzero.transfer import Transfer, TransferKind


def collectives_digest(graph: StepGraph) -> str:
    """A hash of the sequence of collectives: operators, parameters, global shapes and dtypes."""
    digest = hashlib.blake2b(digest_size=16)
    for node in _launches(graph):
        stamp, record = stamp_of(node), _record_of(node)
        if record.axis in BETWEEN_STAGES:
            continue  # of which ranks of other stages run others: see `StepGraph.in_common`
        words = [stamp.phase.value, stamp.role.value, _name(node.target), *stamp.params]
        words += [str(graph.specs[k].shape) for k in stamp.params if k in graph.specs]
        # Not the group's name: ranks of other groups along the same axis have names of their own.
        words += [record.kind.value, record.axis, str(record.size), record.op, str(record.dtype)]
        words.append(record.alike)
        if not stamp.params and record.kind is not TransferKind.ALL_TO_ALL:
            words.append(str(record.full_bytes))  # an all-to-all may send each rank another size
        digest.update(("|".join(words) + "\n").encode())
    digest.update(f"steady {graph.steady_runs}\n{graph.settings}\n".encode())
    return digest.hexdigest()


def account_of(graph: StepGraph) -> Account | None:
    """What other ranks must know of a graph; None if it does not communicate.

    Nor does it in a fake process group.
    """
    launches = _launches(graph)
    records = [_record_of(node) for node in launches]
    named = dict.fromkeys(r.group for r in records if r.axis not in BETWEEN_STAGES)
    groups = tuple(name for name in named if channel_of(name) is not None)
    stages: tuple[str, ...] = ()
    if graph.pipeline is not None and channel_of(graph.pipeline.group.name) is not None:
        stages = (graph.pipeline.group.name,)
    if not groups and not stages:
        return None
    return Account(
        bytes.fromhex(collectives_digest(graph)),
        groups,
        _about(graph),
        # A stage that gives up must leave no message behind: the next try's have the same tags.
        # All ranks of a pipeline have met at the end of the step before, so that this is soon.
        at_once=bool(stages) or any(map(_is_untagged, launches)),
        stages=stages,
        in_common=digest_of(f"{graph.in_common}\n{graph.settings}") if stages else b"",
    )


def _launches(graph: StepGraph) -> list[fx.Node]:
    """What starts a transfer between ranks, in launch order, be it for the next step."""
    roles = (Role.LAUNCH, Role.AHEAD)
    found = [n for n in graph.nodes() if stamp_of(n).role in roles]
    return [n for n in found if _record_of(n).kind is not TransferKind.COPY]


def _is_untagged(launch: fx.Node) -> bool:
    """Whether a collective would mix with others, or end the process, before ranks have compared.

    That is gloo's own. On NCCL the kernels are launched first and the host compares meanwhile.
    """
    on_cpu = any(node.meta["val"].device.type == "cpu" for node in _sent(launch))
    return on_cpu and not _module(launch.target).startswith("fxzero.")


def _sent(launch: fx.Node) -> list[fx.Node]:
    """The tensors that a collective sends."""
    first = launch.args[0] if launch.args else ()
    tensors = first if isinstance(first, (list, tuple)) else (first,)
    return [n for n in tensors if isinstance(n, fx.Node) and hasattr(n.meta.get("val"), "dtype")]


def _name(target: Any) -> str:
    """A name for a function that is equal in all processes."""
    return f"{_module(target)}.{getattr(target, '__name__', target)}"


def _module(target: Any) -> str:
    return str(getattr(target, "__module__", ""))


def _record_of(launch: fx.Node) -> Transfer:
    """What a launch starts."""
    record = stamp_of(launch).transfer
    assert record is not None
    return record


def _about(graph: StepGraph) -> dict[str, Any]:
    """What a person wants to know, in case ranks disagree."""
    transfers = [transfer for transfer in graph.transfers() if not transfer.is_copy]
    uses: dict[str, str] = {}
    for transfer in transfers:
        for key, part in zip(transfer.stamp.params, transfer.parts, strict=False):
            name = key.partition("/")[2] or key
            uses[name] = uses.get(name) or _line_of(part)
    compute = (n for n in graph.nodes() if stamp_of(n).role in (Role.COMPUTE, Role.REGION))
    line = next((line for node in compute if (line := _line_of(node))), "")
    phases = {transfer.stamp.phase for transfer in transfers}
    whole = {Phase.FORWARD, Phase.BACKWARD} <= phases
    return {
        "kind": "graph",
        "phase": "step" if whole else min((p.value for p in phases), default="forward"),
        "collectives": sum(runs_of(graph, t.stamp) for t in transfers),
        "gathers": sum(runs_of(graph, t.stamp) for t in transfers if t.stamp.lane is Lane.GATHER),
        "transfers": {t.launch.name: _told(t.launch) for t in transfers},
        "uses": uses,
        "line": line,
        "settings": graph.settings,
    }


def _told(launch: fx.Node) -> str:
    """A transfer's bucket, parameters, layer and phase, for a person."""
    stamp = stamp_of(launch)
    names = [key.partition("/")[2] or key for key in stamp.params]
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    layer = f", layer {stamp.layer}" if stamp.layer else ""
    what = f": {shown}{layer}, {stamp.phase.value}" if names else ""
    return f"{stamp.bucket or launch.name}{what}"


def _line_of(node: fx.Node) -> str:
    return user_line(node.meta.get("stack_trace"))

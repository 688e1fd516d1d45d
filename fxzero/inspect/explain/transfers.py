"""Why a transfer is where it is: what it brings, when it is on the wire, what waits for it."""

from __future__ import annotations

from collections.abc import Iterator

from fxzero.inspect.analysis import TransferRow
from fxzero.inspect.detail import NodeRow
from fxzero.inspect.explain.explanation import Answer, Setting
from fxzero.inspect.explain.view import View
from fxzero.inspect.units import duration, sentence, several, size

GATHERS = (
    ("prefetch.distance", "how many buckets ahead of its use a gather starts; 0 is right before"),
    ("prefetch.budget_bytes", "more lets gathers start earlier, and more be kept"),
    ("prefetch.keep", "false gathers again in backward, and holds less between"),
    ("bucket.cap_bytes", "smaller buckets start and end earlier, and pay latency more often"),
    ("gather_ahead.enabled", "true starts a step's first gathers in the step before"),
    ("memory_budget", "a bound on the peak: less is gathered ahead and kept under it"),
)
REDUCES = (
    ("prefetch.reduce_distance", "with prefetch.distance: how many reduces may be in flight"),
    ("bucket.cap_bytes", "smaller buckets start earlier, and pay latency more often"),
    ("bucket.min_bytes", "below it a bucket travels with its neighbour"),
)
COPIES = (
    ("offload_states.share", "how much of the optimizer's state is on the host"),
    ("offload_params.share", "how much of the parameters is on the host"),
    ("offload_activations.share", "how much of what backward reads is on the host meanwhile"),
)

WHY = {
    ("gather", 3, "forward"): "ZeRO-3 holds 1/{ranks} of a parameter between its uses, and forward "
    "needs it in full",
    ("gather", 3, "backward"): "ZeRO-3 has released what forward gathered, and backward needs it "
    "in full again",
    ("gather", 2, "forward"): "at ZeRO-{zero} parameters are full from one gather in a step to "
    "their last use; between steps each rank has the 1/{ranks} that it updates",
    ("reduce", 3, "backward"): "each rank keeps the averaged gradient of its own 1/{ranks} of a "
    "parameter",
    ("reduce", 0, "backward"): "every rank updates every parameter, and needs the whole averaged "
    "gradient",
}


def why(view: View, transfer: TransferRow) -> str:
    """Why a transfer exists."""
    zero = view.analysis.zero
    lane, phase = transfer.lane, transfer.phase
    if not transfer.between_ranks:
        return f"what it moves has its place elsewhere: {transfer.operator}"
    if not transfer.params:
        if phase == "optimizer":
            return "the norm of all gradients is a sum over the ranks' parts"
        return "the model sends it itself: it stays where its author put it"
    stage = zero if lane == "gather" and zero == 3 else (2 if lane == "gather" else 3 * (zero > 0))
    text = (
        WHY.get((lane, stage, phase))
        or WHY.get((lane, stage, "forward"))
        or WHY.get((lane, stage, "backward"), "parameters or gradients travel in it")
    )
    return text.format(ranks=transfer.num_ranks, zero=zero)


def answers(view: View, bucket: str) -> Iterator[Answer]:
    """What there is to say of a bucket that travels."""
    transfer = view.transfers[bucket]
    rows = view.of_bucket.get(bucket, [])
    launch = next((row for row in rows if row.role in ("launch", "ahead")), None)
    wait = next((row for row in rows if row.role == "wait"), None)
    yield Answer(
        "Why is it there?",
        f"{sentence(why(view, transfer))}. It carries {size(transfer.num_bytes)}"
        + (f" of {several(transfer.params)}" if transfer.params else "")
        + (f", {transfer.runs} times in a step" if transfer.runs > 1 else "")
        + ".",
        {
            "num_bytes": transfer.num_bytes,
            "sent_bytes": transfer.sent_bytes,
            "params": list(transfer.params),
            "runs": transfer.runs,
        },
    )
    if launch is not None:
        yield _when(view, launch, wait)
    if transfer.params and transfer.lane in ("gather", "reduce"):
        yield _together(view, transfer)
    if wait is not None and transfer.lane == "gather" and transfer.params:
        yield _lifetime(view, rows)


def _when(view: View, launch: NodeRow, wait: NodeRow | None) -> Answer:
    span = view.spans.get(launch.name)
    stall_us = view.stall_us.get(wait.name, 0.0) if wait is not None else 0.0
    if span is None:
        return Answer(
            "Is it hidden?",
            "It takes no time of this step: the step before has started it, or it moves nothing "
            "between this many ranks.",
            {"stall_us": stall_us},
        )
    hidden_us = max(span.us - stall_us, 0.0)
    order = view.decision("prefetch")
    by = f" (order found by {order['by']})" if order.get("by") else ""
    text = (
        f"It is on the {launch.lane} lane from {duration(span.start_us)} to "
        f"{duration(span.start_us + span.us)}: {duration(span.us)}, of which "
        f"{duration(hidden_us)} beside other work{by}"
    )
    if stall_us:
        text += f"; compute waits {duration(stall_us)} for it."
    else:
        text += "; nothing waits for it."
    late = "Joined as soon as it is launched" if launch.lane == "reduce" else "Started at its use"
    text += (
        f" {late}, it would hold up compute for all of {duration(span.us)}."
        if hidden_us
        else " Nothing that could run meanwhile stands between its launch and its use."
    )
    return Answer(
        "Is it hidden?",
        text,
        {
            "start_us": span.start_us,
            "us": span.us,
            "hidden_us": hidden_us,
            "stall_us": stall_us,
            "next_best_stall_us": span.us,
        },
    )


def _together(view: View, transfer: TransferRow) -> Answer:
    chosen = view.decision("bucket")
    caps = chosen.get("cap_bytes") or []
    least = chosen.get("least_bytes") or []
    text = f"{len(transfer.params)} parameters travel together"
    if least:
        text += (
            f": below {' or '.join(map(size, least))} latency is more than a tenth of the time, "
            "and a bucket travels with its neighbour"
        )
    if caps:
        text += f"; none grows beyond {' or '.join(map(size, caps))}"
    launches = [t for t in view.transfers.values() if t.lane == transfer.lane and t.params]
    text += f". There are {len(launches)} such buckets in this graph."
    return Answer("Why with these?", text, {"cap_bytes": list(caps), "least_bytes": list(least)})


def _lifetime(view: View, rows: list[NodeRow]) -> Answer:
    parts = [row for row in rows if row.role in ("part", "finish")]
    readers = [reader for part in parts for reader in view.readers(part)]
    releases = [reader for reader in readers if reader.role == "release"]
    uses = [reader for reader in readers if reader.lane == "compute"]
    in_backward = [use for use in uses if use.phase == "backward"]
    kept = [name for name in view.kept if name.startswith("gather.")]
    text = f"{len({use.name for use in uses})} nodes read it"
    if in_backward:
        text += (
            f", {len({use.name for use in in_backward})} of them in backward: it is kept from "
            f"forward, which spares a gather (spared in this step: {several(kept) or 'none'})"
        )
    elif view.analysis.zero == 3:
        text += "; it is released behind the last of them, and gathered again where it is needed"
    if not releases:
        text += ". It is not released within the step"
    return Answer(
        "How long does it live?",
        text + ".",
        {"readers": len(uses), "in_backward": len(in_backward), "spared_gathers": kept},
    )


def settings(view: View, lane: str) -> tuple[Setting, ...]:
    """What would change a transfer of a lane."""
    known = {"gather": GATHERS, "reduce": REDUCES, "h2d": COPIES, "d2h": COPIES}
    return view.settings(known.get(lane, ()))

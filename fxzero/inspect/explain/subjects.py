"""What there is to say of a parameter, a module, a bucket and a pass."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterator

from fxzero.compiler.pipelines import LOWERING, SCHEDULING
from fxzero.inspect.analysis import PassRow, TransferRow
from fxzero.inspect.detail import NodeRow
from fxzero.inspect.explain import nodes, transfers
from fxzero.inspect.explain.explanation import Answer, Explanation
from fxzero.inspect.explain.view import View
from fxzero.inspect.units import duration, sentence, several, size

ZERO = (
    ("bucket.cap_bytes", "what travels together"),
    ("prefetch.keep", "whether backward reads what forward gathered"),
    ("offload_params.share", "how much of the parameters lives on the host"),
)


def of_bucket(view: View, name: str) -> Explanation:
    """A bucket that travels, or one that `prefetch` has found that need not."""
    if name in view.transfers:
        transfer = view.transfers[name]
        return Explanation(
            "bucket",
            name,
            view.graph,
            f"{transfer.operator} of {size(transfer.num_bytes)} in {transfer.phase}",
            tuple(transfers.answers(view, name)),
            transfers.settings(view, transfer.lane),
        )
    carried = next(b for b in view.decision("bucket")["buckets"] if b["name"] == name)
    mine = set(carried["params"])
    earlier = [t for t in view.transfers.values() if t.lane == "gather" and mine & set(t.params)]
    held_bytes = sum(t.num_bytes for t in earlier)
    spared_us = sum(view.spans[row.name].us for row in _launches(view, earlier))
    order = view.decision("prefetch")
    budget = order.get("budget_bytes")
    text = (
        f"No: {several(carried['params'])} are read in {carried['phase']} as "
        f"{several([t.bucket for t in earlier])} brought them. To gather them again would take "
        f"some {duration(spared_us)} on the link; to keep them holds up to {size(held_bytes)}, "
        f"within the {size(budget) if budget is not None else 'unbounded bytes'} that transfers "
        f"may hold (they hold {size(order.get('held_bytes', 0))} at most)"
    )
    numbers = {"held_bytes": held_bytes, "spared_us": spared_us, "budget_bytes": budget}
    answer = Answer("Does it travel?", text + ".", numbers)
    return Explanation(
        "bucket",
        name,
        view.graph,
        f"a gather that is spared in {carried['phase']}",
        (answer,),
        transfers.settings(view, "gather"),
    )


def _launches(view: View, found: list[TransferRow]) -> list[NodeRow]:
    rows = [row for transfer in found for row in view.of_bucket.get(transfer.bucket, [])]
    return [row for row in rows if row.role == "launch" and row.name in view.spans]


def of_parameter(view: View, name: str) -> Explanation:
    """A parameter's way through the step."""
    travels = [t for t in view.transfers.values() if name in t.params]
    rows = [r for r in view.outline.values() if r.params == (name,) or name in r.params]
    full = next((r for r in rows if r.role in ("part", "finish") and r.lane == "gather"), None)
    ranks = max((t.num_ranks for t in travels), default=view.analysis.world_size)
    answers = [
        Answer(
            "Where does it live?",
            f"Under ZeRO-{view.analysis.zero}, "
            + (
                f"each of {ranks} ranks holds and updates its part of it"
                if view.analysis.zero
                else "each rank holds and updates all of it"
            )
            + (f"; in full it takes {size(full.num_bytes)}" if full is not None else "")
            + ".",
            {"ranks": ranks, "full_bytes": full.num_bytes if full is not None else None},
        )
    ]
    for transfer in travels:
        answers.append(_way(view, transfer))
    spared = [
        bucket["name"]
        for bucket in view.decision("bucket").get("buckets", [])
        if name in bucket["params"] and bucket["name"] in view.kept
    ]
    if spared:
        text = f"Not again in {several(spared)}: what was gathered before is read."
        answers.append(Answer("Is it gathered again?", text, {"spared": spared}))
    uses = [
        reader.name
        for row in rows
        if row.role in ("part", "finish", "input")
        for reader in view.readers(row)
        if reader.role in ("compute", "region")
    ]
    if uses:
        text = f"By {several(list(dict.fromkeys(uses)))}."
        answers.append(Answer("Who reads it?", text, {"readers": list(dict.fromkeys(uses))}))
    updates = [row.name for row in view.outline.values() if row.role == "update"]
    mine = [row for row in rows if row.role == "update"]
    where = f"by {mine[0].name}" if mine else ("in this graph" if updates else "by the loop")
    answers.append(Answer("Where is it updated?", f"It is updated {where}.", {}))
    title = f"a parameter in {len(travels)} transfers"
    return Explanation("parameter", name, view.graph, title, tuple(answers), view.settings(ZERO))


def _way(view: View, transfer: TransferRow) -> Answer:
    launches = _launches(view, [transfer])
    when = ""
    if launches:
        span = view.spans[launches[0].name]
        when = f", from {duration(span.start_us)} to {duration(span.start_us + span.us)}"
    others = len(transfer.params) - 1
    return Answer(
        f"Why {transfer.lane} in {transfer.phase}?",
        f"{sentence(transfers.why(view, transfer))}. It goes in {transfer.bucket} with {others} "
        f"others{when}.",
        {"bucket": transfer.bucket, "runs": transfer.runs},
    )


def of_module(view: View, name: str) -> Explanation:
    """A module's, or layer's, part of the step."""
    rows = view.inside(name)
    by_phase: dict[str, float] = defaultdict(float)
    for row in rows:
        if row.lane == "compute" and row.us:
            by_phase[row.phase] += row.us
    kept = [
        row
        for row in rows
        if row.phase == "forward"
        and row.lane == "compute"
        and row.role in ("compute", "part")
        and not row.piece
        and any(reader.phase == "backward" for reader in view.readers(row))
    ]
    params = sorted({p for row in rows for p in row.params if p.startswith(f"{name}.")})
    travels = [
        t for t in view.transfers.values() if any(p.startswith(f"{name}.") for p in t.params)
    ]
    answers = [
        Answer(
            "What does it take?",
            (", ".join(f"{phase} {duration(us)}" for phase, us in by_phase.items()) or "Nothing")
            + f" of compute by the cost model, in {len(rows)} nodes"
            + (", operator by operator." if any(row.piece for row in rows) else "."),
            {f"{phase}_us": us for phase, us in by_phase.items()},
        ),
        Answer(
            "What is kept for backward?",
            f"{size(sum(row.num_bytes for row in kept))} in {len(kept)} values"
            + (f": {several([row.name for row in kept])}" if kept else "")
            + ".",
            {"kept_bytes": sum(row.num_bytes for row in kept)},
        ),
        Answer(
            "What travels for it?",
            (
                f"{len(params)} parameters, in {several([t.bucket for t in travels])}."
                if travels
                else "Nothing: it has no parameters that are sharded."
            ),
            {"buckets": [t.bucket for t in travels]},
        ),
    ]
    return Explanation(
        "module",
        name,
        view.graph,
        f"{len(rows)} nodes, {len(params)} parameters",
        tuple(answers),
        view.settings(nodes.KEEPS),
    )


def of_pass(view: View, name: str, row: PassRow) -> Explanation:
    """What a pass did to a graph, and by what."""
    kind = next((kind for kind in (*SCHEDULING, *LOWERING) if kind.name == name), None)
    text = inspect.getdoc(kind) if kind is not None else None
    made = [n for n in view.detail.nodes if n.made_by == name]
    changes = row.nodes_after - row.nodes_before
    answers = [
        Answer("What is it for?", text or "It is no pass of this version.", {}),
        Answer(
            "What did it do?",
            (
                ", ".join(f"{key}={value}" for key, value in row.notes.items())
                or "It found nothing to do"
            )
            + f". {row.nodes_before} nodes before, {row.nodes_after} after ({changes:+d}); "
            f"{len(made)} nodes of the schedule are of its making.",
            {**row.notes, "nodes_made": len(made), "time_ms": row.time_ms},
        ),
        Answer("With which settings?", f"{row.options}.", {}),
    ]
    chosen = view.decision(name)
    if chosen:
        answers.append(_chosen(chosen))
    schedule = view.schedule
    if "step_us" in chosen and schedule is not None:
        text = (
            f"It chose by a step of {duration(chosen['step_us'])} that waits "
            f"{duration(chosen['exposed_us'])}. With what later passes add, and what one step "
            f"leaves to the next, the step takes {duration(schedule.makespan_us)} and waits "
            f"{duration(schedule.exposed_us)}."
        )
        numbers = {"step_us": schedule.makespan_us, "exposed_us": schedule.exposed_us}
        answers.append(Answer("What does the step come to?", text, numbers))
    return Explanation("pass", name, view.graph, row.options, tuple(answers))


def _chosen(chosen: dict[str, object]) -> Answer:
    parts = []
    for key, value in chosen.items():
        if isinstance(value, list):
            parts.append(f"{len(value)} {key}")
        elif value not in (None, ""):
            shown = size(value) if key.endswith("_bytes") and isinstance(value, int) else value
            shown = duration(value) if key.endswith("_us") and isinstance(value, float) else shown
            parts.append(f"{key} {shown}")
    return Answer("What did it choose?", f"{', '.join(parts) or 'nothing'}.", dict(chosen))


def passes_of(view: View) -> Iterator[tuple[str, PassRow]]:
    """The passes that ran on a graph, by name; of one that ran for both sides of a cut, the first
    run."""
    seen = set()
    for row in view.analysis.passes:
        if row.graph == view.graph and row.name not in seen:
            seen.add(row.name)
            yield row.name, row
